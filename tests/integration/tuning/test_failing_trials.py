"""Trials that fail, are lost, are refused or wait on a real Ray, while the others train on."""

import html
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest
from toy_runs.runs import short
from toy_runs.trained_sweeps import FinishedSweep, sweep_config, train_sweep
from waiting import until

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.folder_kinds import OWNER_FOLDER
from marl_ray.training.machines import torch_trainer
from marl_ray.training.machines.ray_variables import START_VARIABLE
from marl_ray.training.machines.worker_watch import WorkerWatch
from marl_ray.training.tracking.printed_lines import print_line
from marl_ray.tuning.folder import trial_folder
from marl_ray.tuning.reporting import tracking
from marl_ray.tuning.running.driver import run_sweep
from marl_ray.tuning.running.trial_files import Leg, TrialWriter
from marl_ray.tuning.running.worker_group import run_in_workers

pytestmark = pytest.mark.shared_ray("one")

WAITING = "waiting for 2 workers of 1 CPU each, since "
FREE = "; the cluster has 1 CPU free on 1 node"


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


@contextmanager
def busy_cluster() -> Iterator[threading.Event]:
    """Occupy all CPUs but one within the block, or until the event is set."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    held, freed = placement_group([{"CPU": ray.cluster_resources()["CPU"] - 1}]), threading.Event()
    ray.get(held.ready(), timeout=60)

    def free() -> None:
        freed.wait(300)
        remove_placement_group(held)

    thread = threading.Thread(target=free, daemon=True)
    thread.start()
    try:
        yield freed
    finally:
        freed.set()
        thread.join(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trial_says_what_its_workers_wait_for_and_trains_once_they_have_it(ray_cluster, tmp_path, monkeypatch):
    lines: list[str] = []

    def note_and_print(line: str, stream: TextIO) -> None:
        lines.append(line)
        print_line(line, stream)

    monkeypatch.setattr(tracking, "print_line", note_and_print)
    with busy_cluster() as freed:

        def free_cpus() -> None:
            until(lambda: any(FREE in line for line in lines), "the line of the trial", 200)
            freed.set()

        thread = threading.Thread(target=free_cpus, daemon=True)
        thread.start()
        outcome = train_sweep(
            tmp_path,
            set={"resources.workers": 2, "evaluation.episodes": 2},
            space={"hyper.lr": {"grid": [0.01]}},
            seeds=1,
        )
        thread.join(1)
    (trial,) = outcome.records.trials
    assert (trial.status, trial.error) == ("finished", "")
    waits = [line for line in lines if FREE in line]
    assert waits and all(line.startswith(f"toy-sweep: trial 0000: {WAITING}") for line in waits)
    assert len(waits) == len(set(waits))
    assert sum(line.startswith("toy-sweep: trial 0000: its workers are there, after ") for line in lines) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trial_gives_up_when_its_wait_is_over(ray_cluster, tmp_path, monkeypatch):
    """Ray Train itself tries again without an end."""
    monkeypatch.setattr(torch_trainer, "WorkerWatch", partial(WorkerWatch, wait_s=2.0))
    monkeypatch.setenv(START_VARIABLE, "1")
    run = short("ippo", "resources.workers=2", f"storage={tmp_path}")
    leg = Leg("sweep", str(tmp_path), 0, 1, [run.as_given()], [], None, True, False, 1, "", str(Path.cwd()))
    writer = TrialWriter(trial_folder(leg.storage, leg.sweep, leg.number), 1, [0], lambda row: None, print)
    with busy_cluster(), pytest.raises(MarlRayError, match=rf"^gave up after \d+ s: {WAITING}.*{FREE}") as caught:
        run_in_workers(leg, [run], writer)
    assert "\n" not in str(caught.value)
