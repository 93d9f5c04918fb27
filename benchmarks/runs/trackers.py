"""Seconds that a tracker which is dead, slow or full costs a run.

    .venv/bin/python -m benchmarks.runs.trackers                          # about five minutes on two cores
    .venv/bin/python -m benchmarks.runs.trackers --steps 40000 --rounds 1 # a quick look, which stores nothing

Runs of `jobs/configs/multigrid_ippo.yaml` with one worker and without evaluations, in turn, on one Ray: without a tracker
besides MLflow, and with one that takes nothing, one that takes a second for each call, one whose disk is full, and with an
MLflow server that is killed after the first iterations. Steps per second count from the third row of `metrics.jsonl`, or
the first after the server's death, to the last. Every round has a run of each kind, in an order that changes from round to
round; a ratio is that of two runs of one round. In the end all trackers are well again, the command of the last round's
runs is given once more, and each tracker is asked which iterations it has.

Writes `benchmarks/results/trackers.{json,md}`.
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

from benchmarks.records import ROOT, load_before, machine, store
from benchmarks.tables import median_range
from marl_ray.cluster.local_ray import local_ray
from marl_ray.config import RunConfig, load_config

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
"""The goal: steps per second beside a tracker that fails, over those without one."""
PORT = 5987
"""Port of the MLflow server on this machine."""
ROUNDS = 3
"""Least number of rounds whose result is stored."""
LEAVE_S = 3.0
"""Seconds that each run waits at its end for its trackers, in place of the product's."""
ILL = "ill"
"""Name of the file under the storage that is there while trackers fail."""


def taken_file(run: RunConfig) -> Path:
    """Return the file of the iterations that a run's tracker was given, in order."""
    return Path(run.storage, f"{run.name}.taken")


class Well:
    """A tracker that notes what it takes.

    Classes that are derived from it fail in some way while they are ill.
    """

    def __init__(self, config: RunConfig, run_id: str):
        self.ill, self.taken = Path(config.storage, ILL), taken_file(config)

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        if self.ill.exists():
            self.fail()
        with self.taken.open("a") as file:
            file.writelines(f"{int(row['iteration'])}\n" for row in rows)

    def fail(self) -> None:
        """Do what this kind does."""

    def end(self, status: str) -> None:
        """Close nothing."""


class Slow(Well):
    """A tracker that takes a second for each call."""

    def fail(self) -> None:
        time.sleep(1)


class Dead(Well):
    """A tracker whose server does not answer."""

    def fail(self) -> None:
        raise ConnectionError("nobody answers")


class Full(Well):
    """A tracker whose disk is full."""

    def fail(self) -> None:
        raise OSError(28, "No space left on device")


