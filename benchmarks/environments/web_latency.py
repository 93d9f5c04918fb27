"""Time that the web environments cost beyond the pages themselves, and that the synthetic tasks take.

    .venv/bin/python -m benchmarks.environments.web_latency            # under four minutes on two cores
    .venv/bin/python -m benchmarks.environments.web_latency --rounds 5 --no-pack

Each action is done by the environment and by bare Playwright in turn, in one Chromium, on the same page in contexts of
their own: bare Playwright finds the element, acts, and waits for the load event, which is the page's own time. The
environment also routes requests, waits for what follows, reads the accessibility tree and writes the prompt. An opening is
that of an episode after another, against a context with the page. Then the scripted expert and an agent that acts by chance
play the synthetic tasks of `webarena`, two at a time.
Writes `benchmarks/results/web_latency.{json,md}`; a short run prints alone.
"""

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any

import marl_ray
from benchmarks.records import load_before, machine, store
from benchmarks.tables import median_range
from marl_ray.envs.web.browser.chromium import Chromium, close_shared_chromium, shared_chromium
from marl_ray.envs.web.browser.session import HEIGHT, WIDTH
from marl_ray.envs.web.environment import BrowserEnv
from marl_ray.envs.web.miniwob import MiniWob
from marl_ray.envs.web.webarena.environment import WebArena

AGENT = "agent"
ROUNDS = 30
"""Measurements of each action and opening; a result of fewer is not stored."""
SPLITS = {"expert": "all", "random": "test"}
"""The agents that play the synthetic tasks, and the tasks of each."""
GOAL_MS, GOAL_S = 60.0, 300.0
"""The goals: milliseconds that an action costs beyond the page's own, and seconds of all synthetic tasks."""
WAIT_S = 60.0
"""Deadline of a call of the browser, in seconds."""
ACTIONS = ("follow a link", "click into a text box", "type ten letters")
Milliseconds = dict[str, dict[str, list[float]]]


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each action and opening")
    parser.add_argument("--no-pack", action="store_true", help="leave out the synthetic tasks")
    options = parser.parse_args()
    load = load_before()
    measured = measure_actions(options.rounds) | measure_openings(options.rounds)
    close_shared_chromium()
    packs = {} if options.no_pack else {name: play_pack(name) for name in SPLITS}
    described = machine("marl-ray", "playwright") | {"chromium": version()}
    about = f"{options.rounds} measurements each, in turn; load {load:.1f} before"
    text = table(about, measured, packs)
    if options.rounds >= ROUNDS and packs:
        result = {"machine": described, "load_before": load, "milliseconds": measured, "packs": packs}
        store("web_latency", result, text)
    else:
        print(text)


def measure_actions(rounds: int) -> Milliseconds:
    """Measure the milliseconds of each action by the environment and by bare Playwright."""
    measured: Milliseconds = {name: {"env": [], "bare": []} for name in ACTIONS}
    with WebArena(max_steps=1000, patience=None, episode_s=3600.0) as env:
        env.reset(options={"index": 0})
        env.step(f"goto [{env.sites['shopping']}]")
        chromium = shared_chromium(env)
        context, page = chromium.run(open_page(chromium, env.sites["shopping"]), WAIT_S, "opening a page")

        def act(name: str, action: str, bare: Callable[[], Coroutine[Any, Any, Any]]) -> None:
            measured[name]["env"].append(time_call(lambda: env.step(action)))
            assert not env.infos[AGENT].get("ending"), env.infos
            measured[name]["bare"].append(time_call(lambda: chromium.run(bare(), WAIT_S, name)))

        box = page.get_by_role("textbox")
        for _ in range(rounds):
            act(ACTIONS[0], f"click [{number(env, 'link .Cart.')}]", lambda: follow(page, "Cart"))
            env.step(f"goto [{env.sites['shopping']}]")
            chromium.run(page.goto(env.sites["shopping"]), WAIT_S, "going back")
            act(ACTIONS[1], f"click [{number(env, 'textbox')}]", box.click)
            act(ACTIONS[2], f"type [{number(env, 'textbox')}] [abcdefghij] [0]", lambda: type_into(page, box))
        chromium.run(context.close(), WAIT_S, "closing the context")
    return measured


