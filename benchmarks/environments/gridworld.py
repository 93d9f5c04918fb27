"""Gridworld training: environment steps per second against RLlib, and how fast the team learns.

    .venv/bin/python -m benchmarks.environments.gridworld                 steps per second, RLlib measured in the same run
    .venv/bin/python -m benchmarks.environments.gridworld --learning  environment steps to a mean return of 0.93, five seeds

Writes `benchmarks/results/gridworld.{json,md}` and `gridworld_learning.{json,md}`. RLlib gets a Python environment
of its own, made on the first run.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environments.roofline import Work, measure_peaks, peaks_line, roofline_lines
from benchmarks.records import RESULTS, ROOT, load_before, machine, store
from benchmarks.tables import median_range
from marl_ray.cluster.local_ray import local_ray
from marl_ray.config import RunConfig, load_config
from marl_ray.envs.registry import make_env
from marl_ray.training.driver import train
from marl_ray.training.run_checks import check_run
from marl_ray.training.tracking.mlflow_run import MlflowRun

PEER = ROOT / "benchmarks/peers/rllib_gridworld.py"
PACKAGES = ("torch==2.13.0", "ray[rllib]==2.60.0", "multigrid==0.1.0", "pettingzoo")
WARM_UP = 2
"""First iterations that are not counted."""
OWN_ITERATIONS = 10
"""Iterations of marl-ray that are measured for one of RLlib: they take about as long."""
ONE_WORKER = "resources.workers=1"
PHASES = ("rollout", "update", "other")
CLOCK = ("steps_per_second", *(f"time/{phase}" for phase in PHASES))
TARGET = 0.93
"""Mean return of an evaluation that counts as solved."""
EVALUATED = ("evaluation.every=1", "evaluation.episodes=64")
SETTINGS: dict[str, tuple[str, ...]] = {
    "0 runners, 1 copy": ("--runners=0", "--envs=1"),
    "0 runners, 16 copies": ("--runners=0", "--envs=16"),
    "1 runner, 32 copies": ("--runners=1", "--envs=32"),
    "2 runners, 16 copies each": ("--runners=2", "--envs=16"),
    "2 runners, 32 copies each": ("--runners=2", "--envs=32"),
    "2 runners, 64 copies each": ("--runners=2", "--envs=64"),
    "2 runners, 32 copies each, 1 learner thread": ("--runners=2", "--envs=32", "--threads=1"),
    "2 runners, 32 copies each, whole-batch minibatch": ("--runners=2", "--envs=32", "--whole"),
}
"""Set-ups of RLlib; the fastest is the peer."""
SIXTEEN = "0 runners, 16 copies"
"""RLlib's plain setting, measured beside its fastest."""


def run_config(algorithm: str, *overrides: str) -> RunConfig:
    path = ROOT / f"jobs/configs/multigrid_{algorithm}.yaml"
    return load_config(RunConfig, path, ("tracking.progress=false", *overrides))


