"""Ends of an episode: its limits, and pages, browsers and sites that break or never rest."""

import contextlib
import re
import threading
import time
from typing import Any

import psutil
import pytest
from servers.little_site_tasks import make_browser_env, number, play
from servers.playwright_chromium import AGENT, no_chromium_stays
from waiting import until

from marl_ray.envs.web.browser.errors import BrowserError

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow


def test_an_episode_ends_at_each_of_its_limits(tmp_path, site):
    env = make_browser_env(
        tmp_path, site, "/", ["url_match"], reference_url="__SHOPPING__/", max_steps=3, cost=("calls", "seconds")
    )
    infos = play(env, "hover [{Chair}]", "scroll [up]", "scroll [down]")
    assert (infos["ending"], infos["solved"], infos["metrics"]["answered"]) == ("step_limit", True, 0)
    calls, seconds = infos["cost"]
    assert calls == 1
    assert 0 < seconds < 10
    env = make_browser_env(tmp_path, site, "/")
    assert play(env, "what?", "fly", "")["ending"] == "invalid_actions"
    assert play(env, "scroll [up]", "scroll [up]", "scroll [up]")["ending"] == "repeated_actions"
    assert play(make_browser_env(tmp_path, site, "/", episode_s=0.001), "scroll [up]")["ending"] == "deadline"


@pytest.mark.parametrize(
    ("start", "action"),
    [("/hang", "click [{Hang}]"), ("/dialogs", "click [{Ask}]"), ("/", "kill page"), ("/", "kill all")],
)
def test_a_page_or_a_browser_that_breaks_ends_the_episode(tmp_path, site, start, action):
    env = make_browser_env(tmp_path, site, start, step_s=3.0, cost=("calls",), record=str(tmp_path / "record"))
    play(env)
    begun = time.monotonic()
    if action.startswith("kill"):
        session = env.session
        assert session is not None
        if action == "kill all":
            for process in psutil.Process().children(recursive=True):
                if "chrom" in process.name():
                    process.kill()
        else:
            threading.Thread(target=_crash, args=(session,), daemon=True).start()
        until(lambda: session.broken or not session.chromium.connected, "the end of the page or the browser")
        action = "scroll [down]"
    env.step(re.sub(r"\{(.+?)\}", lambda match: str(number(env, match[1])), action))
    infos = env.infos[AGENT]
    assert (infos["ending"], infos["solved"], infos["cost"], env.rewards[AGENT]) == ("page_fault", False, (1.0,), 0.0)
    assert time.monotonic() - begun < 60
    env = make_browser_env(tmp_path, site, "/", reference_answers={"exact_match": "done"})
    assert play(env, "stop [done]")["solved"], "the next episode has no working browser"


def _crash(session: Any) -> None:
    async def crash() -> None:
        await (await session.devtools()).send("Page.crash")

    with contextlib.suppress(BrowserError):  # the crashed page answers nothing
        session.chromium.run(crash(), 2.0, "crashing the page")


def test_a_site_that_is_down_and_a_page_that_never_loads(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/", sites={"shopping": "http://127.0.0.1:9"})
    play(env)
    assert "The page cannot be opened: opening http://onestopmarket.com/ failed: " in env.observe(AGENT)
    env.step("stop [done]")
    assert env.infos[AGENT]["ending"] == "stopped"
    begun = time.monotonic()
    env = make_browser_env(tmp_path, site, "/never", step_s=2.0)
    play(env, "scroll [down]", "goto [http://onestopmarket.com/chair]")
    assert "Blue chair" in env.observe(AGENT), "the agent cannot leave a page that never loads"
    env.step("stop [done]")
    assert env.infos[AGENT]["ending"] == "stopped"
    assert time.monotonic() - begun < 60


def test_a_page_that_never_rests_ends_no_episode(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/restless", patience=None)
    infos = play(env, *["scroll [down]"] * 5, "goto [http://onestopmarket.com/chair]", "stop [done]")
    assert (infos["ending"], infos["solved"]) == ("stopped", True)
