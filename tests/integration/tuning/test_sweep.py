"""Sweeps on a real Ray whose driver or workers die, that are interrupted, exploit other trials, or run as a job."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from ray.util.state import list_actors
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from toy_runs.runs import mlflow_database
from toy_runs.trained_sweeps import TOY, rows_of, sweep_config, train_sweep
from waiting import until

from marl_ray.cli.cluster import PRINTER
from marl_ray.cluster import jobs
from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.lookup import find_sweep
from marl_ray.tuning.reporting.report import write_report
from marl_ray.tuning.running.driver import run_sweep

pytestmark = pytest.mark.shared_ray("one")


def tensors(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds of models and optimisers, whatever workers wrote it."""
    folder.mkdir(exist_ok=True)
    dcp_to_torch_save(checkpoint / "seed-0" / "weights", folder / "whole.pt")
    state = json.loads((checkpoint / "seed-0" / "state.json").read_text())
    groups = {name: learner["groups"] for name, learner in state["learners"].items()}
    return flat(torch.load(folder / "whole.pt", weights_only=False)) | flat(state["scalars"]) | flat(groups)


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(data, dict):
        return {k: v for key, value in data.items() for k, v in flat(value, f"{prefix}/{key}").items()}
    if isinstance(data, list | tuple):
        return {k: v for key, value in enumerate(data) for k, v in flat(value, f"{prefix}/{key}").items()}
    return {prefix: data}


KILLED = """
import json, sys
import ray
from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.running.driver import run_sweep
ray.init(address=sys.argv[1], log_to_driver=False)
run_sweep(parse_config(SweepConfig, json.loads(sys.argv[2])))
"""


