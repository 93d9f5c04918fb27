"""The examples of docs/language_teams/own_parts.md and of environments of texts, which are short and train."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from marl_ray.config import RunConfig, load_config
from marl_ray.training.single_process import train_alone

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "language_teams" / "own_parts.md", DOCS / "extending" / "environments.md")
BLOCK = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {name: text for page in PAGES for name, text in BLOCK.findall(page.read_text()) if "." in name}
RUNS = [name for name in FILES if name.startswith("own_")]
MAX_LINES = 40


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_short(name):
    assert len(FILES[name].splitlines()) < MAX_LINES


def test_every_kind_of_part_has_an_example():
    assert RUNS == ["own_model.yaml", "own_reward.yaml", "own_tool.yaml", "own_env.yaml"]


@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains(name, tmp_path, monkeypatch):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if name == "own_model.yaml":
        runpy.run_path("make_model.py")
    config = load_config(RunConfig, Path(name), [])
    try:
        last = train_alone(config)[-1]
    finally:
        for file in FILES:
            sys.modules.pop(file.removesuffix(".py"), None)
    assert last["steps"] >= config.train.total_steps
    expected = {
        "own_model.yaml": "env/pass",
        "own_reward.yaml": "env/characters",
        "own_tool.yaml": "env/calls",
        "own_env.yaml": "eval/pass_at_2",
    }
    assert expected[name] in last
