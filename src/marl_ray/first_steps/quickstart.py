"""A first look at the product on this machine: a small team is trained, scored, served and shown in a browser."""

import asyncio
import contextlib
import os
import sys
import time
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from marl_ray.config import RunConfig, parse_config
from marl_ray.first_steps.steps import KEYS_FILE, deploy_endpoint, new_folder, plain_console, timed_step
from marl_ray.serving.http.keys import new_key

RUN: dict[str, object] = {
    "name": "try",
    "algorithm": "mappo",
    "env": {"id": "MultiGrid-Empty-5x5-v0", "kwargs": {"agents": 2, "joint_reward": True}},
    "hyper": {"lr": 2.5e-3, "epochs": 4, "entropy_coef": 0.01},
    "train": {"total_steps": 40_960, "env_copies": 64, "horizon": 32},
}
"""Two agents of one policy on a grid of 5x5; the run takes some seconds on one core."""
EPISODES = 20
"""Episodes that are played over HTTP."""
CPUS = 4
"""CPUs that the run and the gateway may book in Ray's accounts, however many this machine has."""


@dataclass(frozen=True)
class QuickstartResult:
    """The result of a short try, while its gateway serves."""

    before: tuple[float, float, float]
    """Mean return before training, and its 95 % interval."""
    after: tuple[float, float, float]
    """Mean return of the best bundle, on episodes of other starts."""
    episodes: int
    """Number of the episodes that `after` is of."""
    over_http: float
    """Mean return of the episodes that were played over HTTP."""
    action_ms: float
    """Median milliseconds of an action over HTTP."""
    model: str
    """`models:/NAME/VERSION` of the best bundle."""
    bundle: str
    """Folder of the best bundle."""
    curve: str
    """Path of the picture of the learning curve."""
    url: str
    """URL of the gateway."""
    key: str
    """Admin key of the gateway."""
    storage: str
    """The folder that holds the run's folder."""
    seconds: float
    """Seconds since the start of the command."""


@contextlib.contextmanager
def quickstart(folder: Path) -> Iterator[QuickstartResult]:
    """Train, score, serve and play.

    The gateway serves until the block ends. Everything written lies under `folder`/TIME.
    """
    from marl_ray.cluster.local_ray import local_ray
    from marl_ray.envs.registry import make_env
    from marl_ray.serving.client.play import play_episodes
    from marl_ray.training.driver import train
    from marl_ray.training.run_checks import check_run
    from marl_ray.training.run_folder.metrics_file import read_metrics
    from marl_ray.training.run_folder.record import filesystem_of

    began, console, folder = time.monotonic(), plain_console(), new_folder(folder)
    run = parse_config(RunConfig, RUN | {"storage": str(folder)})
    with contextlib.ExitStack() as stack:
        with timed_step(console, "compiling the gridworld (takes long the first time only)"):
            check_run(run)
        with timed_step(console, "starting a local Ray"):
            cpus = max(CPUS, os.cpu_count() or 1)
            ray = stack.enter_context(local_ray(num_cpus=cpus, object_store_bytes=256 << 20))
        with timed_step(console, f"training two agents with {run.algorithm} on {run.env.id}"):
            result = train(run, own_ray=True)
        key = new_key(folder / KEYS_FILE, "try")
        with timed_step(console, "serving the best team"):
            url = deploy_endpoint(folder, ray.dashboard_url, {"arms": {run.algorithm: {"bundle": result.model}}})
        with timed_step(console, f"playing {EPISODES} episodes over HTTP"):
            episodes = asyncio.run(play_episodes(url, lambda: make_env(run.env), EPISODES, key=key))
        first, *_ = read_metrics(*filesystem_of(run))
        best = [row for row in read_metrics(*filesystem_of(run)) if "best/return" in row][-1]
        latencies = [1000 * seconds for episode in episodes for seconds in episode.latencies]
        yield QuickstartResult(
            before=_interval(first, "eval/return"),
            after=_interval(best, "best/return"),
            episodes=run.evaluation_episodes,
            over_http=float(np.mean([episode.episode_return for episode in episodes])),
            action_ms=float(np.median(latencies)),
            model=result.model,
            bundle=result.bundle,
            curve=str(result.curve),
            url=url,
            key=key,
            storage=str(folder),
            seconds=time.monotonic() - began,
        )
        with timed_step(console, "shutting down"):
            stack.close()


def result_lines(result: QuickstartResult) -> Iterator[str]:
    """Yield the result of a short try in lines for people."""
    lines = {
        "return before": "{:.3f} [{:.3f}, {:.3f}]".format(*result.before),
        "return after": "{:.3f} [{:.3f}, {:.3f}]".format(*result.after)
        + f", on {result.episodes} episodes of other starts",
        "over HTTP": f"{result.over_http:.3f} in {EPISODES} episodes, {result.action_ms:.1f} ms an action",
        "curve": result.curve,
        "bundle": result.bundle,
        "page": f"{result.url}/ui  (user: any, password: the key)",
        "key": result.key,
    }
    yield from (f"{name:<15}{text}" for name, text in lines.items())
    yield f"ready after {result.seconds:.1f} s"
    yield from next_command_lines(result.storage)


def next_command_lines(storage: str) -> Iterator[str]:
    """Yield the commands that a newcomer may run next, which show the run and begin an environment of one's own."""
    folder = Path(storage)
    shown_folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    yield "next, also in another terminal:"
    yield f"  marl-ray runs show {RUN['name']} --storage {shown_folder}"
    yield f"  marl-ray runs ls --storage {shown_folder}"
    yield "  marl-ray new environment my_env"


def open_in_browser(page: str) -> None:
    """Open a page in a browser, if this machine has a display."""
    if has_display():
        webbrowser.open(page)


def has_display() -> bool:
    """Return True if this process can open windows on a display."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _interval(row: dict[str, float], key: str) -> tuple[float, float, float]:
    return row[key], row[f"{key}_low"], row[f"{key}_high"]
