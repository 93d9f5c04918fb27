"""Seconds that a tracker which is dead, slow or full costs a run.

    .venv/bin/python benchmarks/trackers.py                          # about 10 minutes on two cores
    .venv/bin/python benchmarks/trackers.py --steps 40000 --rounds 1 # a quick look

Runs of `jobs/configs/multigrid_ippo.yaml` with one worker and without evaluations, in turn, on one Ray: without a tracker
besides MLflow, and with one that takes nothing, one that takes a second for each call, one whose disk is full, and with an
MLflow server that is killed after the first iterations. Steps per second count from the third row of `metrics.jsonl` to its
last. Every round has a run of each kind, in an order that changes from round to round; a ratio is that of two runs of one
round. Writes `benchmarks/results/trackers.{json,md}`.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tables import spread

from marl_ray.cluster.local_ray import local_ray
from marl_ray.config import RunConfig, load_config

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
FILE = ROOT / "jobs/configs/multigrid_ippo.yaml"
KINDS = {
    "none": "no tracker besides MLflow",
    "Dead": "a tracker that raises at once",
    "Slow": "a tracker that takes a second for each call",
    "Full": "a tracker whose disk is full",
    "mlflow": "an MLflow server that is killed after the first iterations",
}
WARM_UP = 2
"""Rows that are not counted."""
GOAL = 0.98
PORT = 5987


class Slow:
    """A tracker that takes a second for each call."""

    def __init__(self, config: RunConfig, run_id: str):
        self.rows = 0

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        time.sleep(1)

    def end(self, status: str) -> None:
        """Close nothing."""


class Dead(Slow):
    """A tracker whose server does not answer."""

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        raise ConnectionError("nobody answers")


class Full(Slow):
    """A tracker whose disk is full."""

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        raise OSError(28, "No space left on device")


@contextlib.contextmanager
def mlflow_server(storage: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real MLflow server in one process, on a database of its own."""
    settings = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{storage}/server.db",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(storage / "artifacts"),
    }
    command = [sys.executable, "-W", "ignore", "-m", "uvicorn", "--log-level", "error", "--port", str(PORT)]
    process = subprocess.Popen([*command, "mlflow.server.fastapi_app:app"], env=os.environ | settings)
    try:
        deadline = time.monotonic() + 90
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
                break
            if time.monotonic() > deadline:
                raise TimeoutError("the MLflow server did not answer within 90 s")
            time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.wait(30)


def rows_of(run: RunConfig) -> list[dict[str, float]]:
    from marl_ray.training.run_folder.metrics_file import read_metrics
    from marl_ray.training.run_folder.record import filesystem_of

    return read_metrics(*filesystem_of(run))


def measured(kind: str, storage: Path, steps: int) -> dict[str, Any]:
    """Train once; steps per second, and the seconds from the last row to the end of the run."""
    from marl_ray.training.driver import train

    keys = [f"storage={storage}", f"train.total_steps={steps}", "resources.workers=1", "evaluation.every=0"]
    keys += ["tracking.progress=false", f"name={kind.lower()}-{time.time_ns()}"]
    if kind == "mlflow":
        with mlflow_server(storage) as server:
            run = load_config(RunConfig, FILE, [*keys, f"tracking.uri=http://127.0.0.1:{PORT}"])

            def kill() -> None:
                while len(rows_of(run)) <= WARM_UP and server.poll() is None:
                    time.sleep(0.1)
                server.send_signal(signal.SIGKILL)

            threading.Thread(target=kill, daemon=True).start()
            train(run)
    else:
        also = [] if kind == "none" else [f"trackers:{kind}"]
        run = load_config(RunConfig, FILE, [*keys, f"tracking.also={json.dumps(also)}"])
        train(run)
    ended, rows = time.time(), rows_of(run)[WARM_UP:]
    played, seconds = rows[-1]["steps"] - rows[0]["steps"], rows[-1]["timestamp"] - rows[0]["timestamp"]
    return {"steps_per_second": played / seconds, "end_s": ended - rows[-1]["timestamp"], "rows": len(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400_000, help="environment steps of each run")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    load, rounds = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as storage, local_ray(num_cpus=2, dashboard=False):
        for number in range(options.rounds + 1):
            order = [*KINDS][number % len(KINDS) :] + [*KINDS][: number % len(KINDS)]
            results = {kind: measured(kind, Path(storage), options.steps) for kind in order}
            if number:  # the first round compiles and fills caches
                rounds.append(results)
            print(number, {kind: round(result["steps_per_second"]) for kind, result in results.items()}, flush=True)
    lines = [
        f"{options.steps:,} steps, one worker, two CPUs, {options.rounds} rounds (load before: {load:.1f}).",
        "",
        f"| median (least-most) | steps/s | against none, goal {GOAL} | seconds from last row to end |",
        "|---|---|---|---|",
    ]
    for kind, words in KINDS.items():
        speeds = [each[kind]["steps_per_second"] for each in rounds]
        ratios = [each[kind]["steps_per_second"] / each["none"]["steps_per_second"] for each in rounds]
        ends = [each[kind]["end_s"] for each in rounds]
        lines.append(f"| {words} | {spread(speeds)} | {spread(ratios, 3)} | {spread(ends, 1)} |")
    print("\n".join(lines))
    goal = {
        kind: statistics.median(r[kind]["steps_per_second"] / r["none"]["steps_per_second"] for r in rounds)
        for kind in KINDS
    }
    result = {"steps": options.steps, "load_before": load, "ratios": goal, "rounds": rounds}
    if options.rounds >= 5:
        (RESULTS / "trackers.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "trackers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
