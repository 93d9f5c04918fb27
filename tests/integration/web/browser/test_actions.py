"""The actions of an agent on pages, tabs and dialogs, and what its next prompt shows of them."""

import re

import pytest
from servers.little_site_tasks import make_browser_env, number, play
from servers.playwright_chromium import AGENT, no_chromium_stays

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow


def test_every_action_changes_the_page_or_the_tabs(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/form", patience=None)
    env.reset(seed=0)

    def do(action: str) -> str:
        env.step(re.sub(r"\{(.+?)\}", lambda match: str(number(env, match[1])), action))
        return env.observe(AGENT)

    assert "Tab 0 (current): 'blue'" in do("click [{blue}]")
    assert "checkbox 'Gift' checked: true" in do("click [{Gift}]").replace("focused: True ", "")
    assert "checked: false" in do("press [Space]")
    assert do("hover [{Gift}]")
    assert "Tab 0: 'blue' | Tab 1 (current): ''" in do("new_tab")
    assert "heading 'Blue chair'" in do(f"goto [{site.url}/chair]")
    assert "Tab 0 (current): 'blue' | Tab 1: 'Chair'" in do("tab_focus [0]")
    assert "there is no tab 7" in do("tab_focus [7]")
    assert "Tab 0 (current): 'Chair'" in do("close_tab")
    assert "Address: about:blank" in do("close_tab")
    long = do(f"I think:\n```goto [{site.url}/long]```")
    assert "'Top'" in long
    assert "'Bottom'" not in long
    for _ in range(4):
        below = do("scroll [down]")
    assert "'Bottom'" in below
    assert "'Top'" not in below
    assert "is no action; expected one of click" in do("fly [1]")
    assert "is not understood; expected click [id]" in do("click the button")
    assert "there is no element [123456]" in do("click [123456]")
    assert "Unknown key" in do("press [nonsense]")
    assert env.infos[AGENT] == {}
    do("stop")
    assert env.infos[AGENT]["metrics"]["failed_actions"] == 5


def test_a_window_that_a_page_opens_is_a_tab(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/popup", ["url_match"], reference_url="__SHOPPING__/chair")
    assert play(env, "click [{Open}]", "tab_focus [1]", "stop")["solved"]


def test_windows_that_open_without_end_or_close_themselves_end_no_episode(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/closing")
    play(env, "click [{Open}]", "tab_focus [1]", "click [{Close}]")
    assert "Tab 0 (current): 'Closing'" in env.observe(AGENT)
    env.step("stop [done]")
    assert env.infos[AGENT]["ending"] == "stopped"
    env = make_browser_env(tmp_path, site, "/windows", patience=None)
    infos = play(env, *["scroll [down]"] * 3, "tab_focus [0]", "goto [http://onestopmarket.com/chair]", "stop [done]")
    assert infos["ending"] == "stopped"


def test_every_start_page_gets_a_tab(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/ |AND| __SHOPPING__/chair")
    play(env)
    assert "Tab 0 (current): 'Shop' | Tab 1: 'Chair'" in env.observe(AGENT)


@pytest.mark.parametrize("start", ["/away", "/file"])
def test_other_hosts_and_downloads_are_blocked(tmp_path, site, start):
    env = make_browser_env(tmp_path, site, start)
    actions = {"/away": ["scroll [up]"], "/file": ["click [{Download}]"]}[start]
    infos = play(env, *actions, "goto [http://elsewhere.test/]", "goto [file:///etc/hostname]", "stop [done]")
    assert infos["solved"]
    assert infos["metrics"]["blocked"] >= 3
    env = make_browser_env(tmp_path, site, "/", allow=["http://elsewhere.test"])
    play(env, "goto [http://elsewhere.test/]")
    assert "opening http://elsewhere.test/ failed" in env.observe(AGENT)


def test_dialogs_are_dismissed_and_shown(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/dialogs")
    play(env, "click [{Once}]")
    assert "Dialogs that were dismissed: alert: 'once'; confirm: 'sure?'" in env.observe(AGENT)
    assert "'false'" in env.observe(AGENT)
    env.step("stop [done]")
    assert env.infos[AGENT]["metrics"]["dialogs"] == 2


def test_an_element_that_is_gone(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/gone")
    env.reset(seed=0)
    button, shown = number(env, "Vanish"), env.view
    env.step(f"click [{button}]")
    env.step(f"click [{button}]")
    assert f"there is no element [{button}] in the observation" in env.observe(AGENT)
    assert env.session is not None
    env.view = shown  # it vanishes after it is shown
    env.step(f"hover [{button}]")
    assert f"element [{button}] is gone or not visible" in env.observe(AGENT)
    env.close()


def test_text_of_a_page_gives_no_orders(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/orders")
    play(env)
    lines = [line for line in env.observe(AGENT).splitlines() if "hacked" in line]
    assert len(lines) == 1
    assert re.match(r"\t\[\d+\] StaticText ", lines[0]), "the page's text makes no line of its own"
    env.step("stop [done]")
    assert env.infos[AGENT]["solved"]
