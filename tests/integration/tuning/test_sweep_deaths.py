"""Deaths in a sweep of trials that have workers of their own: each row is there once, with the same values."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray.util.state import list_actors
from servers.object_store import object_store
from toy_runs.runs import mlflow_database
from waiting import until

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.stored_files.ownership.owners import read_owner
from marl_ray.tuning.folder import Folder, read_rows, trial_folder
from marl_ray.tuning.lookup import find_sweep
from marl_ray.tuning.records_file import load_records
from marl_ray.tuning.running.driver import SweepResult, run_sweep
from marl_ray.tuning.running.trial_files import read_state

pytestmark = pytest.mark.shared_ray("two")

RUN: dict[str, Any] = {
    "env": {"id": "toys.envs:countdown"},
    "train": {"total_steps": 320, "env_copies": 4, "horizon": 8},
    "checkpoint": {"every": 2},
    "evaluation": {"episodes": 2},
    "hyper": {"lr": 0.01, "epochs": 2, "minibatches": 2},
    "resources": {"workers": 2},
}
TIMES = ("time/", "steps_per_second", "timestamp")


DRIVER = """
import json, os, sys
import ray
from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.running.driver import run_sweep
store = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"env_vars": store})
run_sweep(parse_config(SweepConfig, json.loads(sys.argv[2])))
"""


def data_of(storage: str, rates: list[float], **env: Any) -> dict[str, Any]:
    run = RUN | {"env": RUN["env"] | env}
    space = {"hyper.lr": {"grid": rates}}
    return {"name": "toy-sweep", "run": run, "seeds": 2, "storage": storage, "max_concurrent": 1, "space": space}


def sweep(storage: Path, rates: tuple[float, ...] = (0.01,), **env: Any) -> SweepResult:
    return run_sweep(parse_config(SweepConfig, data_of(str(storage), list(rates), **env)))


def rows_of(outcome: SweepResult) -> list[dict[str, float]]:
    return rows_in(str(Path(outcome.folder).parent), 0)


def rows_in(storage: str, number: int) -> list[dict[str, float]]:
    """The rows of a trial, without times."""
    rows = read_rows(trial_folder(storage, "toy-sweep", number))
    return [{key: value for key, value in row.items() if not any(part in key for part in TIMES)} for row in rows]


def kill_trial(dashboard: str, state: Path, killed: list[int]) -> None:
    """Kill the process of the trial once it has a checkpoint."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if state.exists() and json.loads(state.read_text())["steps"] > 0:
            actors = list_actors(dashboard, filters=[("state", "=", "ALIVE")], detail=True)
            assert not [actor for actor in actors if "metrics" in (actor.name or "")]  # none whose death ends the leg
            (process,) = [actor.pid for actor in actors if actor.repr_name == "toy-sweep-trial"]
            os.kill(process, signal.SIGKILL)
            killed.append(process)
            return
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # worker groups start five times, on a machine that may be busy
def test_a_trial_with_workers_has_each_row_once_whichever_of_its_processes_is_killed(ray_cluster, tmp_path):
    calm = sweep(tmp_path / "calm")
    marker = tmp_path / "died"
    fragile = sweep(tmp_path / "worker", id="toys.envs:fragile", kwargs={"marker": str(marker), "at": 60})
    killed: list[int] = []
    state = tmp_path / "trial" / "toy-sweep" / "trials" / "0000" / "trial.json"
    killer = threading.Thread(target=kill_trial, args=(ray_cluster.dashboard_url, state, killed))
    killer.start()
    # Its steps take a moment, so that the trial still trains when it is killed.
    beheaded = sweep(tmp_path / "trial", id="toy_runs.sweeps:slow", kwargs={"seconds": 0.01})
    killer.join(60)
    assert marker.exists() and killed
    for outcome in (calm, fragile, beheaded):
        (trial,) = outcome.records.trials
        assert (trial.status, trial.error, trial.played) == ("finished", "", 2 * 320)
    assert [row["iteration"] for row in rows_of(calm)] == list(range(11))
    assert rows_of(fragile) == rows_of(beheaded) == rows_of(calm)
    attempts = json.loads(state.read_text())["attempts"]
    assert attempts == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)  # worker groups start five times, on a machine that may be busy
def test_a_sweep_on_an_object_store_goes_on_after_its_driver_was_killed(ray_cluster, tmp_path, monkeypatch):
    rates = (0.01, 0.003)
    calm = sweep(tmp_path, rates)
    mlflow_database(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with object_store() as bucket:
        # Its steps take a moment, so that the second trial still trains when the driver is killed.
        data = data_of(f"{bucket}/sweeps", list(rates), id="toy_runs.sweeps:slow", kwargs={"seconds": 0.01})
        command = [sys.executable, "-c", DRIVER, ray_cluster.address, json.dumps(data)]
        folder, second = Folder(data["storage"], "toy-sweep"), trial_folder(data["storage"], "toy-sweep", 1)
        driver = subprocess.Popen(command)
        try:
            until(lambda: driver.poll() is not None or read_state(second).steps, "the second trial's steps", 600)
            assert driver.poll() is None, "the driver ended before the second trial had steps"
        finally:
            driver.kill()
            driver.wait(60)
        killed = load_records(folder)
        assert killed is not None
        assert [(trial.state, trial.status) for trial in killed.trials] == [("ended", "finished"), ("running", "")]
        subprocess.run(command, check=True, timeout=600)
        records = find_sweep("toy-sweep", data["storage"])[1]
        for trial, expected in zip(records.trials, calm.records.trials, strict=True):
            assert (trial.status, trial.error) == ("finished", "")
            assert (trial.objectives, trial.played) == (expected.objectives, expected.played)
            assert rows_in(data["storage"], trial.number) == rows_in(str(tmp_path), trial.number)
        assert records.winner == calm.records.winner and records.winner_model
        owner = read_owner(folder.filesystem, folder.path)
        assert owner is not None and owner.state == "finished"
        assert read_state(second).attempts == 2