@pytest.mark.parametrize(
    ("rates", "seeds", "grace"),
    [
        pytest.param([0.001, 0.03], 1, 64, marks=pytest.mark.long),
        pytest.param([0.001, 0.003, 0.01, 0.03], 2, 160, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)  # three sweeps of many legs, on a machine that may be busy
def test_a_sweep_whose_driver_is_killed_goes_on_to_the_same_result(ray_cluster, tmp_path, rates, seeds, grace):
    keys: dict[str, Any] = {
        "run": TOY,
        "set": {"train.total_steps": len(rates) * grace, "checkpoint.every": 1},
        "space": {"hyper.lr": {"grid": rates}},
        "scheduler": {"kind": "asha", "grace": grace, "reduction": 2},
        "max_concurrent": 1,
        "seeds": seeds,
    }
    calm = train_sweep(tmp_path / "calm", **keys)
    config = {"name": "toy-sweep", "storage": str(tmp_path / "killed")} | keys
    mlflow_database(tmp_path / "killed")
    process = subprocess.Popen([sys.executable, "-c", KILLED, ray_cluster.address, json.dumps(config)])
    records = tmp_path / "killed" / "toy-sweep" / "sweep.json"

    def count_scored() -> int:
        return records.exists() and sum(bool(trial.scores) for trial in find_sweep(str(records.parent))[1].trials)

    try:
        until(lambda: process.poll() is not None or count_scored() >= 2, "two trials with scores", 200)
        assert process.poll() is None, "the sweep ended before two trials had scores"
    finally:
        process.kill()
        process.wait(60)
    assert any(trial.state != "ended" for trial in find_sweep(str(records.parent))[1].trials)
    report = write_report(*find_sweep("toy-sweep", str(tmp_path / "killed")))
    assert "The sweep has not ended" in Path(report).read_text()
    resumed = run_sweep(parse_config(SweepConfig, config))
    ends = [(t.status, t.steps, t.scores, t.objectives, t.played) for t in resumed.records.trials]
    assert ends == [(t.status, t.steps, t.scores, t.objectives, t.played) for t in calm.records.trials]
    assert resumed.records.winner == calm.records.winner
    assert resumed.report == report and "The sweep has not ended" not in Path(report).read_text()
    for number in range(len(rates)):
        curves = [
            [
                (row["iteration"], row["steps"], row.get("objective/eval/return"), row.get("seed-1/eval/return"))
                for row in rows_of(o, number)
            ]
            for o in (calm, resumed)
        ]
        assert curves[0] == curves[1]


@pytest.mark.slow
@pytest.mark.timeout(600)  # worker groups start four times, on a machine that may be busy
def test_ctrl_c_says_what_is_kept_of_a_sweep_whose_event_files_are_there_while_it_runs(
    ray_cluster, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    keys = {"space": {"hyper.lr": {"grid": [0.001, 0.003]}}, "set": {"train.total_steps": 10**8, "checkpoint.every": 1}}
    config = sweep_config(tmp_path, max_concurrent=1, **keys)
    (tmp_path / "sweep.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-c", "from marl_ray.cli import main; main()", "sweep", str(tmp_path / "sweep.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    events = tmp_path / "toy-sweep" / "tensorboard" / "0000-1"

    def has_returns() -> bool:
        return events.exists() and "return" in EventAccumulator(str(events)).Reload().Tags()["scalars"]

    try:
        until(lambda: process.poll() is not None or has_returns(), "an event file with returns", 120)
        assert process.poll() is None, "the sweep ended before an event file had returns"
        actors = list_actors(ray_cluster.dashboard_url, filters=[("state", "=", "ALIVE")], detail=True)
        assert "toy-sweep-trial" in {actor.repr_name for actor in actors}
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(60)
    assert process.returncode == 130, printed
    assert "toy-sweep: interrupted; 0 of 1 trials have ended, the others' checkpoints are in " in printed
    records = find_sweep("toy-sweep", str(tmp_path))[1]
    assert (records.status, records.trials[0].state) == ("interrupted", "running")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert {run.info.status for run in client.search_runs(["1"])} == {"KILLED"}


@pytest.mark.slow
def test_an_exploit_copies_weights_and_optimiser_state_between_trials_of_two_workers(ray_cluster, tmp_path):
    outcome = train_sweep(
        tmp_path,
        set={"train.total_steps": 128, "resources.workers": 2, "checkpoint.keep": 100},
        space={"hyper.lr": {"choice": [0.01, 0.02, 0.04]}, "hyper.entropy_coef": {"uniform": [0.0, 0.02]}},
        search={"kind": "random", "seed": 1},
        scheduler={"kind": "pbt", "interval": 64, "quantile": 0.5, "resample": 0.0},
        budget={"trials": 2},
        seeds=1,
    )
    trials = outcome.records.trials
    assert [trial.status for trial in trials] == ["finished", "finished"], [trial.error for trial in trials]
    ((recipient, exploit),) = [(trial, exploit) for trial in trials for exploit in trial.exploits]
    assert exploit["at"] == 64 and exploit["values"] != recipient.history[64]
    check_exploit(Path(outcome.folder), recipient.number, exploit, tmp_path)


def check_exploit(folder: Path, recipient: int, exploit: dict[str, Any], scratch: Path) -> None:
    """Check that a recipient's workers have the donor's learners, but for the hyper-parameters.

    Compared are the donor's last checkpoint before the exploit, and the first that the recipient's workers wrote after
    it, from what is in their learners. The hyper-parameters are the exploit's.
    """
    (donor_checkpoint,) = (folder / f"trials/{exploit['donor']:04d}").glob("attempt-1/checkpoint-000002-*")
    (recipient_checkpoint,) = (folder / f"trials/{recipient:04d}").glob("attempt-2/checkpoint-000002-*")
    donated, got = tensors(donor_checkpoint, scratch / "a"), tensors(recipient_checkpoint, scratch / "b")
    assert set(donated) == set(got)
    assert any("/optimizer/" in key and key.endswith("exp_avg_sq") for key in donated)
    assert any("/model/" in key for key in donated)
    rates = {key for key in donated if key.endswith(("lr", "initial_lr"))}
    for key in set(donated) - rates:
        same = (
            torch.equal(donated[key], got[key]) if isinstance(donated[key], torch.Tensor) else donated[key] == got[key]
        )
        assert same, key
    assert {got[key] for key in rates} == {exploit["values"]["hyper.lr"]}
    learner = json.loads((recipient_checkpoint / "seed-0" / "state.json").read_text())["learners"]["shared"]
    assert learner["entropy_coef"] == exploit["values"]["hyper.entropy_coef"]


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_trial_of_two_workers_of_which_one_dies_goes_on_from_its_checkpoint(ray_cluster, tmp_path):
    marker = tmp_path / "died"
    outcome = train_sweep(
        tmp_path,
        set={"resources.workers": 2, "checkpoint.every": 1, "env.kwargs": {"marker": str(marker), "at": 35}}
        | {"evaluation.episodes": 2},
        space={"env.id": {"grid": ["toys.envs:fragile"]}},
    )
    (trial,) = outcome.records.trials
    assert (trial.status, trial.error) == ("finished", "")
    assert marker.exists()
    assert trial.cpus == 2
    assert [row["iteration"] for row in rows_of(outcome, 0)] == [0, 1, 2, 3, 4, 5, 6]
    assert trial.played == 2 * 192


@pytest.mark.slow
def test_a_sweep_runs_as_a_job(ray_cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray_cluster.token)
    (tmp_path / "run.yaml").write_text(json.dumps(TOY | {"name": "run"}))
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps({"name": "job", "run": "run.yaml", "seeds": 1, "space": {"hyper.lr": {"grid": [0.01]}}}))
    overrides = [f"storage={tmp_path}"]
    mlflow_database(tmp_path)
    options = {"address": ray_cluster.dashboard_url, "python": sys.executable, "listener": PRINTER}
    assert jobs.submit("sweep", file, overrides, **options) == 0
    assert json.loads((tmp_path / "job" / "sweep.json").read_text())["winner"] == 0
