"""Returns that the algorithms reach over several seeds.

They are interquartile means with stratified bootstrap intervals, beside exact values.

    .venv/bin/python -m benchmarks.learning.returns                     every task, five seeds
    .venv/bin/python -m benchmarks.learning.returns --tasks cartpole    some of them

Every run is a shipped config; its best bundle is played on fresh seeds. Of `budget_dag` the final policy and the best bundle
are also scored by enumeration (`budget_exact.py`), against the exact optimum and the best policy that always makes the
same effort. Writes `benchmarks/results/learning.{json,md}`; the JSON has the shape that marl-eval reads.
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

from benchmarks.learning.budget_exact import States, Worth, score
from benchmarks.records import RESULTS, ROOT, load_before, machine
from marl_ray.config import RunConfig, load_config
from marl_ray.envs.budget.dag import best_capped_reward
from marl_ray.evaluation.statistics import marl_eval_document, stratified_bootstrap
from marl_ray.training.checkpoints.storage import local_stored_folder

EVALUATION_SEED = 1_000_000
"""Seed of the first start, far from the seeds of the runs."""
BUDGET, TOLERATED = 30.0, 1.02
"""The budget of budget_dag's mean cost, and the multiple of it that a final policy may cost."""


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
    min_return: float | None = None
    """Asked of the interquartile mean of the best bundles' returns."""
    share: float | None = None
    """Asked of the interquartile mean of the final policies' and of the best bundles' scores (`budget_exact.score`)."""
    exact: float | None = None
    """Asked of every final policy's exact return."""
    limit: float | None = None
    """The cost that an episode may have; every policy must keep it with a chance of at least `within`."""
    within: float = 1.0

    @property
    def has_budget(self) -> bool:
        return self.config == "budget_dag"

    def requirement(self) -> str:
        parts = [f"return >= {self.min_return:g}"] if self.min_return is not None else []
        parts += [f"score >= {self.share:g}, cost <= {TOLERATED * BUDGET:g}"] if self.share is not None else []
        parts += [f"return >= {self.exact:g}"] if self.exact is not None else []
        parts += [f"P(cost <= {self.limit:g}) >= {self.within:g}"] if self.limit is not None else []
        return ", ".join(parts)


def dag(algorithm: str, *more: str, share: float | None = 0.8, **rest: Any) -> Task:
    return Task("budget_dag", (f"algorithm={algorithm}", *more), share=share, **rest)


SHORT = "train.total_steps=160000"
"""The steps that the mean-cost algorithms need to settle."""
HARD = "constraints=[{{budget: {budget}, hard_limit: {limit}}}]"
TASKS = {
    "dag_ppo_lagrangian": dag("ppo_lagrangian", SHORT),
    "dag_pid_lagrangian": dag("pid_lagrangian", SHORT),
    "dag_mappo_lagrangian": dag("mappo_lagrangian", SHORT),
    "dag_p3o": dag("p3o", SHORT),
    "dag_macpo": dag("macpo", SHORT),
    "dag_guaranteed": dag("macpo", SHORT, HARD.format(budget=30, limit=31.5), limit=31.5),
    "dag_capped": dag(
        "macpo",
        HARD.format(budget=30, limit=30),
        share=None,
        exact=round(best_capped_reward(30) - 0.01, 4),
        limit=30.0,
    ),
    "simple_spread": Task("simple_spread_mappo", steps=25, episodes=1024, agents=3, min_return=-63.0),
    "cartpole": Task("cartpole_ppo", steps=500, episodes=128, min_return=475.0),
    "gridworld_grpo": Task("multigrid_grpo", steps=64, episodes=1024, min_return=0.8),
    "gridworld_rloo": Task("multigrid_grpo", ("algorithm=rloo",), steps=64, episodes=1024, min_return=0.8),
}


def learn(name: str, seed: int) -> dict[str, Any]:
    """Train one seed in this process, play its best bundle."""
    import torch

    from marl_ray.training.evaluation.play_bundle import play_bundle
    from marl_ray.training.loop.assembly import build_run
    from marl_ray.training.single_process import process_group

    torch.set_num_threads(1)
    task, started = TASKS[name], time.perf_counter()
    path = ROOT / f"jobs/configs/{task.config}.yaml"
    config = load_config(
        RunConfig, path, (*task.overrides, f"seed={seed}", "resources.workers=1", "checkpoint.every=5")
    )
    states = States(config, task.limit or BUDGET) if task.has_budget else None
    rows, worths, best = [], [], 0
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder, process_group():
        trained = build_run(config, torch.device("cpu"))
        rows.append(trained.begin())
        while True:
            if states is not None:
                worths.append(states.worth(trained.team.models["shared"]))
            if trained.evaluation.is_best:
                best = trained.state.iteration
            if trained.save_due:
                trained.save(local_stored_folder(Path(folder, str(trained.state.iteration))))
            if trained.done:
                break
            rows.append(trained.step())
        trained.close()
        played = play_bundle(
            config, Path(folder, str(best), "bundle"), task.episodes, EVALUATION_SEED + seed, task.steps
        )
    return {
        "task": name,
        "seed": seed,
        "returns": [episode.episode_return * task.agents for episode in played],
        "costs": [sum(episode.costs) for episode in played],
        "curve": [[row["steps"], row["return"] * task.agents] for row in rows if "return" in row],
        "worths": [list(worth) for worth in worths],
        "best": best,
        "steps": rows[-1]["steps"],
        "seconds": time.perf_counter() - started,
    }


def summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row of the tables."""
    task = TASKS[name]
    means = np.array([[np.mean(run["returns"])] for run in runs])
    intervals = stratified_bootstrap(means)
    row: dict[str, Any] = {
        "task": name,
        "asked": task.requirement(),
        "return": list(intervals),
        "runs": means[:, 0].tolist(),
        "seconds": float(np.median([run["seconds"] for run in runs])),
    }
    met = task.min_return is None or intervals.value >= task.min_return
    if task.has_budget:
        policies = {"final": [Worth(*run["worths"][-1]) for run in runs]}
        policies["best"] = [Worth(*run["worths"][run["best"]]) for run in runs]
        for kind, worths in policies.items():
            scores = [score(worth, BUDGET) for worth in worths]
            shares = stratified_bootstrap(np.array(scores)[:, None])
            row[kind] = {"worths": [list(worth) for worth in worths], "scores": scores, "score": list(shares)}
            met &= task.share is None or shares.value >= task.share
            met &= task.limit is None or min(worth.within for worth in worths) >= task.within - 1e-9
        if task.share is not None:
            met &= max(worth.cost for worth in policies["final"]) <= TOLERATED * BUDGET
        if task.exact is not None:
            met &= min(worth.episode_return for worth in policies["final"]) >= task.exact
        # From the middle of a run on, of all seeds: what the policies in training cost.
        late = [worth[1] for run in runs for worth in run["worths"][len(run["worths"]) // 2 :]]
        row["late_cost"] = [min(late), float(np.std(late)), max(late)]
    return row | {"met": bool(met)}


def table(rows: list[dict[str, Any]], seeds: int) -> str:
    lines = [
        "# Learning",
        "",
        f"{seeds} seeds each. Return: interquartile mean over seeds, with its 95 % stratified bootstrap interval, of the",
        "best bundles, played on fresh seeds with sampled actions.",
        "",
        "| task | asked | return | least and most seed | met |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        value, low, high = row["return"]
        ends = f"{min(row['runs']):.3f}, {max(row['runs']):.3f}"
        met = "yes" if row["met"] else "no"
        lines.append(f"| {row['task']} | {row['asked']} | {value:.3f} ({low:.3f} - {high:.3f}) | {ends} | {met} |")
    lines += [
        "",
        "## budget_dag, exactly",
        "",
        "Mean return, mean cost and chance of an episode to keep the limit, by enumeration of all states, of the policy",
        "at the run's end and of the best bundle. Score: 0 is the best policy that always makes the same effort, 1 the",
        "optimum at a mean cost of 30; what a higher cost buys is taken off. Interquartile means over seeds, least and most",
        "seed in brackets. Cost in training: least and most (standard deviation) of all policies from the middle of the",
        "runs on.",
        "",
        "| task | final score | best score | final return | final cost | cost in training | final, best P(cost <= limit) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "final" not in row:
            continue
        final, best = row["final"], row["best"]
        returns, costs, within = zip(*final["worths"], strict=True)
        scored = [f"{x['score'][0]:.3f} ({min(x['scores']):.3f} - {max(x['scores']):.3f})" for x in (final, best)]
        low, spread, high = row["late_cost"]
        limited = f"{min(within):.4f}, {min(w[2] for w in best['worths']):.4f}" if "P(" in row["asked"] else ""
        lines.append(
            f"| {row['task']} | {scored[0]} | {scored[1]} | {min(returns):.4f} - {max(returns):.4f} "
            f"| {min(costs):.2f} - {max(costs):.2f} | {low:.2f} - {high:.2f} ({spread:.2f}) | {limited} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    load, jobs = load_before(), [(name, seed) for name in options.tasks for seed in range(options.seeds)]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        runs = []
        for trained in pool.imap(_run, jobs):
            runs.append(trained)
            print(
                f"{trained['task']}, seed {trained['seed']}: {np.mean(trained['returns']):.3f}, "
                f"final {trained['worths'][-1:]}, {trained['seconds']:.0f} s",
                flush=True,
            )
    rows = {name: summary(name, [run for run in runs if run["task"] == name]) for name in options.tasks}
    curves = {f"{run['task']}/{run['seed']}": run["curve"] for run in runs}
    files: dict[str, Any] = {}
    for name in options.tasks:
        task_runs = [run for run in runs if run["task"] == name]
        shaped = [[(run["steps"], {"return": run["returns"], "cost": run["costs"]})] for run in task_runs]
        files |= {name: _round_numbers(marl_eval_document("marl-ray", TASKS[name].config, name, shaped))}
    described, path = machine(), RESULTS / "learning.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "curves": {}, "marl_eval": {}}
    by_task = {row["task"]: row for row in before["rows"]} | rows  # a part of the tasks replaces its own rows
    ordered = [by_task[name] for name in TASKS if name in by_task]
    text = table(ordered, options.seeds)
    text += "\nMachine: " + ", ".join(f"{k} {v}" for k, v in described.items() if isinstance(v, str | int)) + ".\n"
    stored = {"machine": described, "load_before": load, "rows": ordered}
    stored |= {"curves": before["curves"] | curves, "marl_eval": before["marl_eval"] | files}
    path.write_text(json.dumps(stored) + "\n")
    (RESULTS / "learning.md").write_text(text)
    print(text)
    sys.exit(not all(row["met"] for row in rows.values()))


def _run(job: tuple[str, int]) -> dict[str, Any]:
    return learn(*job)


def _round_numbers(value: Any) -> Any:
    """Round numbers to four digits and keep at most 256 episodes a run, so that the file stays small."""
    if isinstance(value, dict):
        return {key: _round_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round_numbers(item) for item in value[:256]]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
