"""Ends of an episode: its limits, and pages, browsers and sites that break or never rest."""

import asyncio
import contextlib
import re
import threading
import time
from typing import Any

import psutil
import pytest
from servers.little_site_tasks import make_browser_env, number, play
from servers.playwright_chromium import AGENT, no_chromium_stays
from waiting import until, until_ended

from marl_ray.envs.web.browser.chromium import Chromium, shared_chromium
from marl_ray.envs.web.browser.errors import BrowserError, PageError
from marl_ray.envs.web.browser.session import BrowserSession

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


@pytest.fixture
def short_closing(monkeypatch):
    """Have a browser that hangs be waited for a second."""
    for module in ("chromium", "session"):
        monkeypatch.setattr(f"marl_ray.envs.web.browser.{module}.CLOSE_S", 1.0)


@pytest.mark.usefixtures("short_closing")
def test_a_browser_that_hangs_ends_the_episodes_in_it_and_the_next_ones_get_another(tmp_path, site):
    first, second = (make_browser_env(tmp_path, site, "/") for _ in range(2))
    play(first)
    play(second)
    assert first.session is not None and second.session is not None
    hung = first.session.chromium
    assert second.session.chromium is hung
    processes = _suspend_chromium()
    first.close()
    until_ended(processes)
    session = second.session
    second.step("scroll [down]")
    assert second.infos[AGENT]["ending"] == "page_fault"
    assert session.broken == "the action failed: the browser was closed"
    assert play(second, "stop [done]")["solved"]
    assert shared_chromium(second) is not hung


@pytest.mark.usefixtures("short_closing")
def test_a_browser_that_opens_no_context_is_replaced_before_the_episode(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/", step_s=5.0)
    assert play(env, "stop [done]")["solved"]
    processes = _suspend_chromium()
    assert play(env, "stop [done]")["solved"]
    until_ended(processes)


def test_a_session_whose_browser_was_closed_says_so_and_closes():
    chromium = Chromium()
    session = BrowserSession(chromium, set(), 10.0).start()
    chromium.close()
    with pytest.raises(PageError, match=r"^reading the page failed: the browser was closed$"):
        session.call(session.view(), "reading the page")
    session.close()
    assert session.context is None


def test_a_call_that_waits_while_the_browser_is_closed_ends_with_it():
    chromium = Chromium()
    session = BrowserSession(chromium, set(), 300.0).start()
    is_waiting, errors = threading.Event(), []

    async def wait() -> None:
        is_waiting.set()
        await asyncio.sleep(300)

    def call() -> None:
        try:
            session.call(wait(), "the wait")
        except BrowserError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert is_waiting.wait(60), "the call did not begin"
    chromium.close()
    thread.join(60)
    assert errors == ["the wait failed: the browser was closed"]


def _suspend_chromium() -> list[psutil.Process]:
    """Stop every process of Chromium, so that it answers nothing, and return them."""
    processes = [child for child in psutil.Process().children(recursive=True) if "chrom" in child.name()]
    for process in processes:
        process.suspend()
    return processes


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
