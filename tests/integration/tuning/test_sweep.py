"""Sweeps on a real Ray: grids, exploits that copy weights, resume, faults."""

import html
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from ray.util.state import list_actors
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from toy_runs.runs import mlflow_database

from marl_ray.cluster import jobs
from marl_ray.config import RunConfig, load_config, parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.actor_critic import load_bundle
from marl_ray.training.single_process import train_alone
from marl_ray.tuning.records import find_sweep, winner_of
from marl_ray.tuning.reporting.report import write_report
from marl_ray.tuning.running.driver import SweepResult, check_sweep, run_sweep

pytestmark = pytest.mark.shared_ray("one")

TOY: dict[str, Any] = {
    "env": {"id": "toys.envs:countdown"},
    "train": {"total_steps": 192, "env_copies": 4, "horizon": 8},
    "checkpoint": {"every": 2},
    "hyper": {"lr": 0.01, "epochs": 2, "minibatches": 2},
}


def sweep_config(storage: Path, **keys: Any) -> SweepConfig:
    data = {"name": "toy-sweep", "run": TOY, "seeds": 2, "storage": str(storage)} | keys
    return parse_config(SweepConfig, data)


def sweep(storage: Path, **keys: Any) -> SweepResult:
    config = sweep_config(storage, **keys)
    check_sweep(config)
    return run_sweep(config)


