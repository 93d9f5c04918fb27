"""Texts that a gateway serves to clients, with their outcomes, for the recipe that learns from them."""

import asyncio
import time
from pathlib import Path

from benchmarks.learning.recipe_runs import marl_ray
from benchmarks.records import ROOT
from benchmarks.serving.cluster import gateway, serve_applications
from marl_ray.config import RunConfig, load_config
from marl_ray.envs.registry import make_env
from marl_ray.serving.client.play import play_episodes

EXPERIMENT = "math"
CLIENTS = 32
"""Sessions that are open at once."""
LOGGED_S = 30.0
"""Longest time until all that was served is in the log."""


def serve_texts(config: str, bundle: Path, folder: Path, seed: int) -> str:
    """Serve a bundle to clients that ask training tasks and report what it pays, and return the run's `data`.

    The tasks are of the config's environment, one for each of `train.total_steps`. `marl-ray export` writes the
    data under `folder`.
    """
    run = load_config(RunConfig, ROOT / f"jobs/configs/{config}.yaml")
    count, place, log = run.train.total_steps, folder / "gateway", str(folder / "decisions")
    served = gateway(place, {"first": str(bundle)}, (EXPERIMENT,), decision_log=log)
    with serve_applications({"gateway": served}, optimized=False) as running:
        url = running["gateway"].url
        asyncio.run(play_episodes(url, lambda: make_env(run.env), count, concurrency=CLIENTS, seed=seed * count))
        where = ("--decisions", log, "--database", served["args"]["database"], "--out", str(folder))
        deadline = time.monotonic() + LOGGED_S
        while (exported := marl_ray("export", EXPERIMENT, *where)["sequences"]) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{log}: expected {count} texts after {LOGGED_S:.0f} s, found {exported}")
            time.sleep(1)
    return f"decisions://{folder}/{EXPERIMENT}"
