"""Whole runs whose trackers die, are slow or are full, and whose processes are killed.

Nobody waits, and all have all in the end.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs
from servers.mlflow_server import MlflowServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_runs.runs import config, mlflow_database, timeless, train_rows
from toy_runs.sweeps import ToySweep
from toys.trackers import read_iterations
from waiting import until

from marl_ray.config import RunConfig
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.training.driver import train
from marl_ray.training.journal import delivery
from marl_ray.training.journal.deliveries import MLFLOW
from marl_ray.training.journal.delivery import read_mark
from marl_ray.training.run_folder.metrics_file import iteration_of, read_metrics
from marl_ray.training.run_folder.record import record_of
from marl_ray.training.tracking.mlflow_run import MlflowRun
from marl_ray.tuning.reporting.mlflow_runs import END_S, SweepMlflowRuns

pytestmark = pytest.mark.shared_ray("two")

ALSO = 'tracking.also=[tensorboard, "toys.trackers:Lines", "toys.trackers:Slow", "toys.trackers:Full"]'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MlflowServer]:
    (tmp_path / "server").mkdir()
    server = MlflowServer(tmp_path / "server")
    server.start()
    yield server
    server.kill()


def rows_of(run: RunConfig) -> list[dict[str, float]]:
    return read_metrics(fs.LocalFileSystem(), f"{run.storage}/{run.name}")


def read_mlflow(run: RunConfig) -> list[int]:
    """The iterations that MLflow has, with doubles."""
    run_id = record_of(run)["mlflow_run_id"]
    return [int(point.value) for point in MlflowRun(run, run_id).client.get_metric_history(run_id, "iteration")]


def read_tensorboard(run: RunConfig) -> list[int]:
    """The iterations that TensorBoard shows, with doubles."""
    events = EventAccumulator(f"{run.storage}/{run.name}/tensorboard").Reload()
    return [int(event.value) for event in events.Scalars("iteration")]


def wait_for_rows(run: RunConfig, rows: int, deadline_s: float = 120) -> None:
    """Wait until the run has this many rows."""
    path = Path(run.storage, run.name, "metrics.jsonl")
    until(lambda: path.exists() and path.read_bytes().count(b"\n") >= rows, f"{rows} rows", deadline_s)


@pytest.mark.long
def test_a_run_ends_well_without_its_trackers_and_the_same_command_delivers_the_rest(
    ray_cluster, server, tmp_path, capsys
):
    """The server is killed in the middle, and a worker too."""
    env = f'env={{"id": "toys.envs:fragile", "kwargs": {{"marker": "{tmp_path / "died"}", "at": 65}}}}'
    keys = (f"storage={tmp_path}", "tracking.progress=false", f"tracking.uri={server.uri}", "train.total_steps=960")
    run = config(*keys, env, ALSO, "evaluation.episodes=2", "checkpoint.every=3")

    def kill_after_eight_rows() -> None:
        wait_for_rows(run, 8)
        server.kill()

    killer = threading.Thread(target=kill_after_eight_rows)
    killer.start()
    result = train(run)
    killer.join()
    assert (tmp_path / "died").exists()
    every = [iteration_of(row) for row in rows_of(run)]
    assert every == list(range(31))
    assert result.model == "" and load_bundle(result.bundle).manifest.lineage.run == "toy"
    printed = capsys.readouterr().err
    assert "its workers start again from the checkpoint of iteration" in printed
    assert (
        "toy: 31 rows are not in toys.trackers:Full yet ([Errno 28] No space left on device); the same command"
        in printed
    )
    (waiting,) = re.findall(r"toy: (\d+) rows are not in mlflow yet \(", printed)
    assert int(waiting) == 31 - read_mark(fs.LocalFileSystem(), f"{tmp_path}/toy", MLFLOW).rows > 0
    assert "Traceback" not in printed
    assert read_tensorboard(run) == read_iterations(tmp_path, "Lines") == read_iterations(tmp_path, "Slow") == every

    server.start()
    (tmp_path / "room").touch()
    again = train(run)
    assert again.model == "models:/toy/1" and not again.trained
    assert read_mlflow(run) == read_iterations(tmp_path, "Full") == every
    assert read_tensorboard(run) == read_iterations(tmp_path, "Lines") == read_iterations(tmp_path, "Slow") == every
    client = MlflowRun(run, result.run_id).client
    assert client.get_run(result.run_id).info.status == "FINISHED"
    assert [file.path for file in client.list_artifacts(result.run_id)] == ["bundles", "return.png"]
    assert load_bundle("models:/toy@best", server.uri).digest == load_bundle(result.bundle).digest
    server.kill()
    capsys.readouterr()
    assert train(run) == again and capsys.readouterr().err == ""  # all is delivered, so nobody is asked


@pytest.mark.long
def test_a_sweep_ends_well_without_mlflow_and_the_same_command_delivers_the_rest(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setattr(delivery, "RETRY_S", 0.3)
    sweep = ToySweep(tmp_path, seeds=1)
    records = [sweep.add({"algorithm": "ippo", "hyper.lr": 0.001 * k}, objectives=[1.0 * k]) for k in (1, 2)]
    rows = [{"iteration": k, "steps": 32 * k, "played": 32 * k, "exploits": 0, "return": k / 2} for k in range(1, 31)]
    tracker = SweepMlflowRuns(sweep.config, sweep.records)
    tracker.log(records[0], rows[:10])
    server.kill()
    began = time.monotonic()
    tracker.log(records[0], rows[8:])  # two rows were played again
    tracker.log(records[1], rows[:20])
    tracker.end(records[0])
    assert time.monotonic() - began < END_S  # nobody has waited for MLflow
    tracker.close("finished")
    assert time.monotonic() - began < 3 * END_S
    assert "the same command delivers them" in capsys.readouterr().err
    server.start()
    tracker = SweepMlflowRuns(sweep.config, sweep.records)
    tracker.log(records[1], rows[15:])
    tracker.end(records[1])
    tracker.close("finished")
    client = tracker.parent.client
    children = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{sweep.records.mlflow_run_id}'")
    assert sorted(child.data.tags["trial"] for child in children) == ["0000", "0001"]
    for child in children:
        assert child.info.status == "FINISHED"
        history = client.get_metric_history(child.info.run_id, "iteration")
        assert [point.value for point in history] == list(range(1, 31))
    assert client.get_run(sweep.records.mlflow_run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_a_run_whose_driver_is_killed_twice_has_every_iteration_once(ray_cluster, tmp_path):
    also = 'tracking.also=[tensorboard, "toys.trackers:Lines"]'
    keys = ("train.total_steps=1920", "checkpoint.every=3", "evaluation.episodes=2")
    run = config(f"storage={tmp_path}", *keys, also)
    (tmp_path / "run.yaml").write_text(json.dumps(run.as_given()))
    command = [sys.executable, "-c", "from marl_ray.cli import main; main()", "train", str(tmp_path / "run.yaml")]
    mlflow_database(tmp_path)
    environment = os.environ | {"RAY_ADDRESS": ray_cluster.address}
    for count in (8, 30):
        process = subprocess.Popen(command, env=environment)
        try:
            wait_for_rows(run, count)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
    subprocess.run(command, env=environment, check=True, timeout=240)
    every = [iteration_of(row) for row in rows_of(run)]
    assert every == list(range(61))
    assert read_mlflow(run) == read_tensorboard(run) == read_iterations(tmp_path, "Lines") == every
    calm = timeless(train_rows(str(tmp_path / "calm"), *keys))
    left_out = {"timestamp", *(key for row in rows_of(run) for key in row if key.startswith("system/"))}
    rows = [{key: value for key, value in row.items() if key not in left_out} for row in timeless(rows_of(run))]
    assert rows == calm
