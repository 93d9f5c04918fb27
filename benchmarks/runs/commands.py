"""Seconds until the command line answers: `marl-ray --help` against a bare Python, in turn.

.venv/bin/python -m benchmarks.runs.commands

Writes `benchmarks/results/commands.{json,md}`.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.records import load_before, machine, store

RUNS = 11
"""Measurements of each command, of which the median is reported."""
COMMANDS = {
    "marl-ray --help": [str(Path(sys.executable).parent / "marl-ray"), "--help"],
    "marl-ray config schema": [str(Path(sys.executable).parent / "marl-ray"), "config", "schema"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def main() -> None:
    """Measure, print and store."""
    load = load_before()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            seconds[name].append(time.perf_counter() - start)
    lines = [f"{RUNS} runs each, in turn (load before: {load:.1f}).", ""]
    lines += ["| command | median s | min-max s |", "|---|---|---|"]
    for name, values in seconds.items():
        lines.append(f"| `{name}` | {statistics.median(values):.2f} | {min(values):.2f}-{max(values):.2f} |")
    result = {"machine": machine("marl-ray"), "load_before": load, "seconds": seconds}
    store("commands", result, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