def rows_of(outcome: SweepResult, number: int) -> list[dict[str, float]]:
    path = Path(outcome.folder, "trials", f"{number:04d}", "rows.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


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


def test_a_grid_is_run_tracked_and_its_winner_registered_and_nothing_runs_twice(ray_cluster, tmp_path):
    grid = {
        "algorithm": {"grid": ["ippo", "grpo"]},
        "train.group_size": {"grid": [2], "when": {"algorithm": ["grpo"]}},
    }
    outcome = sweep(tmp_path, space=grid)
    records = outcome.records
    assert [trial.status for trial in records.trials] == ["finished", "finished"], [t.error for t in records.trials]
    assert [trial.values for trial in records.trials] == [
        {"algorithm": "ippo"},
        {"algorithm": "grpo", "train.group_size": 2},
    ]
    written = json.loads(Path(outcome.folder, "sweep.json").read_text())
    for trial, record in zip(written["trials"], records.trials, strict=True):
        rows = rows_of(outcome, record.number)
        assert rows[-1]["steps"] >= 192
        assert rows[-1]["objective/eval/return"] == record.objectives[0]
        assert {"seed-0/eval/return", "seed-1/eval/return", "policy_loss"} <= set(rows[-1])
        assert record.played == rows[-1]["played"] >= 2 * 192
        assert record.seconds > 0
        assert [
            load_bundle(Path(outcome.folder, path)).manifest.lineage.seed for path in trial["bundles"].values()
        ] == [
            0,
            1,
        ]
        assert parse_config(RunConfig, trial["configs"][1]).seed == 1

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    children = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{records.mlflow_run_id}'")
    assert {child.data.tags["trial"] for child in children} == {"0000", "0001"}
    assert {child.info.status for child in children} == {"FINISHED"}
    assert client.get_run(records.mlflow_run_id).info.status == "FINISHED"
    assert all("objective/eval/return" in child.data.metrics for child in children)
    assert "report.html" in [file.path for file in client.list_artifacts(records.mlflow_run_id)]
    assert records.winner_model == "models:/toy-sweep/1"
    best = max(records.trials, key=lambda trial: trial.objectives[0])
    assert records.winner == best.number
    served = load_bundle(records.winner_model, f"sqlite:///{tmp_path}/mlflow.db")
    assert served.manifest.lineage.run == f"toy-sweep-{best.number:04d}-seed-{records.winner_seed}"
    assert winner_of(outcome.folder)[0] == records.winner_model
    alone = load_config(RunConfig, Path(outcome.folder, "winner.yaml"))
    won = rows_of(outcome, best.number)[-1]
    assert train_alone(alone)[-1]["eval/return"] == won[f"seed-{records.winner_seed}/eval/return"]

    again = run_sweep(sweep_config(tmp_path, space=grid), cluster=lambda: pytest.fail("nothing is left that needs Ray"))
    assert [trial.legs for trial in again.records.trials] == [1, 1]
    assert again.records.winner_model == records.winner_model
    assert again.records.seconds == records.seconds  # what trains nothing takes nothing of `budget.hours`
    with pytest.raises(MarlRayError, match=r"name: sweep 'toy-sweep' exists under .* with another seeds; choose"):
        check_sweep(sweep_config(tmp_path, space=grid, seeds=3))


@pytest.mark.slow
def test_trials_that_fail_are_named_and_the_others_go_on(ray_cluster, tmp_path):
    disk = tmp_path / "toy-sweep" / "trials" / "0001"
    disk.mkdir(parents=True)
    full = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], capture_output=True).returncode == 0
    )
    fragile = {"marker": str(tmp_path / "died"), "at": 11}
    try:
        outcome = sweep(
            tmp_path,
            space={
                "env.id": {
                    "grid": ["toys.envs:countdown", "toys.envs:poisoned", "toys.envs:fragile", "toy_runs.sweeps:doomed"]
                },
                "env.kwargs": {
                    "grid": [fragile, {"marker": "/no/such/folder", "at": 5}],
                    "when": {"env.id": ["toys.envs:fragile"]},
                },
                "env.kwargs.after": {"grid": [3], "when": {"env.id": ["toys.envs:poisoned"]}},
                "resources.cpus_per_worker": {
                    "grid": [1.0, 3.0, 9.0, 2.0],
                    "when": {"env.id": ["toys.envs:countdown"]},
                },
                "resources.device": {"grid": ["cuda"], "when": {"resources.cpus_per_worker": [2.0]}},
            },
        )
    finally:
        if full:
            subprocess.run(["umount", disk], check=True)
    ends = [(trial.status, trial.error) for trial in outcome.records.trials]
    assert ends[0] == ("finished", "")
    assert ends[1][0] == ("failed" if full else "finished")
    assert ("No space left on device" in ends[1][1]) == full
    assert ends[2][0] == "refused"
    assert "resources.workers=1 with cpus_per_worker=9 needs 9 CPUs" in ends[2][1]
    assert ends[3] == (
        "refused",
        "resources.workers=1 on cuda needs 1 GPUs, but this cluster can never have more than 0",
    )
    assert ends[4][0] == "failed"
    assert ends[4][1].startswith("seed 0: evaluation at step 0: returns or costs are not finite")
    assert Path(fragile["marker"]).exists()  # its process was lost, and it was taken up again
    assert ends[5] == ("finished", "")
    assert ends[6][0] == "failed"
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/folder'" in ends[6][1]
    assert ends[6][1].endswith(" (traceback in trials/0006/error.txt)")
    assert "toys/envs.py" in (tmp_path / "toy-sweep" / "trials" / "0006" / "error.txt").read_text()
    assert ends[7] == ("lost", "its process was lost again and again")
    assert not any("\n" in error for _, error in ends)
    assert outcome.records.status == "finished"
    page = html.unescape(Path(outcome.report).read_text())
    assert all(page.count(error) == 2 for _, error in ends if error)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{outcome.records.mlflow_run_id}'")
    assert {run.data.tags["trial"]: run.data.tags.get("error", "") for run in runs} == {
        f"{trial.number:04d}": trial.error for trial in outcome.records.trials
    }


def test_a_sweep_of_which_nothing_can_run_says_so_also_in_its_report(ray_cluster, tmp_path):
    reason = "resources.workers=1 on cuda needs 1 GPUs, but this cluster can never have more than 0"
    with pytest.raises(MarlRayError, match=reason):
        sweep(tmp_path, space={"hyper.lr": {"grid": [0.01, 0.02]}}, set={"resources.device": "cuda"})
    assert json.loads((tmp_path / "toy-sweep" / "sweep.json").read_text())["status"] == "failed"
    assert reason in (tmp_path / "toy-sweep" / "report.html").read_text()


