"""What the algorithms learn, over several seeds: interquartile means with stratified bootstrap intervals, certified rates.

    .venv/bin/python benchmarks/learning.py                     every task, five seeds
    .venv/bin/python benchmarks/learning.py --tasks cartpole    some of them

Every run is a shipped config; its best bundle is played on fresh seeds. Writes `benchmarks/results/learning.{json,md}`; the
JSON has the shape that marl-eval reads.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gridworld import RESULTS, ROOT, machine

from marl_ray.config import RunConfig, load_config
from marl_ray.evaluation.statistics import certified_rate, marl_eval, stratified_bootstrap

EVALUATION_SEED = 1_000_000
OPTIMUM, CAPPED_OPTIMUM = 6.529, 6.40
"""Of budget_dag at a mean cost of 30, and with no episode above 30."""


@dataclass(frozen=True)
class Task:
    """A config to run, how its bundles are played, and what is asked of them."""

    config: str
    overrides: tuple[str, ...] = ()
    steps: int = 8
    """Longest episode."""
    episodes: int = 4096
    agents: int = 1
    """Returns are summed over as many agents."""
    least: float | None = None
    """Asked of the interquartile mean."""
    most_cost: float | None = None
    limit: float | None = None
    """The share of episodes that cost at most this is certified."""
    certified: float = 0.0

    def asked(self) -> str:
        parts = [f"return >= {self.least:g}"] if self.least is not None else []
        parts += [f"cost <= {self.most_cost:g}"] if self.most_cost is not None else []
        parts += [f"P(cost <= {self.limit:g}) >= {self.certified:g}"] if self.limit is not None else []
        return ", ".join(parts)


def dag(algorithm: str, *more: str, least: float = 0.98 * OPTIMUM, most: float | None = 1.02 * 30, **rest: Any) -> Task:
    return Task("budget_dag", (f"algorithm={algorithm}", *more), least=round(least, 4), most_cost=most, **rest)


SHORT = "train.total_steps=120000"
"""A trust-region step gets further than a clipped one, and takes longer."""
WIDE = ("train.env_copies=512", "train.total_steps=240000", "evaluation.window=512")
"""The window in which the best bundle is chosen is one batch, of one policy, and large enough to know its cost."""
SLOW_MULTIPLIER = (
    "hyper.entropy_coef=0.05",
    "hyper.lr_decay=true",
    "hyper.multiplier_init=0.05",
    "hyper.multiplier_lr=0.0005",
)
"""A multiplier slower than the policy, and a policy that stays mixed: else they chase each other, see docs/algorithms.md."""
HARD = "constraints=[{{budget: {budget}, hard_limit: {limit}}}]"
TASKS = {
    "dag_ppo_lagrangian": dag("ppo_lagrangian", *SLOW_MULTIPLIER),
    "dag_p3o": dag("p3o"),
    "dag_macpo": dag("macpo", *WIDE),
    "dag_guaranteed": dag("macpo", SHORT, HARD.format(budget=30, limit=31.5), least=6.50, limit=31.5, certified=0.95),
    "dag_capped": dag(
        "macpo",
        SHORT,
        HARD.format(budget=30, limit=30),
        least=0.98 * CAPPED_OPTIMUM,
        most=None,
        limit=30.0,
        certified=0.95,
    ),
    "simple_spread": Task("simple_spread_mappo", steps=25, episodes=1024, agents=3, least=-63.0),
    "cartpole": Task("cartpole_ppo", steps=500, episodes=128, least=475.0),
    "gridworld_grpo": Task("multigrid_grpo", steps=64, episodes=1024, least=0.8),
    "gridworld_rloo": Task("multigrid_grpo", ("algorithm=rloo",), steps=64, episodes=1024, least=0.8),
}


def run(name: str, seed: int) -> dict[str, Any]:
    """Train one seed in this process, play its best bundle."""
    import torch

    from marl_ray.training.alone import train_alone
    from marl_ray.training.evaluate import evaluate

    torch.set_num_threads(1)
    task, started = TASKS[name], time.perf_counter()
    path = ROOT / f"jobs/configs/{task.config}.yaml"
    config = load_config(
        RunConfig, path, (*task.overrides, f"seed={seed}", "resources.workers=1", "checkpoint.every=5")
    )
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
        rows = train_alone(config, Path(folder))
        best = max((path for path in Path(folder).glob("*/bundle")), key=lambda path: int(path.parent.name))
        played = evaluate(config, best, task.episodes, EVALUATION_SEED + seed, task.steps)
    return {
        "task": name,
        "seed": seed,
        "returns": [episode.ret * task.agents for episode in played],
        "costs": [sum(episode.costs) for episode in played],
        "curve": [[row["steps"], row["return"] * task.agents] for row in rows if "return" in row],
        "steps": rows[-1]["steps"],
        "seconds": time.perf_counter() - started,
    }


def summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table."""
    task = TASKS[name]
    means = np.array([[np.mean(one["returns"])] for one in runs])
    costs = [float(np.mean(one["costs"])) for one in runs]
    found = stratified_bootstrap(means)
    row: dict[str, Any] = {
        "task": name,
        "asked": task.asked(),
        "return": list(found),
        "runs": means[:, 0].tolist(),
        "costs": costs,
        "seconds": float(np.median([one["seconds"] for one in runs])),
    }
    met = task.least is None or found.value >= task.least
    if task.most_cost is not None:
        met &= max(costs) <= task.most_cost
    if task.limit is not None:
        kept = [sum(cost <= task.limit + 1e-6 for cost in one["costs"]) for one in runs]
        counts = [len(one["costs"]) for one in runs]
        row["kept"] = [list(pair) for pair in zip(kept, counts, strict=True)]
        row["certified"] = min(certified_rate(k, n) for k, n in zip(kept, counts, strict=True))
        met &= row["certified"] >= task.certified
    return row | {"met": bool(met)}


