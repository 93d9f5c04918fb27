"""Speed and learning of small policies beside compiled JAX, on one machine, in turn.

    .venv/bin/python -m benchmarks.environments.compiled_peers  speed at three settings of two tasks, then time to a target
    .venv/bin/python -m benchmarks.environments.compiled_peers --parts speed --tasks cartpole

The peers (`peers/jax_ppo.py`) run in a Python of their own, `.venv-jax`, which is made on the first run: JaxMARL's
simple_spread and gymnax's CartPole, with PPO laid out as PureJaxRL lays it out. Both sides have the same network (64 x 64
tanh, separate actor and critic), four epochs and as many minibatches. Writes `benchmarks/results/compiled_peers.{json,md}`.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environments.gridworld import WARM_UP
from benchmarks.environments.roofline import measure_peaks, peaks_line, roofline_lines
from benchmarks.records import ROOT, load_before, machine, store
from benchmarks.tables import median_range
from marl_ray.config import RunConfig, load_config

PEER = ROOT / "benchmarks/peers/jax_ppo.py"
PACKAGES = ("jax==0.10.2", "jaxmarl==0.2.0", "gymnax==1.0.1", "optax==0.2.8", "numpy==2.4.6", "six==1.17.0")
CONFIGS = {
    "simple_spread": ("jobs/configs/simple_spread_mappo.yaml", "algorithm=ippo"),
    "cartpole": ("jobs/configs/cartpole_ppo.yaml",),
}
SETTINGS = {
    "simple_spread": ((16, 128, 4), (128, 32, 1), (128, 32, 4)),
    "cartpole": ((16, 128, 4), (128, 128, 4), (512, 128, 4)),
}
"""Copies, steps of each in a batch, and minibatches."""
SPEED_STEPS = {"simple_spread": 163_840, "cartpole": 786_432}
"""Environment steps of one measurement of speed, learning included."""
TARGETS = {"simple_spread": -22.0, "cartpole": 475.0}
"""Mean return of the episodes that end in the last WINDOW steps of training."""
WINDOW = 50_000
"""Environment steps: about 100 episodes of CartPole at its target, as Gym counts a solved task; 2,000 of simple_spread."""
TARGET_STEPS = {"simple_spread": 1_500_000, "cartpole": 1_000_000}
RATES = (2.5e-4, 1e-3)
"""Learning rates that both sides are given on the way to a target; the sooner one counts."""
QUIET = ("evaluation.every=0", "checkpoint.every=1000000", "tracking.progress=false", "hyper.epochs=4")


LAYOUTS = {"1 worker": (1, 1), "1 worker, 2 threads": (1, 2), "2 workers": (2, 1)}
"""Workers, and threads of each, of our runs."""


def jax_python(folder: Path) -> Path:
    """Return the interpreter of the peers' environment, and make it if it is not there."""
    python = folder / "bin/python"
    if not (folder / ".installed").exists():
        print(f"installing JAX into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (folder / ".installed").touch()
    return python


def run_peer(python: Path, task: str, setting: tuple[int, int, int], updates: int, *more: str) -> dict[str, Any]:
    """Train the peer once; `outside` is its process's time before and after the run itself."""
    copies, steps, minibatches = setting
    sizes = [f"--copies={copies}", f"--steps={steps}", f"--minibatches={minibatches}", f"--updates={updates}"]
    begun = time.perf_counter()
    done = subprocess.run([python, PEER, f"--task={task}", *sizes, *more], capture_output=True, text=True, timeout=1800)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{PEER.name} {task} {setting} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"outside": seconds - result["seconds"]}


def own_config(task: str, setting: tuple[int, int, int]) -> list[str]:
    """Return the config file and the overrides of our runs."""
    copies, steps, minibatches = setting
    path, *changes = CONFIGS[task]
    sizes = [f"train.env_copies={copies}", f"train.horizon={steps}", f"hyper.minibatches={minibatches}"]
    return [path, *changes, *QUIET, *sizes]