@pytest.mark.long
def test_a_retry_on_a_cluster_that_is_still_too_small_leaves_a_sweep_that_has_ended(ray_cluster, tmp_path):
    config = sweep_config(tmp_path, space={"resources.cpus_per_worker": {"grid": [1.0, 9.0]}}, seeds=1)
    reason = "resources.workers=1 with cpus_per_worker=9 needs 9 CPUs, but this cluster can never have more than 4"
    for retry in (False, True):
        records = run_sweep(config, retry=retry).records
        assert [(trial.status, trial.error) for trial in records.trials] == [("finished", ""), ("refused", reason)]
        assert (records.status, records.winner, [trial.legs for trial in records.trials]) == ("finished", 0, [1, 0])
    run_sweep(config, cluster=lambda: pytest.fail("nothing is left that needs Ray"))


@pytest.mark.long
def test_a_retry_takes_a_failed_trial_up_again_beside_one_that_can_never_run(ray_cluster, tmp_path):
    marker = tmp_path / "folder" / "marker"
    space = {
        "env.id": {"grid": ["toys.envs:fragile"]},
        "env.kwargs": {"grid": [{"marker": str(marker), "at": 5}]},
        "resources.cpus_per_worker": {"grid": [1.0, 9.0]},
    }
    config = sweep_config(tmp_path, space=space, seeds=1)
    assert [trial.status for trial in run_sweep(config).records.trials] == ["failed", "refused"]
    marker.parent.mkdir()
    assert [trial.status for trial in run_sweep(config, retry=True).records.trials] == ["finished", "refused"]


@pytest.mark.long
def test_a_metric_that_is_never_reported_is_named_with_those_that_are(ray_cluster, tmp_path):
    outcome = sweep(tmp_path, space={"hyper.lr": {"grid": [0.01]}}, seeds=1, metric="env/retrun")
    (trial,) = outcome.records.trials
    assert trial.status == "failed"
    assert trial.error.startswith("metric 'env/retrun' is never reported; a run reports ")
    assert ", clip_fraction, " in trial.error and ", eval/return, " in trial.error
    assert outcome.records.winner is None
    assert html.unescape(Path(outcome.report).read_text()).count(trial.error) == 2


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
    calm = sweep(tmp_path / "calm", **keys)
    config = {"name": "toy-sweep", "storage": str(tmp_path / "killed")} | keys
    mlflow_database(tmp_path / "killed")
    process = subprocess.Popen([sys.executable, "-c", KILLED, ray_cluster.address, json.dumps(config)])
    records = tmp_path / "killed" / "toy-sweep" / "sweep.json"
    try:
        deadline = time.monotonic() + 200
        while not records.exists() or sum(bool(t.scores) for t in find_sweep(str(records.parent))[1].trials) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait(30)
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
    events, deadline = tmp_path / "toy-sweep" / "tensorboard" / "0000-1", time.monotonic() + 120
    try:
        while not events.exists() or "return" not in EventAccumulator(str(events)).Reload().Tags()["scalars"]:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        actors = list_actors(ray_cluster.dashboard_url, filters=[("state", "=", "ALIVE")], detail=True)
        assert "toy-sweep-trial" in {actor.repr_name for actor in actors}
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(30)
    assert process.returncode == 130, printed
    assert "toy-sweep: interrupted; 0 of 1 trials have ended, the others' checkpoints are in " in printed
    records = find_sweep("toy-sweep", str(tmp_path))[1]
    assert (records.status, records.trials[0].state) == ("cut", "running")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert {run.info.status for run in client.search_runs(["1"])} == {"KILLED"}


@pytest.mark.slow
def test_an_exploit_copies_weights_and_optimiser_state_between_trials_of_two_workers(ray_cluster, tmp_path):
    outcome = sweep(
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
    outcome = sweep(
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
    assert jobs.submit("sweep", file, overrides, address=ray_cluster.dashboard_url, python=sys.executable) == 0
    assert json.loads((tmp_path / "job" / "sweep.json").read_text())["winner"] == 0
