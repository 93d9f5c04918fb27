"""The benchmark for a GPU runs where there is none, so that its first run on one is a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_the_benchmark_measures_steps_and_compares_their_memory_with_the_plan(tmp_path):
    small = ["--device=cpu", "--sizes=tiny", "--context=64", "--tokens=16", "--rows=2", "--responses=8", "--runs=1"]
    command = [sys.executable, "-m", "benchmarks.language.accelerator", *small, "--store", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "language_accelerator.json").read_text())
    assert [row["responses"] for row in result["sampled"]] == [8]
    assert [row["settings"]["offload"] for row in result["trained"]] == [False, True]
    plain, offloaded = result["trained"]
    assert plain["seconds"] > 0 and plain["matrix_share"] > 0 and plain["tokens_per_second"] > 0
    assert plain["planned_bytes"] > offloaded["planned_bytes"] > 0
    assert plain["peak_bytes"] is None  # of a CPU
    block = 2 * 64 * 64 + 64 + 2 * 32 * (64 + 1) + 3 * 64 * 128 + 2 * 64
    assert plain["parameters"] == 512 * 64 + 2 * block + 64
    written = (tmp_path / "language_accelerator.md").read_text()
    assert "| tiny | 2 x 64, 16 trained | no | no |" in written and written.startswith("# Language models on")
