"""Environments and batches that cannot be made whole leave no part of them open."""

import re
import sys
import threading

import pytest
from gymnasium import spaces
from toys.envs import Limited
from toys.texts import LimitedEcho

from marl_ray.config.run.sections import ConstraintConfig, EnvConfig
from marl_ray.conformance.extensions import environment
from marl_ray.envs.copies import EnvLoop
from marl_ray.envs.gridworld.batch import GridworldBatch
from marl_ray.envs.gridworld.environment import Gridworld
from marl_ray.envs.registry import make_env
from marl_ray.envs.web.browser.chromium import EXECUTABLE_VARIABLE, Chromium
from marl_ray.errors import MarlRayError

WRONG_GROUPS = r"^groups: \[\['nobody'\]\] expected to hold each of "


@pytest.fixture(autouse=True)
def none_open(monkeypatch):
    """Each test begins with no environment open, whatever another left."""
    for kind in (Limited, LimitedEcho):
        monkeypatch.setattr(kind, "open_count", 0)


@pytest.fixture
def closed_gridworlds(monkeypatch):
    """The gridworlds that were closed, in order."""
    closed, close = [], Gridworld.close

    def note(env):
        closed.append(env)
        close(env)

    monkeypatch.setattr(Gridworld, "close", note)
    return closed


def test_a_loop_of_wrong_groups_leaves_no_copy_open():
    with pytest.raises(MarlRayError, match=WRONG_GROUPS):
        EnvLoop(EnvConfig(id="toys.envs:limited"), 4, [["nobody"]])
    assert Limited.open_count == 0


def test_a_loop_that_is_refused_leaves_the_environment_of_its_caller_open():
    config = EnvConfig(id="toys.envs:limited")
    first = make_env(config)
    with pytest.raises(MarlRayError, match=WRONG_GROUPS):
        EnvLoop(config, 4, [["nobody"]], first=first)
    assert Limited.open_count == 1


@pytest.mark.parametrize(("groups", "signals", "message"), [
    ([["nobody"]], 1, WRONG_GROUPS),
    ([["agent_0"]], 2, r"^env\.cost: a MultiGrid environment has one cost signal, expected 2$"),
])  # fmt: skip
def test_a_batch_of_gridworlds_that_is_refused_leaves_no_copy_open(groups, signals, message, closed_gridworlds):
    with pytest.raises(MarlRayError, match=message):
        GridworldBatch(EnvConfig(id="MultiGrid-Empty-5x5-v0", cost={"action": 1.0}), 3, groups, signals)
    assert len(closed_gridworlds) == 3


def test_a_gridworld_that_cannot_be_closed_leaves_no_other_open(closed_gridworlds, monkeypatch):
    batch = GridworldBatch(EnvConfig(id="MultiGrid-Empty-5x5-v0"), 3, [["agent_0"]])

    def fail():
        raise OSError("still busy")

    monkeypatch.setattr(batch.envs[1], "close", fail)
    with pytest.raises(OSError, match=r"^still busy$"):
        batch.close()
    assert {id(env) for env in closed_gridworlds} == {id(batch.envs[0]), id(batch.envs[2])}


@pytest.mark.parametrize(("env_id", "message"), [
    ("toys.texts:limited", "needs actions that can be masked; those of toys.texts:limited are texts"),
    ("toys.envs:limited", "appends to vectors of Box, MultiDiscrete or Discrete, but a observes Box of shape (2, 2)"),
])  # fmt: skip
def test_an_environment_that_cannot_keep_hard_limits_is_closed(env_id, message, monkeypatch):
    monkeypatch.setattr(Limited, "observation_space", lambda *_: spaces.Box(0, 1, (2, 2)))
    with pytest.raises(MarlRayError, match=f"^constraints: hard_limit {re.escape(message)}$"):
        make_env(EnvConfig(id=env_id, kwargs={"limit": 9}), [ConstraintConfig(budget=1.0, hard_limit=1.0)])
    assert (Limited.open_count, LimitedEcho.open_count) == (0, 0)


def test_an_environment_that_is_refused_is_closed_and_its_refusal_is_told_if_closing_fails(monkeypatch):
    monkeypatch.setattr(Limited, "observation_space", lambda *_: spaces.Text(3))
    close = Limited.close

    def fail(env):
        close(env)
        raise OSError("still busy")

    monkeypatch.setattr(Limited, "close", fail)
    with pytest.raises(MarlRayError, match=r"^env\.id: toys\.envs:limited has Text spaces; expected an AECEnv "):
        make_env(EnvConfig(id="toys.envs:limited"))
    assert Limited.open_count == 0


@pytest.mark.parametrize("check", [lambda: list(environment.check("toys.envs:limited", {})),
                                   lambda: environment.first_fault(EnvConfig(id="toys.envs:limited"))])  # fmt: skip
def test_an_environment_whose_check_is_interrupted_is_closed(check, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Limited, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        check()
    assert Limited.open_count == 0


def test_a_browser_whose_driver_is_missing_leaves_no_thread(monkeypatch):
    def fail():
        raise FileNotFoundError("no driver")

    async_api = pytest.importorskip("playwright.async_api")
    monkeypatch.setattr(async_api, "async_playwright", fail)
    monkeypatch.setenv(EXECUTABLE_VARIABLE, sys.executable)  # any program that exists
    before = threading.enumerate()
    with pytest.raises(FileNotFoundError, match=r"^no driver$"):
        Chromium()
    assert threading.enumerate() == before
