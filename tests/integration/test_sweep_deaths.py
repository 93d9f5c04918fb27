"""Deaths of the processes of trials that have workers of their own: each row is there once, with the same values."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray.util.state import list_actors

from marl_ray.cluster.local_ray import LocalRay
from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.running.driver import SweepResult, run_sweep

RUN: dict[str, Any] = {
    "env": {"id": "toys.envs:countdown"},
    "train": {"total_steps": 320, "env_copies": 4, "horizon": 8},
    "checkpoint": {"every": 2},
    "evaluation": {"episodes": 2},
    "hyper": {"lr": 0.01, "epochs": 2, "minibatches": 2},
    "resources": {"workers": 2},
}
TIMES = ("time/", "steps_per_second", "timestamp")


def sweep(storage: Path, **env: Any) -> SweepResult:
    run = RUN | {"env": RUN["env"] | env}
    data = {
        "name": "toy-sweep",
        "run": run,
        "seeds": 2,
        "storage": str(storage),
        "space": {"hyper.lr": {"grid": [0.01]}},
    }
    return run_sweep(parse_config(SweepConfig, data))


def rows_of(outcome: SweepResult) -> list[dict[str, float]]:
    lines = Path(outcome.folder, "trials", "0000", "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
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
@pytest.mark.timeout(600)  # worker groups start five times, on a machine that may be busy
def test_a_trial_with_workers_has_each_row_once_whichever_of_its_processes_is_killed(
    ray_cluster: LocalRay, tmp_path: Path
):
    calm = sweep(tmp_path / "calm")
    marker = tmp_path / "died"
    fragile = sweep(tmp_path / "worker", id="toys.envs:fragile", kwargs={"marker": str(marker), "at": 60})
    killed: list[int] = []
    state = tmp_path / "trial" / "toy-sweep" / "trials" / "0000" / "trial.json"
    killer = threading.Thread(target=kill_trial, args=(ray_cluster.dashboard_url, state, killed))
    killer.start()
    # Its steps take a moment, so that the trial still trains when it is killed.
    beheaded = sweep(tmp_path / "trial", id="toys.sweeps:slow", kwargs={"seconds": 0.01})
    killer.join(10)
    assert marker.exists() and killed
    for outcome in (calm, fragile, beheaded):
        (trial,) = outcome.records.trials
        assert (trial.status, trial.error, trial.played) == ("finished", "", 2 * 320)
    assert [row["iteration"] for row in rows_of(calm)] == list(range(11))
    assert rows_of(fragile) == rows_of(beheaded) == rows_of(calm)
    attempts = json.loads(state.read_text())["attempts"]
    assert attempts == 2
