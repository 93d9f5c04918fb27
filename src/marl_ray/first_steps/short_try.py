"""A first look at the product on this machine: train a small team, score it on whole episodes, serve it, open its page."""

import asyncio
import contextlib
import os
import signal
import sys
import time
import webbrowser
from pathlib import Path
from typing import Any

import numpy as np

from marl_ray.config import RunConfig, parse_config
from marl_ray.first_steps.steps import KEYS, deploy_endpoint, new_folder, plain_console, step
from marl_ray.serving.http.keys import new_key

RUN: dict[str, Any] = {
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


def run_short_try(folder: Path, open_page: bool, leave: bool) -> None:
    """Train, score, serve and play, and serve on until Ctrl-C unless `leave`. Everything written lies under
    `folder`/TIME."""
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
        with step(console, "compiling the gridworld (takes long the first time only)"):
            check_run(run)
        with step(console, "starting a local Ray"):
            cpus = max(CPUS, os.cpu_count() or 1)
            ray = stack.enter_context(local_ray(num_cpus=cpus, object_store_bytes=256 << 20))
        with step(console, f"training two agents with {run.algorithm} on {run.env.id}"):
            result = train(run, own_ray=True)
        key = new_key(folder / KEYS, "try")
        with step(console, "serving the best team"):
            url = deploy_endpoint(folder, ray.dashboard_url, {"arms": {run.algorithm: {"bundle": result.model}}})
        with step(console, f"playing {EPISODES} episodes over HTTP"):
            episodes = asyncio.run(play_episodes(url, lambda: make_env(run.env), EPISODES, key=key))
        first, *_ = read_metrics(*filesystem_of(run))
        best = [row for row in read_metrics(*filesystem_of(run)) if "best/return" in row][-1]
        latencies = [1000 * seconds for episode in episodes for seconds in episode.latencies]
        lines = {
            "return before": _interval(first, "eval/return"),
            "return after": f"{_interval(best, 'best/return')}, on {run.evaluation_episodes} episodes of other starts",
            "over HTTP": f"{np.mean([episode.ret for episode in episodes]):.3f} in {len(episodes)} episodes, "
            f"{np.median(latencies):.1f} ms an action",
            "curve": str(result.curve),
            "bundle": result.bundle,
            "page": f"{url}/ui  (user: any, password: the key)",
            "key": key,
        }
        for name, text in lines.items():
            console.print(f"{name:<15}{text}", soft_wrap=True, highlight=False, markup=False)
        console.print(f"ready after {time.monotonic() - began:.1f} s")
        if open_page and has_display():
            webbrowser.open(f"{url}/ui")
        if not leave:
            console.print("serving until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        with step(console, "shutting down"):
            stack.close()


def has_display() -> bool:
    """True if a browser that is opened here would be seen."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _interval(row: dict[str, float], key: str) -> str:
    return f"{row[key]:.3f} [{row[f'{key}_low']:.3f}, {row[f'{key}_high']:.3f}]"