def run_marl_ray(config: RunConfig, keys: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """Train as `marl-ray train` does on this machine, and return (step, value) of these metrics."""
    check_run(config)
    with local_ray(dashboard=False):
        outcome = train(config)
    tracker = MlflowRun(config, outcome.run_id)
    return {key: tracker.history(key) for key in keys}


def measure_marl_ray(algorithm: str, iterations: int, *layout: str) -> dict[str, Any]:
    """Measure one short run: steps per second by iteration, and where the time went."""
    load = load_before()
    steps = OWN_ITERATIONS * iterations * run_config(algorithm).batch_steps
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as storage:
        # RLlib is not evaluated either.
        overrides = (f"storage={storage}", f"train.total_steps={steps}", "evaluation.every=0")
        history = run_marl_ray(run_config(algorithm, *overrides, *layout), CLOCK)
    median = {key: statistics.median(value for _, value in history[key][WARM_UP:]) for key in CLOCK}
    return {
        "steps_per_second": median["steps_per_second"],
        "shares": {key: median[f"time/{key}"] for key in PHASES},
        "by_iteration": [value for _, value in history["steps_per_second"]],
        "load_before": load,
    }


def fastest(part: dict[str, Any]) -> float:
    return float(max(part["by_iteration"][WARM_UP:]))


def rllib_python(folder: Path) -> Path:
    """Return the interpreter of RLlib's environment, and make it if it is not there."""
    python = folder / "bin/python"
    if not (folder / ".installed").exists():
        print(f"installing RLlib into {folder}", flush=True)
        pins = [p for p in (ROOT / "constraints.txt").read_text().splitlines() if not p.startswith("gymnasium==")]
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        # An old pip takes many minutes to resolve these requirements.
        subprocess.run([python, "-m", "pip", "install", "--quiet", "pip==26.3"], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("\n".join(pins))
            constraints.flush()
            subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", constraints.name, *PACKAGES], check=True)
        (folder / ".installed").touch()
    return python


def run_peer(python: Path, *options: str) -> Any:
    """Return the document that the RLlib script prints."""
    # A source path for RLlib with marl-ray's environment; without it there is no marl_ray in RLlib's environment.
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([python, PEER, *options], env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{PEER.name} {' '.join(options)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_rllib(python: Path, setting: str, iterations: int, *more: str) -> dict[str, Any]:
    """Measure one short run of RLlib: steps per second by iteration."""
    load = load_before()
    config = run_config("ippo")
    same = (f"--lr={config.hyper.lr}", f"--batch={config.batch_steps}", f"--iterations={iterations}")
    result = run_peer(python, *SETTINGS[setting], *same, *more)
    rates = [i["steps"] / i["seconds"] for i in result["iterations"]]
    return {
        "steps_per_second": statistics.median(rates[WARM_UP:]),
        "by_iteration": rates,
        "gradient_steps": len(result["gradient_rows"]) / iterations,
        "gradient_rows": statistics.median(result["gradient_rows"]),
        "load_before": load,
    }


def raw_steps_per_second(package: bool, seconds: float) -> float:
    """Return steps per second under random actions in this process.

    The environment is MultiGrid's own or marl-ray's version.
    """
    import gymnasium
    import multigrid.envs  # noqa: F401  registers the environments
    import numpy as np

    env: Any
    config = run_config("ippo").env
    if package:
        env = gymnasium.make(config.id, disable_env_checker=True, **config.kwargs).unwrapped
        agents = [agent.index for agent in env.agents]
    else:
        env = make_env(config)
        agents = env.possible_agents
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 7, (4096, len(agents))).tolist()
    for limit in (seconds / 10, seconds):  # the first is a warm-up
        steps, started = 0, time.perf_counter()
        while time.perf_counter() - started < limit:
            *_, terminated, truncated, _ = env.step(dict(zip(agents, actions[steps % 4096], strict=True)))
            if all(terminated.values()) or all(truncated.values()):
                env.reset()
            steps += 1
    return steps / (time.perf_counter() - started)


def measure_raw(processes: int, package: bool = False, seconds: float = 3.0) -> list[float]:
    """Measure `raw_steps_per_second` in several processes at once, as many as a run has workers."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.starmap(raw_steps_per_second, [(package, seconds)] * processes)


def rllib_versions(python: Path) -> dict[str, str]:
    """Return the versions of RLlib's environment that its speed depends on."""
    command = "from importlib.metadata import version as v; print(v('gymnasium'), v('torch'), v('numpy'))"
    versions = subprocess.run([python, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(("gymnasium", "torch", "numpy"), versions, strict=True))


def speed(options: argparse.Namespace) -> None:
    """Choose RLlib's best setting, then measure all in turn, several times."""
    python = rllib_python(options.rllib_venv)
    described = machine() | {"rllib_environment": rllib_versions(python)}
    print(described, flush=True)
    stored = RESULTS / "gridworld.json"
    settings: dict[str, dict[str, Any]] = {}
    if options.setting and stored.exists():  # the stored search for it
        settings = json.loads(stored.read_text())["settings"]
    # Judged by the fastest iteration of several passes, which other users of the machine disturbed least.
    for setting in () if options.setting else [*SETTINGS] * options.search_passes:
        part = measure_rllib(python, setting, options.search_iterations, "--count-gradient-steps")
        settings[setting] = max(settings.get(setting, part), part, key=fastest)
        print(f"RLlib, {setting}: fastest iteration {fastest(part):,.0f} steps/s", flush=True)
    best = options.setting or max(settings, key=lambda setting: fastest(settings[setting]))
    workers = run_config("ippo").resources.workers
    rounds: list[dict[str, Any]] = []
    for number in range(options.pairs):
        row: dict[str, Any] = {
            "raw_package": measure_raw(workers, package=True),
            "raw": measure_raw(workers),
            "rllib": measure_rllib(python, best, options.iterations, "--count-gradient-steps"),
            "ippo": measure_marl_ray("ippo", options.iterations),
            "ippo_alone": measure_marl_ray("ippo", options.iterations, ONE_WORKER),
            "rllib_sixteen": measure_rllib(python, SIXTEEN, options.iterations, "--count-gradient-steps"),
            "rllib_fast_env": measure_rllib(
                python, best, options.iterations, "--count-gradient-steps", "--env=marl_ray"
            ),
            "mappo": measure_marl_ray("mappo", options.iterations),
            "mappo_alone": measure_marl_ray("mappo", options.iterations, ONE_WORKER),
        }
        rounds.append(row)
        rates = {key: round(part["steps_per_second"]) for key, part in row.items() if not key.startswith("raw")}
        print(f"round {number + 1}: {rates}, raw per process {[round(x) for x in row['raw']]}", flush=True)
        result = {"machine": described, "best_setting": best, "settings": settings, "rounds": rounds}
        result["peaks"] = measure_peaks()
        store("gridworld", result, speed_table(result))


def speed_table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rounds = result["rounds"]
    rates = {key: [row[key]["steps_per_second"] for row in rounds] for key in rounds[0] if not key.startswith("raw")}
    raw, package = ([sum(row[key]) for row in rounds] for key in ("raw", "raw_package"))
    names = {
        "ippo": "marl-ray IPPO, 2 workers",
        "ippo_alone": "marl-ray IPPO, 1 worker",
        "mappo": "marl-ray MAPPO, 2 workers",
        "mappo_alone": "marl-ray MAPPO, 1 worker",
        "rllib": "RLlib PPO, its fastest setting",
        "rllib_sixteen": "RLlib PPO, sixteen copies in one process",
        "rllib_fast_env": "RLlib PPO playing marl-ray's environment",
    }
    best = max(("ippo", "ippo_alone"), key=lambda key: statistics.median(rates[key]))
    own_name = names[best].partition(", ")[2]
    lines = [
        "# Gridworld: environment steps per second, learning included",
        "",
        "`MultiGrid-Empty-8x8-v0`, two agents with a shared policy and reward; 4,096 environment steps per iteration,",
        f"four epochs. Medians of the iterations after the first {WARM_UP}, of which marl-ray has {OWN_ITERATIONS} times as",
        f"many; of {len(rounds)} rounds, median (least-most). A ratio is the speed of IPPO with {own_name} over that",
        "row's in the same round.",
        "",
        "| | steps/s | ratio | rollout / update / other |",
        "|---|---|---|---|",
    ]
    for key, name in names.items():
        ratios = [rate / other for rate, other in zip(rates[best], rates[key], strict=True)]
        shares = [row[key]["shares"] for row in rounds if "shares" in row[key]]
        parts = [f"{statistics.median(s[part] for s in shares):.0%}" for part in PHASES if shares]
        ratio = "" if key == best else f"{median_range(ratios, 1)}"
        lines.append(f"| {name} | {median_range(rates[key])} | {ratio} | {' / '.join(parts)} |")
    share = [rate / bound for rate, bound in zip(rates[best], raw, strict=True)]
    lines += [
        f"| marl-ray's environment alone, {len(rounds[0]['raw'])} processes | {median_range(raw)} | | |",
        f"| MultiGrid's environment alone, {len(rounds[0]['raw'])} processes | {median_range(package)} | | |",
        "",
        f"IPPO with {own_name} trains at {statistics.median(share):.0%} of the speed at which two processes",
        "step marl-ray's environment alone.",
        "",
        f"RLlib: {result['best_setting']}; "
        f"{statistics.median(row['rllib']['gradient_steps'] for row in rounds):.1f} gradient steps of "
        f"{statistics.median(row['rllib']['gradient_rows'] for row in rounds):,.0f} rows per iteration.",
        "",
    ]
    peaks, shown = Work(*result["peaks"]), rounds[-1][best]
    cores = 1 if best == "ippo_alone" else len(rounds[0]["raw"])
    near = roofline_lines(run_config("ippo"), peaks, shown["steps_per_second"], shown["shares"], cores)
    lines += [f"IPPO with {own_name} in the last round. " + peaks_line(peaks)]
    lines += ["Each decision counts in full, though equal observations of a batch are evaluated once.", ""]
    lines += [*(f"- {line}" for line in near), ""]
    lines += ["| round | " + " | ".join(names.values()) + " |", "|---" * (1 + len(names)) + "|"]
    for number, row in enumerate(rounds, 1):
        cells = [f"{row[key]['steps_per_second']:,.0f}" for key in names]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    lines.append("")
    if result["settings"]:
        lines += [
            "| RLlib setting (the better of its short runs) | steps/s | fastest iteration | gradient steps x rows |",
            "|---|---|---|---|",
        ]
        for name, part in result["settings"].items():
            work = f"{part['gradient_steps']:.1f} x {part['gradient_rows']:,.0f}"
            lines.append(f"| {name} | {part['steps_per_second']:,.0f} | {fastest(part):,.0f} | {work} |")
        lines.append("")
    return "\n".join(lines)


def learning(options: argparse.Namespace) -> None:
    """Train full runs from several seeds."""
    rows = []
    for algorithm in ("mappo", "ippo"):
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as storage:
                name = f"{algorithm}-{seed}"
                overrides = (f"seed={seed}", f"name={name}", f"storage={storage}", *EVALUATED)
                curve = run_marl_ray(run_config(algorithm, *overrides), ["eval/return"])["eval/return"]
            solved = next((step for step, value in curve if value >= TARGET), None)
            row = {"algorithm": algorithm, "seed": seed, "solved_at": solved, "final": curve[-1][1], "curve": curve}
            rows.append(row)
            print(f"{name}: {TARGET} at {solved} steps, final {curve[-1][1]:.4f}", flush=True)
    store("gridworld_learning", {"machine": machine(), "target": TARGET, "runs": rows}, learning_table(rows))


def learning_table(rows: list[dict[str, Any]]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Gridworld: learning",
        "",
        "`MultiGrid-Empty-8x8-v0`, two agents, evaluated on 64 fixed starts after every iteration. Environment steps at",
        f"which the mean return reached {TARGET}; that mean before training and at the end of the run (100,000 steps).",
        "",
        "| algorithm | seed | steps to the target | return before | final return |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        solved = "not reached" if row["solved_at"] is None else f"{row['solved_at']:,}"
        lines.append(
            f"| {row['algorithm']} | {row['seed']} | {solved} | {row['curve'][0][1]:.4f} | {row['final']:.4f} |"
        )
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        of_algorithm = [row for row in rows if row["algorithm"] == algorithm]
        reached = [row["solved_at"] for row in of_algorithm if row["solved_at"] is not None]
        steps = median_range(reached) if reached else "never"
        count = f"{len(reached)} of {len(of_algorithm)}"
        lines.append(
            f"| **{algorithm}** | {count} | {steps} | | {median_range([row['final'] for row in of_algorithm], 4)} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--learning", action="store_true", help="measure learning instead of speed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3, help="rounds in which all are measured in turn")
    parser.add_argument("--iterations", type=int, default=10, help="training iterations per measurement")
    parser.add_argument("--search-iterations", type=int, default=5, help="the same while RLlib's setting is chosen")
    parser.add_argument("--search-passes", type=int, default=2, help="how often each setting is tried")
    parser.add_argument("--setting", choices=SETTINGS, help="RLlib's setting; default: try all, take the fastest")
    parser.add_argument("--rllib-venv", type=Path, default=ROOT / ".venv-rllib")
    options = parser.parse_args()
    learning(options) if options.learning else speed(options)


if __name__ == "__main__":
    main()
