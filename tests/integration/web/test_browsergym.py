"""BrowserGym's own environments in a real Chromium. BROWSERGYM_PYTHON names a Python that has BrowserGym, if need be."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from servers.playwright_chromium import AGENT, no_chromium_stays
from waiting import until_ended

from marl_ray.config import EnvConfig
from marl_ray.envs.registry import is_text, make_env
from marl_ray.envs.web.browsergym.environment import BrowserGym

__all__ = ["no_chromium_stays"]
PYTHON = os.environ.get("BROWSERGYM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None and importlib.util.find_spec("browsergym") is None,
        reason="no BrowserGym here: its extra brings it",
    ),
]


def make_browsergym(env_id: str, **kwargs: Any) -> BrowserGym:
    options = {"python": PYTHON, "variants": 1, "held_out": 2, "cost": ["calls"], **kwargs}
    env = make_env(EnvConfig(id=env_id, kwargs=options))
    assert isinstance(env, BrowserGym) and is_text(env)
    return env


@pytest.fixture(scope="module")
def env() -> Iterator[BrowserGym]:
    env = make_browsergym("browsergym/miniwob.click-test")
    yield env
    env.close()


def bid(env: BrowserGym, pattern: str) -> str:
    match = re.search(rf"\[(\w+)\] {pattern}", env.observe(AGENT))
    assert match, env.observe(AGENT)
    return match[1]


def test_an_episode_is_seen_done_and_paid(env):
    for index in range(2):
        env.reset(options={"index": index, "split": "test"})
        prompt = env.observe(AGENT)
        assert "click(bid: str" in prompt and "Task: Click the button.\n" in prompt
        assert "Address: http://miniwob/click-test.html\n" in prompt
        assert "127.0.0.1" not in prompt, "a prompt must not depend on a port"
        env.step("click('99999')")
        assert 'Could not find element with bid "99999"' in env.observe(AGENT)
        env.step("import os; os.kill(os.getpid(), 9)")
        assert "- import os; os.kill(os.getpid(), 9) (" in env.observe(AGENT), "an action is no program"
        env.step(f"The only button:\n```click('{bid(env, 'button')}')```")
        infos = env.infos[AGENT]
        assert (infos["ending"], infos["solved"], env.rewards[AGENT]) == ("page_ended", True, 1.0)
        assert (infos["metrics"], infos["cost"]) == ({"pass": 1.0, "failed_actions": 2.0, "turns": 3.0}, (1.0,))


def test_a_limit_ends_an_episode(env):
    few = make_browsergym("browsergym/miniwob.click-test", max_steps=1)
    few.reset(options={"index": 0})
    few.step("noop()")
    assert (few.infos[AGENT]["ending"], few.infos[AGENT]["solved"]) == ("step_limit", False)
    few.close()


def test_a_pattern_names_a_family_of_tasks(env):
    many = make_browsergym("browsergym/miniwob.click-tab*", held_out=1)
    names = {task.prompt for task in many.test}
    assert {"browsergym/miniwob.click-tab", "browsergym/miniwob.click-tab-2-hard"} <= names
    assert all(name.startswith("browsergym/miniwob.click-tab") for name in names)
    many.close()


@pytest.mark.parametrize("fault", ["hang", "crash", "unreachable"])
def test_a_fault_ends_the_episode_and_the_next_one_works(env, fault):
    broken = make_browsergym(
        "browsergym/openended" if fault == "unreachable" else "browsergym/miniwob.click-test", step_s=6.0
    )
    if fault == "unreachable":
        broken.kwargs = {"task_kwargs": {"start_url": "http://127.0.0.1:9/"}}
    broken.reset(options={"index": 0})
    children = psutil.Process().children(recursive=True)
    action = "noop()"
    if fault == "hang":
        action = "noop(60000)"
    elif fault == "crash":
        for process in children:
            if "chrom" in process.name():
                process.kill()
    else:
        assert "The page cannot be opened: BrowserGym's reset failed: Error: Page.goto: net::ERR_" in broken.observe(
            AGENT
        )
    begun = time.monotonic()
    broken.step(action)
    infos = broken.infos[AGENT]
    assert (infos["ending"], infos["solved"], infos["cost"]) == ("page_fault", False, (1.0,))
    assert time.monotonic() - begun < 60
    if fault != "unreachable":
        broken.reset(options={"index": 0})
        assert "Task: Click the button.\n" in broken.observe(AGENT)
    broken.close()


def test_a_killed_process_leaves_no_browser():
    code = f"""
from marl_ray.envs.web.browsergym.environment import BrowserGym
env = BrowserGym("browsergym/miniwob.click-test", python={PYTHON!r}, variants=1)
env.reset(options={{"index": 0}})
print("ready", flush=True)
import time
time.sleep(60)
"""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        started = psutil.Process(owner.pid).children(recursive=True)
        assert any("chrom" in process.name() for process in started)
        owner.kill()
        owner.communicate(timeout=60)
        until_ended(started)
        assert list(Path(folder).glob("*/playwright*")) == []
