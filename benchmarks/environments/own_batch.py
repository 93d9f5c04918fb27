"""Steps per second of one's own environment as a batch of compiled functions.

The same one in the loop is measured in turn.

    .venv/bin/python -m benchmarks.environments.own_batch

The environment is the one that `marl-ray new environment` writes, and its batch is the code block of `docs/speed.md`.
Random actions and seeds are drawn before the clock starts; ended copies begin anew.

Writes `benchmarks/results/own_environment.{json,md}`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import ROOT, load_before, machine, store
from benchmarks.tables import median_range
from marl_ray.config.run.sections import EnvConfig
from marl_ray.envs.copies import make_batch
from marl_ray.rollout.rng import episode_seed

KINDS = {"my_env:MyEnv": "in the loop", "fast_env:FastEnv": "by the compiled batch"}
AGENTS = ["agent_0", "agent_1"]
PARTS = ("steps", "resets", "observations")


def write_environments(folder: Path) -> None:
    """Write both environments to the folder, from which they are imported."""
    command = [sys.executable, "-m", "marl_ray", "new", "environment", "my_env"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    page = (ROOT / "docs/speed.md").read_text()
    block = re.search(r"```python fast_env.py\n(.*?)```", page, re.DOTALL)
    assert block is not None
    (folder / "fast_env.py").write_text(block[1])
    sys.path.insert(0, str(folder))


def steps_per_second(env_id: str, copies: int, seconds: float) -> tuple[float, dict[str, float]]:
    """Return environment steps per second in this process, and the shares of the parts.

    Every copy is stepped and observed, and begins anew when it is over.
    """
    batch = make_batch(EnvConfig(id=env_id), copies, [AGENTS])
    actions = np.random.default_rng(0).integers(0, 3, (256, copies, len(AGENTS)))
    seeds, episodes = [episode_seed(0, 0, episode) for episode in range(4096)], 0
    rows = [np.zeros((copies, len(AGENTS), 2), np.int64)]
    for copy in range(copies):
        batch.reset(copy, seeds[copy])
    for limit in (seconds / 5, seconds):  # the first is a warm-up
        steps, begun, spent = 0, time.perf_counter(), dict.fromkeys(PARTS, 0.0)
        while time.perf_counter() - begun < limit:
            marks = [time.perf_counter()]
            batch.step([actions[steps % len(actions)]])
            marks.append(time.perf_counter())
            for copy in np.flatnonzero(~batch.alive.any(1)).tolist():
                episodes += 1
                batch.reset(copy, seeds[episodes % len(seeds)])
            marks.append(time.perf_counter())
            batch.observe(rows)
            marks.append(time.perf_counter())
            for part, first, last in zip(PARTS, marks[:-1], marks[1:], strict=True):
                spent[part] += last - first
            steps += 1
    taken = time.perf_counter() - begun
    batch.close()
    return copies * steps / taken, {part: part_seconds / taken for part, part_seconds in spent.items()}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Your own environment",
        "",
        "Environment steps per second in one process, observations and resets included; median (least-most). A ratio is of",
        "one round.",
        "",
        f"| copies | {' | '.join(KINDS.values())} | ratio | {' / '.join(PARTS)} of the batch |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        loop, compiled = (row["rates"][kind] for kind in KINDS)
        ratios = [fast / slow for fast, slow in zip(compiled, loop, strict=True)]
        parts = " / ".join(f"{share:.0%}" for share in row["shares"][list(KINDS)[-1]].values())
        lines.append(
            f"| {row['copies']} | {median_range(loop)} | {median_range(compiled)} | {median_range(ratios, 1)} | {parts} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--copies", type=int, nargs="+", default=[16, 128, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    load, rows = load_before(), []
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
        write_environments(Path(folder))
        for copies in options.copies:
            rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
            shares: dict[str, dict[str, float]] = {}
            for _ in range(options.rounds):
                for kind, measured in rates.items():
                    rate, shares[kind] = steps_per_second(kind, copies, options.seconds)
                    measured.append(rate)
            rows.append({"copies": copies, "rates": rates, "shares": shares})
    store("own_environment", {"machine": machine(), "load_before": load, "rows": rows}, table(rows))


if __name__ == "__main__":
    main()
