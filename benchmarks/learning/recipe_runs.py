"""Runs and sweeps of shipped configs as a user starts them, and what the page of recipes tells of each."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, load_before

LIMIT_S = 7200.0
"""Longest time of one command."""
DEMONSTRATIONS = ("math_grpo", "name=math-sft", "train.total_steps=0")
START = {"preferences_dpo": DEMONSTRATIONS, "served_texts": DEMONSTRATIONS}
"""Config -> the config and the changes of the run whose bundle it begins with, as its comment says."""


def run_recipe(
    name: str, metric: str, seed: int, folder: Path, serve: Callable[[str, Path, Path, int], str] | None = None
) -> dict[str, Any]:
    """Train one seed of a config and return what came of it.

    That is its learning curve, the score of its best bundle on other episodes, and its seconds, without those of the
    run that it begins with. `serve` makes its `data` of (config, that run's bundle, folder, seed).
    """
    storage = folder / f"{name}-{seed}"
    overrides = [f"seed={seed}", f"storage={storage}"]
    if name in START:
        config, *changes = START[name]
        start = marl_ray("train", f"jobs/configs/{config}.yaml", *changes, *overrides)
        if serve:
            overrides.append(f"data={serve(name, Path(start['bundle']), storage, seed)}")
    load, begun = load_before(), time.perf_counter()
    marl_ray("train", f"jobs/configs/{name}.yaml", *overrides, f"name={name}")
    seconds = time.perf_counter() - begun
    rows = [json.loads(line) for line in (storage / name / "metrics.jsonl").read_text().splitlines()]
    best = [row for row in rows if f"best/{metric}" in row][-1]
    last = [row for row in rows if f"eval/{metric}" in row][-1]
    return {
        "config": name,
        "seed": seed,
        "metric": metric,
        "score": best[f"best/{metric}"],
        "last": last[f"eval/{metric}"],
        "steps": rows[-1]["steps"],
        "seconds": round(seconds, 1),
        "load_before": round(load, 1),
        "curve": [[row["steps"], round(row[f"eval/{metric}"], 4)] for row in rows if f"eval/{metric}" in row],
    }


def sweep_recipe(name: str, folder: Path) -> dict[str, Any]:
    """Run a sweep and return its winner, and the score of every trial that has one."""
    load = load_before()
    done = marl_ray("sweep", f"jobs/configs/{name}.yaml", f"storage={folder}")
    winner = done["winner"]
    return {
        "config": name,
        "status": done["status"],
        "trials": done["trials"],
        "steps": done["steps"],
        "seconds": round(done["seconds"], 1),
        "load_before": round(load, 1),
        "winner": {key: winner[key] for key in ("values", "scores", "certainty")},
    }


def plan_recipe(name: str, gpus: list[int]) -> dict[str, Any]:
    """Return the bytes of one GPU that a language run takes, for each number of GPUs, as `marl-ray plan` counts them."""
    plans = marl_ray("plan", f"jobs/configs/{name}.yaml", *(f"--gpus={number}" for number in gpus))["plans"]
    return {"config": name, "plans": plans}


def marl_ray(*arguments: str) -> Any:
    """Return the document of `marl-ray ARGUMENTS --json`.

    Raises subprocess.CalledProcessError, with the command's output on the screen.
    """
    ended = subprocess.run(
        [sys.executable, "-m", "marl_ray", *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if ended.returncode:
        print(ended.stdout[-4000:], ended.stderr[-4000:], file=sys.stderr)
        ended.check_returncode()
    return json.loads(ended.stdout)
