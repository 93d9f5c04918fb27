"""The pages of MiniWoB++ in a real Chromium: all of them open, show what to do, and pay."""

import re

import pytest
from servers.playwright_chromium import AGENT, element, no_chromium_stays

from marl_ray.envs.web import miniwob
from marl_ray.envs.web.miniwob import MiniWob

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow


def begin(env: MiniWob, index: int = 0) -> None:
    env.reset(options={"index": index, "split": "test"})


@pytest.mark.parametrize("page", miniwob.pages())
def test_a_page_opens_and_ends_by_itself(monkeypatch, page):
    monkeypatch.setattr(miniwob, "NEVER_MS", 400)  # with the usual time no page ends before it is solved
    env = MiniWob([page], variants=1, held_out=1, max_steps=200)  # more than are done in that time
    begin(env)
    assert env.intent() not in ("", page)
    assert "cannot be opened" not in env.observe(AGENT)
    assert len(env.view.elements) > 1
    for _ in range(env.options.max_steps):
        env.step("scroll [up]")
        if env.terminations[AGENT]:
            break
    assert env.infos[AGENT]["ending"] == "page_ended"
    assert not env.infos[AGENT]["solved"]


def test_tasks_are_solved_with_the_actions_of_an_agent():
    env = MiniWob(["click-test"], variants=1, held_out=3)
    for index in range(3):
        begin(env, index)
        env.step(f"click [{element(env, 'button')}]")
        assert (env.infos[AGENT]["ending"], env.rewards[AGENT]) == ("page_ended", 1.0)
    env = MiniWob(["enter-text"], variants=1, held_out=3)
    for index in range(3):
        begin(env, index)
        quoted = re.search(r'"(.+)"', env.intent())
        assert quoted
        env.step(f"type [{element(env, 'textbox')}] [{quoted[1]}] [0]")
        env.step(f"click [{element(env, 'button')}]")
        assert env.rewards[AGENT] == 1.0
    env = MiniWob(["choose-list"], variants=1, held_out=3)
    for index in range(3):
        begin(env, index)
        match = re.search(r"Select (.+) from the list", env.intent())
        assert match
        option = "option '" + re.escape(match[1]) + "'"
        env.step(f"click [{element(env, option)}]")
        env.step(f"click [{element(env, 'button')}]")
        assert env.rewards[AGENT] == 1.0


def test_a_wrong_answer_pays_nothing():
    env = MiniWob(["click-test-2"], variants=1, held_out=1)
    begin(env)
    env.step(f"click [{element(env, 'button .TWO.')}]")
    assert (env.infos[AGENT]["ending"], env.rewards[AGENT]) == ("page_ended", 0.0)
    begin(env)
    env.step("stop [done]")
    assert (env.infos[AGENT]["ending"], env.rewards[AGENT]) == ("stopped", 0.0)


def test_an_agent_may_leave_the_page_and_come_back():
    env = MiniWob(["click-test"], variants=1, held_out=1)
    begin(env)
    env.step("new_tab")
    env.step(f"goto [{env.url}/core/core.js]")
    assert not env.terminations[AGENT], env.infos
    env.step("tab_focus [0]")
    env.step(f"click [{element(env, 'button')}]")
    assert (env.infos[AGENT]["ending"], env.rewards[AGENT]) == ("page_ended", 1.0)
    begin(env)
    env.step("new_tab")
    env.step("stop")
    assert (env.infos[AGENT]["ending"], env.rewards[AGENT]) == ("stopped", 0.0)


def test_a_task_is_the_same_whenever_it_is_begun():
    env = MiniWob(["click-checkboxes", "email-inbox"], variants=2, held_out=2)
    seen = []
    for _ in range(2):
        prompts = []
        for index in range(4):
            begin(env, index)
            prompts.append(env.observe(AGENT))
        seen.append(prompts)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 4
    env.close()


def test_a_page_that_is_none_is_named():
    with pytest.raises(ValueError, match="tasks: 'click-tset' is no page; did you mean click-test"):
        MiniWob(["click-tset"])