@contextlib.contextmanager
def mlflow_server(storage: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a real MLflow server in one process, on its own database."""
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


def config_of(kind: str, name: str, storage: Path, steps: int) -> RunConfig:
    keys = [f"name={name}", f"storage={storage}", f"train.total_steps={steps}", "resources.workers=1"]
    keys += ["evaluation.every=0", "tracking.progress=false", f"tracking.experiment={name}"]
    if kind == "mlflow":
        keys.append(f"tracking.uri=http://127.0.0.1:{PORT}")
    elif kind != "none":
        keys.append(f"tracking.also={json.dumps([f'trackers:{kind}'])}")
    return load_config(RunConfig, FILE, keys)


def measure_run(kind: str, run: RunConfig, storage: Path) -> dict[str, Any]:
    """Train once and return steps per second, and the seconds from the last row to the end of the run."""
    from marl_ray.training.driver import train

    killed = [0.0]
    if kind == "mlflow":
        with mlflow_server(storage) as server:

            def kill() -> None:
                while len(rows_of(run)) <= WARM_UP and server.poll() is None:
                    time.sleep(0.1)
                server.send_signal(signal.SIGKILL)
                killed.append(time.time())

            threading.Thread(target=kill, daemon=True).start()
            train(run)
    else:
        train(run)
    ended, rows = time.time(), [row for row in rows_of(run)[WARM_UP:] if row["timestamp"] > killed[-1]]
    played, seconds = rows[-1]["steps"] - rows[0]["steps"], rows[-1]["timestamp"] - rows[0]["timestamp"]
    return {"steps_per_second": played / seconds, "end_s": ended - rows[-1]["timestamp"], "rows": len(rows)}


def history(kind: str, run: RunConfig, storage: Path) -> str:
    """Give the run's command again, now that its tracker is well, and return how much of the run the tracker has then."""
    from marl_ray.training.driver import train

    played = [int(row["iteration"]) for row in rows_of(run)]
    with mlflow_server(storage) if kind == "mlflow" else contextlib.nullcontext():
        train(run)
        tracked = (
            [int(line) for line in taken_file(run).read_text().split()]
            if kind in ("Dead", "Slow", "Full")
            else read_mlflow_iterations(run)
        )
    verdict = "all rows once, in order" if tracked == played else f"NOT THE RUN'S: {tracked}"
    return f"{verdict} ({len(tracked)} of {len(played)})"


def read_mlflow_iterations(run: RunConfig) -> list[int]:
    """Return the iterations that MLflow has of the one run in its experiment."""
    import mlflow

    from marl_ray.training.tracking.mlflow_run import uri_of

    client = mlflow.MlflowClient(tracking_uri=uri_of(run))
    experiment = client.get_experiment_by_name(run.tracking.experiment)
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    return [int(point.value) for point in client.get_metric_history(logged.info.run_id, "iteration")]


def main() -> None:
    from marl_ray.training.journal.deliveries import END_S, Deliveries

    close = Deliveries.close

    def close_early(self: Deliveries, status: str, bundle: Any = None, wait_s: float = END_S, model: str = "") -> str:
        return close(self, status, bundle, LEAVE_S, model)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000, help="environment steps of each run")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    load, rounds, kinds = load_before(), [], [*KINDS]
    Deliveries.close = close_early  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as name, local_ray(num_cpus=2, dashboard=False):
        storage = Path(name)
        (storage / ILL).touch()
        measure_run("none", config_of("none", "first", storage, 20_000), storage)  # compiles and fills caches
        for number in range(options.rounds):
            order = kinds[number % len(kinds) :] + kinds[: number % len(kinds)]
            runs = {kind: config_of(kind, f"{kind.lower()}-{number}", storage, options.steps) for kind in order}
            rounds.append({kind: measure_run(kind, run, storage) for kind, run in runs.items()})
            printed = {kind: round(result["steps_per_second"]) for kind, result in rounds[-1].items()}
            print(number, printed, file=sys.stderr, flush=True)
        (storage / ILL).unlink()
        Deliveries.close = close  # type: ignore[method-assign]
        histories = {kind: history(kind, runs[kind], storage) for kind in kinds}
    lines = [
        f"{options.steps:,} steps, one worker, {os.cpu_count()} CPUs, {options.rounds} rounds (load before: {load:.1f}). "
        f"At its end a run waits for its trackers {END_S:g} s at most, here {LEAVE_S:g} s.",
        "",
        f"| median (least-most) | steps/s | against none, goal {GOAL} | seconds from last row to end | in the end it has |",
        "|---|---|---|---|---|",
    ]
    ratios = {
        kind: [each[kind]["steps_per_second"] / each["none"]["steps_per_second"] for each in rounds] for kind in KINDS
    }
    for kind, words in KINDS.items():
        speeds, ends = ([each[kind][key] for each in rounds] for key in ("steps_per_second", "end_s"))
        cells = [words, median_range(speeds), median_range(ratios[kind], 3), median_range(ends, 1), histories[kind]]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    medians = {kind: statistics.median(values) for kind, values in ratios.items()}
    if options.rounds >= ROUNDS:
        about = {"machine": machine("ray", "torch", "mlflow"), "load_before": load, "steps": options.steps}
        store("trackers", about | {"ratios": medians, "histories": histories, "rounds": rounds}, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
