"""Web tasks in a real Chromium: every task that can be done scores."""

import pytest
from servers.little_site_tasks import content, make_browser_env, play
from servers.playwright_chromium import AGENT, no_chromium_stays

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow


def test_an_answer_is_scored(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/", reference_answers={"exact_match": "$12.50"})
    infos = play(env, "click [{Chair}]", "stop [$12.50]")
    assert (infos["ending"], infos["solved"], env.rewards[AGENT]) == ("stopped", True, 1.0)
    assert infos["metrics"] == {"pass": 1, "answered": 1, "failed_actions": 0, "blocked": 0, "dialogs": 0, "turns": 2}
    assert not play(env, "stop [$12]")["solved"]


def test_the_address_of_the_last_page_is_scored(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/", ["url_match"], reference_url="__SHOPPING__/chair")
    assert play(env, "click [{Chair}]", "stop")["solved"]
    assert play(env, "goto [http://onestopmarket.com/chair]", "stop")["solved"]
    play(env)
    assert "Address: http://onestopmarket.com/\n" in env.observe(AGENT)
    assert "127.0.0.1" not in env.observe(AGENT), "a prompt must not depend on a port"
    assert not play(env, "click [{Chair}]", "go_back", "stop")["solved"]
    assert play(env, "click [{Chair}]", "go_back", "go_forward", "stop []")["solved"]


def test_pages_are_scored(tmp_path, site):
    contents = [
        content("last", "document.querySelector('li').outerText", exact_match="buy milk"),
        content("last", "", must_include=["milk |OR| bread", "<li>"]),
        content("__SHOPPING__/chair", "document.querySelector('#price').outerText", must_include=["12.50"]),
        content("func:reddit_get_post_url('__last_url__')", "document.title", exact_match="Chair"),
    ]
    env = make_browser_env(tmp_path, site, "/notes", ["program_html"], program_html=contents[:3])
    write = "click [{Note}]", "type [{Note}] [buy milk] [1]"
    assert play(env, *write, "stop [done]")["solved"]
    assert not play(env, "stop [done]")["solved"], "an episode saw the notes of another"
    env = make_browser_env(tmp_path, site, "/notes", ["program_html"], program_html=contents)
    assert play(env, *write, "stop [done]")["solved"], "the last address is where the check before has gone"
    for wrong in (
        content("__SHOPPING__/nowhere", "document.querySelector('#price').outerText", must_include=["12.50"]),
        content("http://elsewhere.test/", "", must_include=["a"]),
        content("last", "document.querySelector('#no').outerText", must_include=["a"]),
    ):
        env = make_browser_env(tmp_path, site, "/chair", ["program_html"], program_html=[wrong])
        infos = play(env, "stop")
        assert (infos["solved"], infos["ending"]) == (False, "stopped")
    env = make_browser_env(
        tmp_path,
        site,
        "/",
        ["program_html"],
        program_html=[content("last", "document.body.dataset.x", exact_match="none")],
    )
    assert play(env, "stop")["solved"], "null is None, as in WebArena"
