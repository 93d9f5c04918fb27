"""The SQLite file of MLflow: made by several processes at once, and by ones that are killed meanwhile."""

import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from processes.two_workers import FORKS
from toy_runs.runs import config

from marl_ray.policies.bundles.mlflow_client import mlflow_client
from marl_ray.training.tracking.mlflow_run import MlflowRun


def begins(storage: Path, together: Any, run_ids: Any) -> None:
    """Begin a run when the other process does."""
    together.wait(60)
    run_ids.put(MlflowRun(config(f"storage={storage}")).run_id)


def test_processes_that_begin_at_once_on_fresh_storage_all_get_a_run(tmp_path):
    together, run_ids = FORKS.Barrier(2), FORKS.Queue()
    processes = [FORKS.Process(target=begins, args=(tmp_path, together, run_ids)) for _ in range(2)]
    for process in processes:
        process.start()
    try:
        begun = {run_ids.get(timeout=120) for _ in processes}
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join(60)
    client = mlflow_client(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("marl-ray").experiment_id
    assert {run.info.run_id for run in client.search_runs([experiment])} == begun and len(begun) == 2


def opens(uri: str, folder: str, begun: Any) -> None:
    """Make the database, in temporary folders below `folder`."""
    tempfile.tempdir = folder
    begun.set()
    mlflow_client(uri)


def test_a_process_that_is_killed_leaves_a_file_that_the_next_one_opens(tmp_path):
    uri = f"sqlite:///{tmp_path}/sub/mlflow.db"
    for delay in (0.02, 0.1, 0.2, 0.3, 0.4):
        begun = FORKS.Event()
        process = FORKS.Process(target=opens, args=(uri, str(tmp_path), begun))
        process.start()
        assert begun.wait(60)
        time.sleep(delay)
        process.kill()
        process.join(60)
    assert [experiment.name for experiment in mlflow_client(uri).search_experiments()] == ["Default"]


def test_a_file_that_was_left_half_made_is_made_anew(tmp_path):
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("CREATE TABLE secrets (secret_id VARCHAR(36) PRIMARY KEY)")
        database.execute("CREATE INDEX index_secrets ON secrets (secret_id)")
    client = mlflow_client(f"sqlite:///{tmp_path}/mlflow.db")
    assert client.search_registered_models() == []
    client.create_registered_model("kept")
    assert mlflow_client(f"sqlite:///{tmp_path}/mlflow.db").get_registered_model("kept").name == "kept"


def test_a_file_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "mlflow.db").write_text("a letter to a friend" * 100)
    with pytest.raises(Exception, match="file is not a database"):
        mlflow_client(f"sqlite:///{tmp_path}/mlflow.db").search_experiments()
    assert (tmp_path / "mlflow.db").read_text().startswith("a letter")


def test_an_error_of_the_database_is_raised_and_prints_nothing(tmp_path, capfd):
    """MLflow prints a traceback of each, a sink is called again every three seconds, and a disk may be full for hours."""
    client = mlflow_client(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run("0").info.run_id
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("drop table metrics")
    with pytest.raises(Exception, match="no such table: metrics"):
        client.log_metric(run, "return", 1.0)
    assert "Traceback" not in capfd.readouterr().err
