"""Tests of environments in a real browser: what they need here, and that no process of it stays.

A module that imports this one is left out where Playwright is missing. It is marked `slow`, and names `no_chromium_stays`
in `__all__`, which skips its tests where Chromium is missing.
"""

import re
from collections.abc import Iterator

import psutil
import pytest

from servers.installed import need

pytest.importorskip("playwright", reason="no Playwright here: make install")
pytest.importorskip("miniwob", reason="no pages of MiniWoB here: make install")

from marl_ray.envs.web.browser.chromium import close_shared_chromium
from marl_ray.envs.web.environment import BrowserEnv

AGENT = "agent"


@pytest.fixture(scope="module", autouse=True)
def no_chromium_stays() -> Iterator[None]:
    need("Chromium")
    yield
    close_shared_chromium()
    children = [child.name() for child in psutil.Process().children(recursive=True)]
    assert not [name for name in children if "chrom" in name or "node" in name]


def element(env: BrowserEnv, pattern: str) -> str:
    """The id of the first element whose line matches `ROLE 'NAME'`."""
    match = re.search(rf"^\s*\[(\d+)\] {pattern}", env.observe(AGENT), re.MULTILINE)
    assert match, f"no {pattern!r} in {env.observe(AGENT)}"
    return match[1]