def run_own(
    task: str, setting: tuple[int, int, int], updates: int, layout: tuple[int, int], *more: str
) -> dict[str, Any]:
    """Run `marl-ray train` once and return its rows, and when it began."""
    path, sizes = CONFIGS[task][0], [f"train.total_steps={updates * setting[0] * setting[1]}"]
    sizes += [f"resources.workers={layout[0]}", f"resources.threads_per_worker={layout[1]}"]
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
        command = [sys.executable, "-m", "marl_ray", "train", *own_config(task, setting), *sizes, *more]
        begun = time.time()
        done = subprocess.run(
            [*command, f"storage={folder}", "name=peer"], cwd=ROOT, capture_output=True, text=True, timeout=1800
        )
        if done.returncode:
            raise SystemExit(f"marl-ray train {path} {setting} failed:\n{done.stderr[-3000:]}")
        rows = [json.loads(line) for line in Path(folder, "peer", "metrics.jsonl").read_text().splitlines()]
    return {"begun": begun, "rows": rows}


def speed(python: Path, tasks: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measure steps per second of both sides at every setting, learning included.

    The peers' are without their compilation.
    """
    measured, peaks = [], measure_peaks()
    for task in tasks:
        for setting in SETTINGS[task]:
            path, *overrides = own_config(task, setting)
            config = load_config(RunConfig, ROOT / path, overrides)
            updates = SPEED_STEPS[task] // (setting[0] * setting[1])
            measures: dict[str, Any] = {
                "task": task,
                "setting": setting,
                "peer": [],
                "own": {name: [] for name in LAYOUTS},
                "shares": {},
                "peaks": peaks_line(peaks),
                "near": {},
            }
            for _ in range(rounds):
                peer = run_peer(python, task, setting, updates)
                measures["peer"].append(peer["steps_per_second"])
                measures["compile_seconds"], measures["packages"] = peer["compile_seconds"], peer["packages"]
                for name, layout in LAYOUTS.items():
                    rows = run_own(task, setting, updates, layout)["rows"][WARM_UP:]
                    measures["own"][name].append(statistics.median(row["steps_per_second"] for row in rows))
                    measures["shares"][name] = {
                        part: statistics.median(row[f"time/{part}"] for row in rows)
                        for part in ("rollout", "update", "other")
                    }
                    now = measures["own"][name][-1], measures["shares"][name], layout[0] * layout[1]
                    measures["near"][name] = roofline_lines(config, peaks, *now)
            print(task, setting, measures["peer"], measures["own"], flush=True)
            measured.append(measures)
    return measured


def learning(python: Path, tasks: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """Measure seconds from a process's start until its training return reaches the target, at every setting and rate."""
    measured = []
    for task in tasks:
        for setting in SETTINGS[task]:
            updates = TARGET_STEPS[task] // (setting[0] * setting[1])
            for rate in RATES:
                measures: dict[str, Any] = {"task": task, "setting": setting, "rate": rate}
                measures |= {key: [] for key in ("peer", "own", "peer_start", "own_start")}
                for seed in range(seeds):
                    peer = run_peer(python, task, setting, updates, f"--lr={rate}", f"--seed={seed}", "--decay")
                    batches = count_batches_to_target(peer["returns"], setting, TARGETS[task])
                    seconds = None if batches is None else peer["outside"] + batches / updates * peer["seconds"]
                    measures["peer"].append(seconds)
                    measures["peer_start"].append(peer["outside"])
                    our_run = run_own(
                        task,
                        setting,
                        updates,
                        LAYOUTS["1 worker, 2 threads"],
                        f"hyper.lr={rate}",
                        "hyper.lr_decay=true",
                        f"seed={seed}",
                    )
                    batches = count_batches_to_target(
                        [row.get("return") for row in our_run["rows"]], setting, TARGETS[task]
                    )
                    ended = None if batches is None else our_run["rows"][batches - 1]["timestamp"] - our_run["begun"]
                    measures["own"].append(ended)
                    measures["own_start"].append(our_run["rows"][0]["timestamp"] - our_run["begun"])
                print(task, setting, rate, measures["peer"], measures["own"], flush=True)
                measured.append(measures)
    return measured


def count_batches_to_target(
    returns: Sequence[float | None], setting: tuple[int, int, int], target: float
) -> int | None:
    """Count batches until the mean of the last WINDOW steps' `returns` is the target; None if it never is.

    `returns` has one of each batch.
    """
    copies, steps, _ = setting
    window = math.ceil(WINDOW / (copies * steps))
    for batches in range(window, len(returns) + 1):
        known = [each for each in returns[batches - window : batches] if each is not None]
        if known and statistics.mean(known) >= target:
            return batches
    return None


def speed_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Beside compiled JAX",
        "",
        "Environment steps per second, learning included; median (least-most). The peer's compilation is not counted.",
        "",
        "| task | copies x steps, minibatches | peer | its compilation | "
        + " | ".join(f"marl-ray, {name}" for name in LAYOUTS)
        + " | best / peer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        copies, steps, minibatches = row["setting"]
        best = max(statistics.median(rates) for rates in row["own"].values())
        own_cells = " | ".join(median_range(row["own"][name]) for name in LAYOUTS)
        lines.append(
            f"| {row['task']} | {copies} x {steps}, {minibatches} | {median_range(row['peer'])} "
            f"| {row['compile_seconds']:.0f} s | {own_cells} | {best / statistics.median(row['peer']):.2f} |"
        )
    lines += ["", "Where time goes in the last round. " + rows[-1]["peaks"], ""]
    for row in rows:
        copies, steps, minibatches = row["setting"]
        for name, near in row["near"].items():
            parts = ", ".join(f"{part} {share:.0%}" for part, share in row["shares"][name].items())
            lines.append(f"- {row['task']}, {copies} x {steps}, {minibatches}, {name}: {parts}")
            lines += [f"  - {line}" for line in near]
    return "\n".join([*lines, ""])


def learning_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "## Time to a target",
        "",
        "Seconds from the start of a process, imports, Ray and compilation included, until the mean return of the episodes",
        f"that end in the last {WINDOW:,} steps of training is the target: {TARGETS['simple_spread']:g} for each agent of",
        f"simple_spread, {TARGETS['cartpole']:g} for CartPole. Median over seeds (least-most) of each side's best setting",
        f"and rate; all settings above and the learning rates {RATES[0]:g} and {RATES[1]:g} were tried. A run that never",
        "gets there counts as the longest. The start ends where the peer's compiled program begins, and with the first",
        "batch of ours.",
        "",
        "| task | peer | its start | setting, rate | marl-ray | its start | setting, rate | peer / marl-ray |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in SETTINGS:
        best = {}
        for side in ("peer", "own"):
            best[side] = min((row for row in rows if row["task"] == task), key=lambda row: median_seconds(row[side]))
        cells = []
        for side in ("peer", "own"):
            row = best[side]
            if math.isinf(median_seconds(row[side])):
                cells += ["never in most seeds", "", ""]
            else:
                seconds = median_range([math.inf if each is None else each for each in row[side]], 1).replace(
                    "inf", "never"
                )
                cells += [seconds, f"{statistics.median(row[f'{side}_start']):.1f}", _setting(row)]
        peer_s, product_s = (median_seconds(best[side][side]) for side in ("peer", "own"))
        ratio = "" if math.isinf(peer_s) or math.isinf(product_s) else f"{peer_s / product_s:.2f}"
        lines.append(f"| {task} | {' | '.join(cells)} | {ratio} |")
    return "\n".join([*lines, ""])


def median_seconds(seconds: Sequence[float | None]) -> float:
    """Return the median over seeds, of which one that never got there (None) took longer than all others."""
    return statistics.median(math.inf if each is None else each for each in seconds)


def _setting(row: dict[str, Any]) -> str:
    copies, steps, minibatches = row["setting"]
    return f"{copies} x {steps}, {minibatches}; {row['rate']:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=("speed", "learning"), default=["speed", "learning"])
    parser.add_argument("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jax-venv", type=Path, default=ROOT / ".venv-jax")
    options = parser.parse_args()
    python, path = jax_python(options.jax_venv), ROOT / "benchmarks/results/compiled_peers.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result["machine"], result["load_before"] = machine(), load_before()
    for part, measure, times in (("speed", speed, options.rounds), ("learning", learning, options.seeds)):
        if part in options.parts:  # rows of the other tasks stay as they were stored
            other_rows = [row for row in result.get(part, []) if row["task"] not in options.tasks]
            result[part] = sorted(
                other_rows + measure(python, options.tasks, times), key=lambda row: list(SETTINGS).index(row["task"])
            )
    text = speed_table(result["speed"]) if "speed" in result else ""
    text += "\n" + learning_table(result["learning"]) if "learning" in result else ""
    store("compiled_peers", result, text)


if __name__ == "__main__":
    main()
