"""Skills that language models learn, as pass@1 of held-out tasks before and after.

A team is compared with its generator alone.

    .venv/bin/python -m benchmarks.language.pass_rates              four algorithms and the team, three seeds each
    .venv/bin/python -m benchmarks.language.pass_rates --quick      GRPO with one seed; nothing is stored

Runs of a part of it (`--algorithms`, `--no-team`) join those that are stored.

A model of a million weights first imitates references of small Python tasks, and stops early; reinforcement learning
continues from there with nothing but the tests. Writes `benchmarks/results/language_learning.{json,md}`.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.language.training_runs import COPIES, EVERY, GROUP, HYPER, KINDS, OWN, SAMPLES, Job, train, warm_start
from benchmarks.records import RESULTS, machine
from marl_ray.evaluation.statistics import BootstrapInterval

MIN_GAIN, MAX_SECONDS = 20.0, 600.0
"""Points of pass@1 that each seed must gain, and seconds that its warm start and run may take together."""
ITERATIONS = 60
"""Iterations of each run of an algorithm."""
TEAM_TOKENS = 400_000
"""Sampled tokens of training, on both sides of the comparison."""
RESAMPLES = 10_000
"""Resamples of the bootstrap."""
SETTINGS = {"kinds": KINDS, "hyper": HYPER, "own": OWN, "every": EVERY, "samples": SAMPLES}


def crossed_bootstrap(values: NDArray[np.float64], seed: int = 0) -> BootstrapInterval:
    """Return the mean of (runs, tasks) with its 95 % percentile interval.

    Runs and tasks are both drawn anew (Owen 2007).
    """
    runs, tasks = values.shape
    random = np.random.default_rng(seed)
    rows = random.multinomial(runs, np.full(runs, 1 / runs), RESAMPLES) / runs
    columns = random.multinomial(tasks, np.full(tasks, 1 / tasks), RESAMPLES) / tasks
    means = np.einsum("br,rt,bt->b", rows, values, columns)
    low, high = np.quantile(means, [0.025, 0.975])
    return BootstrapInterval(float(values.mean()), float(low), float(high))


def passes(runs: list[dict[str, Any]], when: str, what: str = "passes") -> NDArray[np.float64]:
    """Return points of shape (runs, tasks)."""
    return 100 * np.array([run[when][what] for run in runs])


def algorithm_row(algorithm: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row of the table of algorithms."""
    before, after = passes(runs, "before"), passes(runs, "after")
    gains = (after - before).mean(1)
    split = np.array([row[:4] for run in runs for row in run["iterations"]])
    seconds = [run["seconds"] + run["warm_seconds"] for run in runs]
    return {
        "algorithm": algorithm,
        "before": before.mean(1).tolist(),
        "after": after.mean(1).tolist(),
        "gain": list(crossed_bootstrap(after - before)),
        "gains": gains.tolist(),
        "tokens": [run["tokens"] for run in runs],
        "iteration_seconds": np.median(split, 0).tolist(),
        "seconds": seconds,
        "met": {"gain": bool(gains.min() >= MIN_GAIN), "seconds": max(seconds) <= MAX_SECONDS},
    }


def repair_rate(run: dict[str, Any]) -> float:
    """Return the share in percent of first programs that failed and that the rest of the episode made pass."""
    first, last = statistics.mean(run["after"]["first"]), statistics.mean(run["after"]["passes"])
    return float(100 * (last - first) / max(1 - first, 1e-9))


