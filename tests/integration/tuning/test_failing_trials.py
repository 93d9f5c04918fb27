"""Trials that fail, are lost or are refused on a real Ray, while the others train on."""

import html
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from toy_runs.trained_sweeps import FinishedSweep, sweep_config, train_sweep

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.folder_kinds import OWNER_FOLDER
from marl_ray.tuning.running.driver import run_sweep

pytestmark = pytest.mark.shared_ray("one")


class FaultySweep(NamedTuple):
    """A sweep of eight trials, most of which meet a fault of their own."""

    sweep: FinishedSweep
    disk_was_full: bool
    """True if this user may mount a small disk, which trial 1 then fills."""
    marker: Path
    """A file that trial 5 writes before it kills its process."""

    def ending(self, number: int) -> tuple[str, str]:
        return self.sweep.trials[number].status, self.sweep.trials[number].error


@pytest.fixture(scope="module")
def faulty(ray_cluster, tmp_path_factory) -> FaultySweep:
    storage = tmp_path_factory.mktemp("faulty")
    disk = storage / "toy-sweep" / "trials" / "0001"
    disk.mkdir(parents=True)
    (storage / "toy-sweep" / OWNER_FOLDER).mkdir()  # a folder without it is something else's, and the name is refused
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk]
    full = subprocess.run(mount, capture_output=True).returncode == 0
    marker = storage / "died"
    environments = ["toys.envs:countdown", "toys.envs:poisoned", "toys.envs:fragile", "toy_runs.sweeps:doomed"]
    space = {
        "env.id": {"grid": environments},
        "env.kwargs": {
            "grid": [{"marker": str(marker), "at": 11}, {"marker": "/no/such/folder", "at": 5}],
            "when": {"env.id": ["toys.envs:fragile"]},
        },
        "env.kwargs.after": {"grid": [3], "when": {"env.id": ["toys.envs:poisoned"]}},
        "resources.cpus_per_worker": {"grid": [1.0, 3.0, 9.0, 2.0], "when": {"env.id": ["toys.envs:countdown"]}},
        "resources.device": {"grid": ["cuda"], "when": {"resources.cpus_per_worker": [2.0]}},
    }
    try:
        return FaultySweep(FinishedSweep(storage, train_sweep(storage, space=space)), full, marker)
    finally:
        if full:
            subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_trials_without_a_fault_finish_beside_those_that_fail(faulty):
    assert faulty.ending(0) == ("finished", "")
    assert faulty.sweep.result.records.status == "finished"


@pytest.mark.slow
def test_a_trial_whose_disk_is_full_fails_with_the_reason(faulty):
    status, error = faulty.ending(1)
    assert status == ("failed" if faulty.disk_was_full else "finished")
    assert ("No space left on device" in error) == faulty.disk_was_full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (2, "resources.workers=1 with cpus_per_worker=9 needs 9 CPUs, but this cluster can never have more than 4"),
        (3, "resources.workers=1 on cuda needs 1 GPUs, but this cluster can never have more than 0"),
    ],
)
def test_a_trial_that_the_cluster_can_never_run_is_refused(faulty, number, reason):
    assert faulty.ending(number) == ("refused", reason)


@pytest.mark.slow
def test_a_trial_whose_returns_are_not_finite_names_its_seed(faulty):
    status, error = faulty.ending(4)
    assert status == "failed"
    assert error.startswith("seed 0: evaluation at step 0: returns or costs are not finite")


@pytest.mark.slow
def test_a_trial_whose_process_is_lost_once_continues(faulty):
    assert faulty.marker.exists()
    assert faulty.ending(5) == ("finished", "")


@pytest.mark.slow
def test_a_trial_whose_environment_raises_names_the_error_and_the_file_of_its_traceback(faulty):
    status, error = faulty.ending(6)
    assert status == "failed"
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/folder'" in error
    assert error.endswith(" (traceback in trials/0006/error.txt)")
    assert "toys/envs.py" in Path(faulty.sweep.result.folder, "trials", "0006", "error.txt").read_text()


@pytest.mark.slow
def test_a_trial_whose_process_is_lost_every_time_is_given_up(faulty):
    assert faulty.ending(7) == ("lost", "its process was lost again and again")


@pytest.mark.slow
def test_the_reason_of_every_fault_is_one_line_that_the_report_and_mlflow_have(faulty):
    errors = {f"{trial.number:04d}": trial.error for trial in faulty.sweep.trials}
    assert not any("\n" in error for error in errors.values())
    page = html.unescape(Path(faulty.sweep.result.report).read_text())
    assert all(page.count(error) == 2 for error in errors.values() if error)
    assert {run.data.tags["trial"]: run.data.tags.get("error", "") for run in faulty.sweep.trial_runs()} == errors


def test_a_sweep_of_which_nothing_can_run_says_so_also_in_its_report(ray_cluster, tmp_path):
    reason = "resources.workers=1 on cuda needs 1 GPUs, but this cluster can never have more than 0"
    with pytest.raises(MarlRayError, match=reason):
        train_sweep(tmp_path, space={"hyper.lr": {"grid": [0.01, 0.02]}}, set={"resources.device": "cuda"})
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
    outcome = train_sweep(tmp_path, space={"hyper.lr": {"grid": [0.01]}}, seeds=1, metric="env/retrun")
    (trial,) = outcome.records.trials
    assert trial.status == "failed"
    assert trial.error.startswith("metric 'env/retrun' is never reported; a run reports ")
    assert ", clip_fraction, " in trial.error and ", eval/return, " in trial.error
    assert outcome.records.winner is None
    assert html.unescape(Path(outcome.report).read_text()).count(trial.error) == 2
