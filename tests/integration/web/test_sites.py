"""Synthetic tasks on the served sites in a real Chromium: the expert does all of them, and who acts by chance hardly any."""

import random
import re

import pytest
from servers.playwright_chromium import AGENT, no_chromium_stays

from marl_ray.config import EnvConfig
from marl_ray.envs.copies import warm_up
from marl_ray.envs.web.webarena.environment import WORLD_SEED, WebArena
from marl_ray.envs.web.webarena.site_pack.expert import expert_action
from marl_ray.envs.web.webarena.site_pack.synthetic_tasks import SyntheticWebTask, synthetic_tasks
from marl_ray.errors import MarlRayError

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow
TASKS = {task.record.intent: task for task in synthetic_tasks(WORLD_SEED, 0)}


def begin(env: WebArena, index: int) -> SyntheticWebTask:
    env.reset(options={"index": index})
    return TASKS[env.intent()]


def test_the_expert_does_every_task():
    env = WebArena()
    assert env.tasks == 60
    assert env.held_out > 20
    failed = {}
    for index in range(env.tasks):
        task = begin(env, index)
        for step in task.plan:
            env.step(expert_action(step, env.observe(AGENT)))
        if env.rewards[AGENT] != 1.0 or env.infos[AGENT]["metrics"]["failed_actions"]:
            failed[env.intent()] = env.infos[AGENT]
    assert failed == {}


def test_an_agent_that_acts_by_chance_does_hardly_any():
    env, rng, solved = WebArena(max_steps=6), random.Random(0), 0
    for index in range(30):
        begin(env, index)
        while not env.terminations[AGENT]:
            ids = re.findall(r"^\s*\[(\d+)\] (?:link|button|textbox)", env.observe(AGENT), re.MULTILINE) or ["1"]
            choices = [f"click [{rng.choice(ids)}]", f"type [{rng.choice(ids)}] [a] [1]", "go_back", "stop [1]"]
            env.step(rng.choice(choices))
        solved += env.infos[AGENT]["solved"]
    assert solved < 3


def test_a_run_that_would_copy_episodes_is_refused_before_it_begins():
    config = EnvConfig(id="webarena")
    warm_up(config)
    with pytest.raises(
        MarlRayError, match=r"train\.branch_turns: expected 0, or an environment that copy\.deepcopy copies"
    ):
        warm_up(config, branches=True)
