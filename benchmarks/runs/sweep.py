"""The cost of a sweep beside its runs, and the saving of successive halving.

    .venv/bin/python -m benchmarks.runs.sweep                  # eight variants, three seeds, 50,000 steps each
    .venv/bin/python -m benchmarks.runs.sweep --steps 4096     # a quick look

Measured in turn, on two CPUs: `jobs/configs/sweeps/algorithms.yaml` with every variant run to its end; the same runs back to
back in one process, without Ray, MLflow or kept checkpoints; the sweep as shipped, with successive halving. The sweep's time
begins before Ray starts and ends when the winner is registered. Writes `benchmarks/results/sweep.{json,md}`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.records import ROOT, load_before, machine, store
from marl_ray.cluster.local_ray import local_ray
from marl_ray.config import RunConfig, parse_config
from marl_ray.config.sweep import SweepConfig, combinations, load_sweep
from marl_ray.tuning.records import SweepRecords
from marl_ray.tuning.running.driver import check_sweep, run_sweep

FILE = ROOT / "jobs/configs/sweeps/algorithms.yaml"
CPUS = 2
"""Logical CPUs of the sweep's Ray."""
SECONDS_GOAL, STEPS_GOAL = 1.25, 0.5
"""The goals: the sweep's time over that of the runs one by one, and halving's steps over all steps."""


def load_shipped_sweep(storage: str, steps: int, fifo: bool = False) -> SweepConfig:
    """Return the shipped sweep with this many steps and rungs at the same shares of them."""
    sweep = load_sweep(FILE)
    changes = dict(sweep.set)
    changes["train"] = changes["train"] | {"total_steps": steps}
    grace = max(1, round(sweep.scheduler.grace * steps / sweep.set["train"]["total_steps"]))  # type: ignore[union-attr]
    scheduler = "scheduler={kind: fifo}" if fifo else f"scheduler.grace={grace}"
    return load_sweep(FILE, [f"storage={storage}", f"set={json.dumps(changes)}", scheduler])


def whole_sweep(config: SweepConfig) -> tuple[float, SweepRecords]:
    """Return the seconds from the start of Ray until the winner is registered."""
    began = time.perf_counter()
    check_sweep(config)
    with local_ray(num_cpus=CPUS, dashboard=False):
        records = run_sweep(config).records
    return time.perf_counter() - began, records


def back_to_back(config: SweepConfig) -> float:
    """Return the seconds of the same runs in one process, its start included."""
    runs = [
        config.run_config(values, "run", seed).as_given() for values in combinations(config) for seed in config.seeds
    ]
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "benchmarks.runs.sweep", "--alone"],
        input=json.dumps(runs),
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def run_alone() -> None:
    from marl_ray.training.single_process import train_alone

    for run in json.load(sys.stdin):
        train_alone(parse_config(RunConfig, run))


def winner(records: SweepRecords) -> Any:
    return None if records.winner is None else records.trials[records.winner].values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000, help="environment steps of each run")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        run_alone()
        return
    load = load_before()
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as storage:
        shipped_sweep = load_shipped_sweep(f"{storage}/whole", options.steps, fifo=True)
        seconds, full = whole_sweep(shipped_sweep)
        print(f"sweep: {seconds:.0f} s", flush=True)
        plain = back_to_back(shipped_sweep)
        print(f"back to back: {plain:.0f} s", flush=True)
        halving_seconds, halving = whole_sweep(load_shipped_sweep(f"{storage}/asha", options.steps))
    result = {
        "machine": machine(),
        "steps": options.steps,
        "load_before": load,
        "cpus": CPUS,
        "sweep_seconds": seconds,
        "back_to_back_seconds": plain,
        "ratio": seconds / plain,
        "halving_seconds": halving_seconds,
        "halving_steps_share": halving.played / full.played,
        "winner": winner(full),
        "halving_winner": winner(halving),
        "same_winner": winner(full) == winner(halving),
        "trials": [[r.values, r.status, r.objectives, r.seconds] for r in full.trials],
        "halving_trials": [[r.values, r.status, r.objectives, r.steps] for r in halving.trials],
    }
    table = [
        f"Eight variants, three seeds, {options.steps:,} steps each, {CPUS} CPUs (load before: {load:.1f}).",
        "",
        "| | measured | goal |",
        "|---|---|---|",
        f"| sweep | {seconds:.0f} s | |",
        f"| the same runs back to back in one process | {plain:.0f} s | |",
        f"| ratio | {seconds / plain:.2f} | at most {SECONDS_GOAL} |",
        f"| steps of successive halving | {result['halving_steps_share']:.0%} | at most {STEPS_GOAL:.0%} |",
        f"| the same winner | {'yes' if result['same_winner'] else 'no'} | yes |",
    ]
    text = "\n".join(table) + "\n"
    if options.steps == 50_000:
        store("sweep", result, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