def comparison(alone: list[dict[str, Any]], team: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the team with the generator alone: same seeds, same held-out tasks, same tokens sampled in training."""
    difference = passes(team, "after") - passes(alone, "after")
    at_start = passes(team, "before") - passes(alone, "before")
    first = passes(team, "after", "first") - passes(alone, "after", "first")
    sides = {}
    for name, runs in (("alone", alone), ("team", team)):
        sides[name] = {
            "before": passes(runs, "before").mean(1).tolist(),
            "after": passes(runs, "after").mean(1).tolist(),
            "first": passes(runs, "after", "first").mean(1).tolist(),
            "repaired": [repair_rate(run) for run in runs],
            "tokens": [run["tokens"] for run in runs],
            "iterations": [len(run["iterations"]) for run in runs],
            "tokens_per_task": statistics.mean(run["after"]["tokens"] for run in runs),
            "turns_per_task": statistics.mean(run["after"]["turns"] for run in runs),
            "seconds": [run["seconds"] + run["warm_seconds"] for run in runs],
        }
    return {
        "sides": sides,
        "difference": list(crossed_bootstrap(difference)),
        "by_seed": difference.mean(1).tolist(),
        "difference_before": list(crossed_bootstrap(at_start)),
        "difference_first": list(crossed_bootstrap(first)),
        "met": bool(crossed_bootstrap(difference).low > 0),
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Language models: what they learn",
        "",
        "Small Python tasks of levels 1 and 2 (`code_team`), a byte-level model of a million weights. It imitates",
        f"references, stops early, and then learns from the tests alone: {COPIES // GROUP} tasks x {GROUP} programs per",
        f"iteration. pass@1 is the mean of {SAMPLES} sampled episodes of every held-out task, in percent. Intervals (95 %)",
        "draw seeds and tasks anew.",
        "",
        "| algorithm | before | after | gain of the mean | least gain | seconds per iteration: all (sampling, programs, "
        "update) | most seconds, warm start included |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["algorithms"]:
        total, *parts = row["iteration_seconds"]
        lines.append(
            f"| {row['algorithm']} | {spread(row['before'])} | {spread(row['after'])} | {interval(row['gain'])} "
            f"| {min(row['gains']):.1f} | {total:.2f} ({', '.join(f'{part:.2f}' for part in parts)}) "
            f"| {max(row['seconds']):.0f} |"
        )
    goals = [
        (f"{row['algorithm']}: every seed gains {MIN_GAIN:g} points", row["met"]["gain"])
        for row in result["algorithms"]
    ]
    goals += [
        (f"{row['algorithm']}: every run under {MAX_SECONDS / 60:g} minutes", row["met"]["seconds"])
        for row in result["algorithms"]
    ]
    if result.get("team"):
        lines += team_lines(result["team"])
        goals.append(("the team passes more than the generator alone (interval above 0)", result["team"]["met"]))
    lines += ["", "| goal | |", "|---|---|", *(f"| {goal} | {'met' if met else 'not met'} |" for goal, met in goals)]
    return "\n".join([*lines, ""])


def team_lines(comparison: dict[str, Any]) -> list[str]:
    """Return the comparison as Markdown."""
    lines = [
        "",
        "## Generator and reviewer against the generator alone",
        "",
        "GRPO, two programs at most. The team's reviewer reads the failing test and says what to change; alone, the",
        f"generator reads the failing test itself. Both end training once {TEAM_TOKENS:,} tokens were sampled, of all",
        "agents together.",
        "",
        "| | before | after | first program | repaired of 100 | iterations | tokens per task | turns | most seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, side in comparison["sides"].items():
        lines.append(
            f"| {name} | {spread(side['before'])} | {spread(side['after'])} | {spread(side['first'])} "
            f"| {spread(side['repaired'])} | {min(side['iterations'])}-{max(side['iterations'])} "
            f"| {side['tokens_per_task']:.1f} | {side['turns_per_task']:.2f} | {max(side['seconds']):.0f} |"
        )
    seeds = ", ".join(f"{value:+.1f}" for value in comparison["by_seed"])
    return [
        *lines,
        "",
        f"Team less alone, in points: **{interval(comparison['difference'])}** after training (by seed {seeds}), "
        f"{interval(comparison['difference_first'])} of it with the first program, "
        f"{interval(comparison['difference_before'])} before training.",
    ]


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} - {max(values):.1f})"


def interval(values: list[float]) -> str:
    value, low, high = values
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def measure(algorithms: list[str], team: bool, seeds: int, processes: int) -> list[dict[str, Any]]:
    """Train all runs, each in its own process; those of a seed share its warm start."""
    kinds = ["program"] * bool(algorithms) + ["alone", "team"] * team
    with (
        tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder,
        multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool,
    ):
        starts = [(kind, seed, Path(folder) / f"{kind}-{seed}") for kind in kinds for seed in range(seeds)]
        warm = {}
        for result in pool.imap(_warm_start, starts, chunksize=1):
            warm[result["kind"], result["seed"]] = result
            print(f"{result['kind']}, seed {result['seed']}: warm start of {result['seconds']:.0f} s", flush=True)
        # Whatever is shorter, this many iterations sample more tokens than are asked for.
        plans: list[tuple[str, str, int, int | None]] = [
            (kind, "grpo", 10 * ITERATIONS, TEAM_TOKENS) for kind in ("alone", "team") if team
        ]
        plans += [("program", algorithm, ITERATIONS, None) for algorithm in algorithms]
        jobs = [
            Job(kind, algorithm, seed, warm[kind, seed]["bundle"], iterations, tokens)
            for kind, algorithm, iterations, tokens in plans
            for seed in range(seeds)
        ]
        runs = []
        for result in pool.imap(_train, jobs, chunksize=1):
            start = warm[result["kind"], result["seed"]]
            runs.append(result | {"warm_seconds": start["seconds"], "log_likelihood": start["log_likelihood"]})
            before, after = (100 * statistics.mean(result[when]["passes"]) for when in ("before", "after"))
            print(
                f"{result['kind']}, {result['algorithm']}, seed {result['seed']}: {before:.1f} -> {after:.1f}, "
                f"{result['seconds']:.0f} s",
                flush=True,
            )
    return runs


def _warm_start(job: tuple[str, int, Path]) -> dict[str, Any]:
    return warm_start(*job)


def _train(job: Job) -> dict[str, Any]:
    return train(job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--algorithms", nargs="*", choices=OWN, default=list(OWN))
    parser.add_argument("--no-team", action="store_true", help="leave out the team and its generator alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="runs at once; a run's seconds are its own with 1")
    parser.add_argument("--quick", action="store_true", help="GRPO, one seed, no files")
    options = parser.parse_args()
    if options.quick:
        options.algorithms, options.no_team, options.seeds = ["grpo"], True, 1
    runs = measure(options.algorithms, not options.no_team, options.seeds, options.processes)
    if not options.quick:
        runs += read_earlier_runs({(run["kind"], run["algorithm"]) for run in runs})
    of_programs = [run for run in runs if run["kind"] == "program"]
    by_algorithm = {name: [run for run in of_programs if run["algorithm"] == name] for name in OWN}
    alone, team = ([run for run in runs if run["kind"] == kind] for kind in ("alone", "team"))
    described = machine()
    result: dict[str, Any] = {
        "machine": described,
        "settings": SETTINGS,
        "algorithms": [
            algorithm_row(name, algorithm_runs) for name, algorithm_runs in by_algorithm.items() if algorithm_runs
        ],
        "team": comparison(alone, team) if team else None,
        "runs": runs,
    }
    text = table(result)
    text += "\nMachine: " + ", ".join(f"{k} {v}" for k, v in described.items() if isinstance(v, str | int)) + ".\n"
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "language_learning.json").write_text(json.dumps(round_numbers(result)) + "\n")
        (RESULTS / "language_learning.md").write_text(text)
    print(text)
    sys.exit(not all(all(row["met"].values()) for row in result["algorithms"]))


def read_earlier_runs(measured: set[tuple[str, str]]) -> list[dict[str, Any]]:
    """Read the stored runs of this machine and these settings, of what was not measured now."""
    path = RESULTS / "language_learning.json"
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    now = json.loads(json.dumps(round_numbers({"machine": machine(), "settings": SETTINGS})))
    if {key: stored[key] for key in now} != now:
        return []
    return [run for run in stored["runs"] if (run["kind"], run["algorithm"]) not in measured]


def round_numbers(value: Any) -> Any:
    """Round numbers to four digits, which keeps the file small."""
    if isinstance(value, dict):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [round_numbers(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
