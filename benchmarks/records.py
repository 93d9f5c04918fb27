"""The store of results, and the machine that is stored with each of them."""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
RESULTS = ROOT / "benchmarks/results"
PACKAGES = ("ray", "torch", "numpy", "gymnasium", "multigrid")
"""Packages that training with actor-critics runs."""


def machine(*packages: str) -> dict[str, Any]:
    """Return the machine and the versions of the packages that are measured, without any those of `PACKAGES`."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [row for row in Path("/proc/cpuinfo").read_text().splitlines() if row.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages or PACKAGES},
    }


def load_before() -> float:
    """Return how many processes wanted a core in the last minute, for a script that takes times to ask before it begins.

    It is stored as `load_before`: times of a busy machine are no times of the product.
    """
    return os.getloadavg()[0]


def store(name: str, result: dict[str, Any], table: str) -> None:
    """Write the result and its table to `results/NAME.{json,md}`, and print the table."""
    RESULTS.mkdir(exist_ok=True)
    described = ", ".join(f"{key} {value}" for key, value in result["machine"].items() if isinstance(value, str | int))
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    table += f"\nMachine: {described}. `{script}` writes this file.\n"
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table)
    print(table)
