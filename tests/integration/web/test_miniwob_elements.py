"""Pages of MiniWoB++ as small policies see them, in a real Chromium."""

import numpy as np
import pytest
from pettingzoo.test import parallel_api_test
from servers.playwright_chromium import AGENT, no_chromium_stays

from marl_ray.envs.web.miniwob import MiniWob
from marl_ray.envs.web.miniwob_elements import MiniWobElements

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow
PAGES = [
    "click-test",
    "click-test-2",
    "click-button",
    "click-dialog",
    "focus-text",
    "click-tab",
    "click-checkboxes",
    "enter-text",
]


def test_a_small_policy_plays_by_pettingzoos_rules():
    env = MiniWobElements(tasks=["click-test-2"], variants=3)
    parallel_api_test(env, num_cycles=12)
    env.close()


def test_the_best_match_is_the_first_element():
    env = MiniWobElements(tasks=["click-button", "click-dialog", "click-tab"], variants=3)
    rewards = []
    for index in range(9):
        env.reset(options={"index": index})
        _, reward, over, _, infos = env.step({AGENT: 0})
        rewards.append(reward[AGENT])
        assert "action_mask" in infos[AGENT] and (over[AGENT] == (not env.agents))
    assert np.mean(rewards) > 0.6
    env.close()


def test_an_episode_on_a_page_that_is_kept_is_that_of_a_new_one():
    for page in PAGES:
        reused = MiniWob([page], variants=1, held_out=3, keep_pages=True)
        fresh = MiniWob([page], variants=1, held_out=3)
        sessions = set()
        for index in range(3):
            for env in (reused, fresh):
                env.reset(options={"index": index, "split": "test"})
            assert reused.observe(AGENT) == fresh.observe(AGENT)
            sessions.add(id(reused.session))
            reused.step("stop")
        assert len(sessions) == 1
        reused.close()
        fresh.close()
