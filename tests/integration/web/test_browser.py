"""Web tasks in a real Chromium, on a small site: every task that can be done scores, and every fault has its ending."""

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pettingzoo.test import seed_test
from servers.little_site import LittleSite, little_site, web_record
from servers.playwright_chromium import AGENT, no_chromium_stays
from waiting import until, until_ended

from marl_ray.config import EnvConfig
from marl_ray.envs.registry import is_text, make_env
from marl_ray.envs.web.browser.chromium import shared_chromium
from marl_ray.envs.web.browser.errors import BrowserError
from marl_ray.envs.web.environment import BrowserEnv
from marl_ray.envs.web.webarena.environment import WebArena
from marl_ray.errors import MarlRayError

__all__ = ["no_chromium_stays"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site() -> Iterator[LittleSite]:
    with little_site() as running:
        yield running


def make_browser_env(
    folder: Path, site: LittleSite, start: str, types: list[str] | None = None, **rest: Any
) -> WebArena:
    """The environment with one task, whose checks and options are in `rest`."""
    checks = {key: rest.pop(key) for key in ("reference_answers", "reference_url", "program_html") if key in rest}
    if not checks:
        checks = {"reference_answers": {"exact_match": "done"}}
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps([web_record(start, types or ["string_match"], **checks)]))
    rest.setdefault("sites", {"shopping": site.url})
    return WebArena(str(path), held_out=0.0, **{"step_s": 10.0, **rest})


def play(env: BrowserEnv, *actions: str) -> dict[str, Any]:
    """The infos after these actions; in each `{NAME}` is the number of the element of that name."""
    env.reset(seed=0)
    for action in actions:
        assert not any(env.terminations.values()), env.infos
        env.step(re.sub(r"\{(.+?)\}", lambda match: str(number(env, match[1])), action))
    return dict(env.infos[AGENT])


def number(env: BrowserEnv, name: str) -> int:
    """The number of the element that is no text and has this name."""
    lines = [line for line in env.observe(AGENT).splitlines() if f" '{name}'" in line and "StaticText" not in line]
    match = re.match(r"\s*\[(\d+)\]", lines[0]) if lines else None
    assert match, f"no {name!r} in {env.observe(AGENT)}"
    return int(match[1])


def content(url: str, locator: str, **required: Any) -> dict[str, Any]:
    return {"url": url, "locator": locator, "required_contents": required}


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


def test_an_episode_is_recorded(tmp_path, site):
    env = make_browser_env(tmp_path, site, "/", record=str(tmp_path / "record"), traces=True)
    play(env, "click [{Chair}]", "fly", "stop [done]")
    (folder,) = (tmp_path / "record").iterdir()
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [step["ending"] for step in steps] == ["", "", "stopped"]
    assert [bool(step["note"]) for step in steps] == [False, True, False]
    assert steps[-1]["score"] == 1.0
    assert steps[0]["url"] == f"{site.url}/chair"
    for k in range(3):
        assert (folder / f"{k:03d}.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "episode.html").read_text()
    assert "<h1>Do it.</h1>" in page and "score 1" in page
    assert re.search(r"1\. click \[\d+\] link &#x27;Chair&#x27;", page)
    pictures = re.findall(r'<img src="(.+?)"', page)
    assert pictures == ["start.png", "000.png", "001.png", "002.png"]
    assert all((folder / name).exists() for name in pictures)
    assert zipfile.ZipFile(folder / "trace.zip").testzip() is None


def test_episodes_at_the_same_time_share_a_chromium_and_nothing_else(tmp_path, site):
    texts = ["one", "two", "three"]
    envs = []
    for text in texts:
        folder = tmp_path / text
        folder.mkdir()
        check = [content("last", "document.querySelector('ul').outerText", exact_match=text)]
        envs.append(make_browser_env(folder, site, "/notes", ["program_html"], program_html=check))
    threads = [
        threading.Thread(target=play, args=(env, f"type [{{Note}}] [{text}] [1]", "stop"), daemon=True)
        for env, text in zip(envs, texts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [env.infos[AGENT]["solved"] for env in envs] == [True] * 3
    assert shared_chromium(envs[0]).browser.contexts == []
    gc.collect()  # environments of other tests, which none has closed
    for env in envs:
        assert shared_chromium(env).connected
        env.close()
    assert not any("chrom" in process.name() for process in psutil.Process().children(recursive=True))


def test_the_registry_makes_it_and_it_keeps_pettingzoos_rules(tmp_path, site):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([web_record("/", ["string_match"], reference_answers={"exact_match": "done"})]))
    kwargs = {"data": str(path), "sites": {"shopping": site.url}, "held_out": 0.0}
    env = make_env(EnvConfig(id="webarena", kwargs=kwargs))
    assert is_text(env)
    env.close()
    seed_test(lambda: WebArena(**kwargs), num_cycles=8)
    with pytest.raises(MarlRayError, match="sites: no task needs only gitlab"):
        make_env(EnvConfig(id="webarena", kwargs=kwargs | {"sites": {"gitlab": site.url}}))
    with pytest.raises(MarlRayError, match=r"env.kwargs: webarena rejected .*max_steps=0, expected more than 0"):
        make_env(EnvConfig(id="webarena", kwargs=kwargs | {"max_steps": 0}))


@pytest.mark.parametrize("killed", ["alone", "with its children"])
def test_a_killed_process_leaves_no_browser_and_no_profile(killed):
    code = (
        "from marl_ray.envs.web.webarena.environment import WebArena as W; "
        "e = W(); e.reset(); print('ready', flush=True); input()"
    )
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        owner = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert owner.stdout is not None and owner.stdin is not None
        assert owner.stdout.readline() == b"ready\n"
        started = psutil.Process(owner.pid).children(recursive=True)
        assert any("chrom" in process.name() for process in started)
        for process in [psutil.Process(owner.pid), *(started if killed != "alone" else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        owner.communicate(timeout=60)
        until_ended(started)
        code = "from marl_ray.temporary_folders import object_folder as make; make('web').cleanup()"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
        assert list(Path(folder).iterdir()) == []