def measure_openings(rounds: int) -> Milliseconds:
    """Measure the milliseconds until an episode shows its page, by the environment and by bare Playwright."""
    measured: Milliseconds = {}
    for name, env in {
        "open an episode of webarena": WebArena(),
        "open an episode of miniwob": MiniWob(["click-test"]),
        "open one on a kept page": MiniWob(["click-test"], keep_pages=True),
    }.items():
        times: dict[str, list[float]] = {"env": [], "bare": []}
        with env:
            env.reset(options={"index": 0})
            chromium = shared_chromium(env)
            assert env.session is not None
            url = env.session.url
            for k in range(1, rounds + 1):
                env.step("stop")
                times["env"].append(time_call(lambda: env.reset(options={"index": k})))  # noqa: B023
                times["bare"].append(time_call(lambda: chromium.run(visit_page(chromium, url), WAIT_S, "opening")))  # noqa: B023
        measured[name] = times
    return measured


async def open_page(chromium: Chromium, url: str) -> tuple[Any, Any]:
    """Return a context of bare Playwright with a page."""
    context = await chromium.browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    page = await context.new_page()
    await page.goto(url)
    return context, page


async def visit_page(chromium: Chromium, url: str) -> None:
    """Open a context with a page, and close it."""
    context, _ = await open_page(chromium, url)
    await context.close()


async def follow(page: Any, name: str) -> None:
    """Click a link, and wait for its page."""
    async with page.expect_event("load"):
        await page.get_by_role("link", name=name).first.click()


async def type_into(page: Any, box: Any) -> None:
    """Do as the environment's action does: a click, then the keys."""
    await box.click()
    await page.keyboard.type("abcdefghij")


def number(env: BrowserEnv, pattern: str) -> str:
    """Return the id of the first element whose line matches."""
    match = re.search(rf"^\s*\[(\d+)\] {pattern}", env.observe(AGENT), re.MULTILINE)
    assert match, f"no {pattern} in {env.observe(AGENT)}"
    return match[1]


def time_call(call: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1000


def play_pack(policy: str) -> dict[str, float]:
    """Play synthetic tasks with two episodes at a time and return seconds, episodes and solved ones."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        result = marl_ray.evaluate("webarena", policy, split=SPLITS[policy], workers=2, out=Path(folder, "out"))
        everything = result.report["all"]
        return {
            "seconds": time.perf_counter() - begun,
            "episodes": everything["episodes"],
            "solved": everything["solved"],
            "actions": everything["actions"],
        }


def version() -> str:
    """Return Chromium's version."""
    try:
        return str(shared_chromium(main).browser.version)
    finally:
        close_shared_chromium()


def table(about: str, measured: Milliseconds, packs: dict[str, dict[str, float]]) -> str:
    """Return the result as Markdown."""
    lines = [
        f"{about}.",
        "",
        "| | environment, ms | bare Playwright, ms | median beyond, ms | goal |",
        "|---|---|---|---|---|",
    ]
    beyond = []
    for name, times in measured.items():
        extra = median(times["env"]) - median(times["bare"])
        goal = f"at most {GOAL_MS:g}" if name in ACTIONS else ""
        beyond += [with_env - bare for with_env, bare in zip(times["env"], times["bare"], strict=True)] if goal else []
        lines.append(
            f"| {name} | {median_range(times['env'])} | {median_range(times['bare'])} | {extra:.0f} | {goal} |"
        )
    lines.append(f"| all actions, pair by pair | | | {median(beyond):.0f} | at most {GOAL_MS:g} |")
    lines += ["", "Numbers are medians (least-most).", ""]
    if packs:
        lines += [
            "| synthetic tasks, one Chromium | episodes | solved | actions of an episode | seconds | goal |",
            "|---|---|---|---|---|---|",
        ]
        for name, pack in packs.items():
            share = pack["solved"] / pack["episodes"]
            goal = f"all within {GOAL_S:g} s" if name == "expert" else "below 10 %"
            solved = f"{pack['solved']:.0f} ({share:.1%})"
            lines.append(
                f"| {name}, split {SPLITS[name]} | {pack['episodes']:.0f} | {solved} | {pack['actions']:.1f} "
                f"| {pack['seconds']:.0f} | {goal} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
