"""Every environment that a page shows passes the check that the pages tell its author to run."""

import re

import pytest
from docs.pages import PAGES, blocks

from marl_ray.conformance.extensions.environment import check

CLASS = re.compile(r"^class (\w+)\((?:\w+\.)?(?:ParallelEnv|AECEnv|TextEnv|Env)(?:\[.*\])?\):", re.MULTILINE)
SHOWN = [block for page in PAGES for block in blocks(page) if CLASS.search(block.text)]


def test_the_pages_show_environments():
    assert {name for block in SHOWN for name in CLASS.findall(block.text)} >= {"NameIt", "MyEnv", "SecretWord"}


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_a_shown_environment_passes_its_check(block, tmp_path, monkeypatch):
    module = f"shown_{block.page.stem}_{block.line}"  # imports are kept, so each block needs a name of its own
    (tmp_path / f"{module}.py").write_text(block.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in CLASS.findall(block.text):
        properties = list(check(f"{module}:{name}", {}))
        assert len(properties) == 7
        assert [str(each) for each in properties if each.failure] == []
