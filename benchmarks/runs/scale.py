"""The cost of size: trials of a sweep, policies of a team, workers of a run.

    .venv/bin/python -m benchmarks.runs.scale                        # about five minutes on two cores
    .venv/bin/python -m benchmarks.runs.scale --quick                # the small sizes alone; stores nothing
    .venv/bin/python -m benchmarks.runs.scale --parts team workers   # some parts; the others keep their stored numbers

Writes `benchmarks/results/scale.{json,md,png}`.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, load_before, machine

TRIALS, TPE_TRIALS = (100, 400, 1600), (100, 400)
"""Numbers of trials of a sweep; TPE takes longer with each of them."""
SWEEPS = {"asha": TRIALS, "fifo": TRIALS, "fifo-tpe": TPE_TRIALS}
"""Scheduler, and search if it is not random -> numbers of trials."""
POLICIES, WORKERS = (1, 4, 16, 64), (10, 100, 1000)
"""Numbers of policies of a team, and of workers of a run."""
QUICK = 2
"""Sizes of each kind that a quick look measures, the least ones."""
GOAL_MS = 5.0
"""The goal: milliseconds of the driver for each trial, whatever their number."""


def measure_sweeps(sizes_of_each: int | None) -> dict[str, Any]:
    from benchmarks.runs.scale_sweep import simulate_sweep
    from marl_ray.cluster.local_ray import local_ray

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as storage, local_ray(num_cpus=2, dashboard=False):
        simulate_sweep(Path(storage, "first"), 20, "asha")  # imports and caches
        for kind, sizes in SWEEPS.items():
            for trials in sizes[:sizes_of_each]:
                with contextlib.redirect_stdout(io.StringIO()):  # a line for each trial
                    times = simulate_sweep(Path(storage), trials, *kind.split("-"))
                result.setdefault(kind, {})[trials] = times
                print(f"sweep {kind} {trials}: {times['own']:.2f} ms", file=sys.stderr, flush=True)
    return result


def measure_team(sizes: int | None) -> dict[int, Any]:
    from benchmarks.runs.scale_team import team_times

    return {policies: team_times(policies) for policies in POLICIES[:sizes]}


def measure_workers(sizes: int | None) -> dict[int, Any]:
    from benchmarks.runs.scale_workers import look_times
    from marl_ray.cluster.local_ray import local_ray

    with local_ray(num_cpus=2, dashboard=False):
        return {workers: look_times(workers) for workers in WORKERS[:sizes]}


PARTS = {"sweeps": measure_sweeps, "team": measure_team, "workers": measure_workers}


def measure_in_new_process(part: str, quick: bool) -> dict[str, Any]:
    """Return a part's numbers, measured in its own process; keys are text, as in the file."""
    command = [sys.executable, "-m", "benchmarks.runs.scale", "--alone", part, *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def tables(result: dict[str, Any]) -> str:
    about = result["machine"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores, load before {result['load_before']:.1f}; "
        f"Python {about['python']}, Ray {about['ray']}, torch {about['torch']}.",
        "",
        "## Trials of one sweep, three seeds each",
        "",
        "Milliseconds of CPU of the driver for each trial, and wall time of its loop, without the training, Ray Tune and "
        f"MLflow. The goal is at most {GOAL_MS:g} ms of the loop, whatever the number of trials. The search is apart, "
        "because Optuna's TPE reads all earlier trials for each new one.",
        "",
        "| scheduler, search | trials | loop | of it records | of it scheduler | of it configs | wall | search | report |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, sizes in result["sweeps"].items():
        scheduler, _, search = kind.partition("-")
        for trials, row in sizes.items():
            cells = [f"{row[key]:.2f}" for key in ("own", "save", "scheduler", "legs", "wall", "search", "report")]
            lines.append(f"| {scheduler}, {search or 'random'} | {int(trials):,} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Policies of one team",
        "",
        "Milliseconds of CPU for each policy (IPPO, an agent each, 64 x 64 networks), trained in one process on one thread.",
        "",
        "| policies | iteration | of it rollout | of it update | checkpoint | bytes of a checkpoint |",
        "|---|---|---|---|---|---|",
    ]
    for policies, row in result["team"].items():
        cells = [f"{row[key]:.1f}" for key in ("iteration", "rollout", "update", "checkpoint")]
        lines.append(f"| {policies} | {' | '.join(cells)} | {row['bytes']:,.0f} |")
    lines += [
        "",
        "## Workers of one run",
        "",
        "A look of Ray Train after all workers, in its own code with the run's callbacks; the workers are simulated by "
        "two processes that answer real calls. Between two looks the driver does nothing for a worker. A step costs the "
        "driver the same for any number of workers: rank 0 alone writes its row, and the driver reads it.",
        "",
        "| workers | CPU of the driver for each, µs | wall for each, µs | seconds between looks | share of one CPU |",
        "|---|---|---|---|---|",
    ]
    for workers, row in result["workers"].items():
        lines.append(
            f"| {int(workers):,} | {row['cpu']:.0f} | {row['wall']:.0f} | {row['between']:.2f} | {row['share']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (sweeps, team, workers) = plt.subplots(1, 3, figsize=(15, 4.5))
    for (kind, sizes), colour in zip(result["sweeps"].items(), ("C0", "C1", "C2"), strict=True):
        sizes = {int(trials): row for trials, row in sizes.items()}
        sweeps.plot(list(sizes), [row["own"] for row in sizes.values()], f"{colour}o-", label=f"{kind}, loop")
        if "-" in kind:
            sweeps.plot(list(sizes), [row["search"] for row in sizes.values()], f"{colour}x--", label=f"{kind}, search")
    sweeps.axhline(GOAL_MS, color="0.6", linestyle=":", label="goal")
    sweeps.set(xlabel="trials of a sweep", ylabel="ms of CPU for each trial", title="Driver of a sweep")
    for key, style in (("iteration", "C0o-"), ("update", "C1s-"), ("rollout", "C2^-"), ("checkpoint", "C3x--")):
        team.plot(list(map(int, result["team"])), [row[key] for row in result["team"].values()], style, label=key)
    team.set(xlabel="policies of a team", ylabel="ms of CPU for each policy", title="One team, one process")
    for key, style, label in (("cpu", "C0o-", "CPU"), ("wall", "C1x--", "wall")):
        values = [row[key] for row in result["workers"].values()]
        workers.plot(list(map(int, result["workers"])), values, style, label=label)
    workers.set(xlabel="workers of a run", ylabel="µs for each worker", title="A look of the driver after its workers")
    for axes in (sweeps, team, workers):
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--alone", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="measure small sizes alone, and store nothing")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(PARTS[options.alone](QUICK if options.quick else None)))
        return
    file = RESULTS / "scale.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    result["machine"], result["load_before"] = machine("ray", "torch"), load_before()
    for part in options.parts:
        result[part] = measure_in_new_process(part, options.quick)
    text = tables(result)
    print(text)
    if options.quick:
        return
    file.write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "scale.md").write_text(text)
    plot(result, RESULTS / "scale.png")


if __name__ == "__main__":
    main()