def table(rows: list[dict[str, Any]], seeds: int) -> str:
    lines = [
        "# Learning",
        "",
        f"{seeds} seeds each; the best bundle of every run is played on fresh seeds with sampled actions. Return:",
        "interquartile mean over seeds with its 95 % stratified bootstrap interval. Cost: mean of an episode, least and",
        "most over seeds. Certified: the share of episodes within the limit that holds with 95 % confidence",
        "(Clopper-Pearson, one-sided), of the worst seed.",
        "",
        "| task | asked | return | least and most seed | cost | certified | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        value, low, high = row["return"]
        costs = f"{min(row['costs']):.2f} - {max(row['costs']):.2f}" if max(row["costs"]) else ""
        certified = f"{row['certified']:.4f}" if "certified" in row else ""
        lines.append(
            f"| {row['task']} | {row['asked']} | {value:.3f} ({low:.3f} - {high:.3f}) "
            f"| {min(row['runs']):.3f}, {max(row['runs']):.3f} | {costs} | {certified} | {'yes' if row['met'] else 'no'} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    jobs = [(name, seed) for name in options.tasks for seed in range(options.seeds)]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        runs = []
        for one in pool.imap(_run, jobs):
            runs.append(one)
            print(
                f"{one['task']}, seed {one['seed']}: {np.mean(one['returns']):.3f}, {one['seconds']:.0f} s", flush=True
            )
    rows = {name: summary(name, [one for one in runs if one["task"] == name]) for name in options.tasks}
    curves = {f"{one['task']}/{one['seed']}": one["curve"] for one in runs}
    files: dict[str, Any] = {}
    for name in options.tasks:
        own = [one for one in runs if one["task"] == name]
        shaped = [[(one["steps"], {"return": one["returns"], "cost": one["costs"]})] for one in own]
        files |= {name: _rounded(marl_eval("marl-ray", TASKS[name].config, name, shaped))}
    described, path = machine(), RESULTS / "learning.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "curves": {}, "marl_eval": {}}
    kept = {row["task"]: row for row in before["rows"]} | rows  # a part of the tasks replaces its own rows
    ordered = [kept[name] for name in TASKS if name in kept]
    text = table(ordered, options.seeds)
    text += "\nMachine: " + ", ".join(f"{k} {v}" for k, v in described.items() if isinstance(v, str | int)) + ".\n"
    stored = {"machine": described, "rows": ordered}
    stored |= {"curves": before["curves"] | curves, "marl_eval": before["marl_eval"] | files}
    path.write_text(json.dumps(stored) + "\n")
    (RESULTS / "learning.md").write_text(text)
    print(text)
    sys.exit(not all(row["met"] for row in rows.values()))


def _run(job: tuple[str, int]) -> dict[str, Any]:
    return run(*job)


def _rounded(value: Any) -> Any:
    """Numbers to four digits and at most 256 episodes a run, which keeps the file small."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value[:256]]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
