"""Runs on a real Ray that are interrupted, wait, stall, fill their disk, or lose their name."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem
from toy_runs.runs import config, mlflow_database
from waiting import until

from marl_ray.cluster.local_ray import LocalRay
from marl_ray.errors import MarlRayError
from marl_ray.stored_files.ownership import owners
from marl_ray.stored_files.ownership.lease import Lease, LeaseLostError
from marl_ray.stored_files.ownership.owners import owner_file
from marl_ray.training.checkpoints.index import resume_line
from marl_ray.training.driver import train
from marl_ray.training.run_folder.metrics_file import iteration_of, read_metrics
from marl_ray.training.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.shared_ray("one")

TWO = "resources.workers=2"
FEW = "evaluation.episodes=2"
"""Copies of an evaluation take fewer steps than those of training, so that these die."""


@pytest.mark.long
def test_ctrl_c_says_what_is_kept_and_its_actors_have_the_name_of_the_run(ray_cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    run_config = config(f"storage={tmp_path}", "name=broken-off", "train.total_steps=100000000", "checkpoint.every=1")
    (tmp_path / "run.yaml").write_text(json.dumps(run_config.as_given()))
    command = [sys.executable, "-c", "from marl_ray.cli import main; main()", "train", str(tmp_path / "run.yaml")]
    mlflow_database(tmp_path)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        until(lambda: process.poll() is not None or "kept" in resume_line(run_config), "a checkpoint", 120)
        assert process.poll() is None, "the run ended before it was interrupted"
        actors = alive(ray_cluster)
        assert "broken-off worker" in {actor.class_name for actor in actors}
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(60)
    assert process.returncode == 130, printed
    assert "broken-off: interrupted; kept iteration " in printed
    phases = (
        "checking the run",
        "connecting to 127.0.0.1",
        "1 worker on CPU",
        "making the policies",
        "training from step 0",
    )
    assert all(re.search(rf"broken-off: \d+\.\d s  {phase}", printed) for phase in phases), printed
    assert "Traceback" not in printed
    record = json.loads((tmp_path / "broken-off" / "run.json").read_text())
    run_id = record["mlflow_run_id"]
    assert MlflowRun(run_config, run_id).client.get_run(run_id).info.status == "KILLED"
    until(lambda: "broken-off worker" not in {actor.class_name for actor in alive(ray_cluster)}, "the workers' end")


@pytest.mark.slow
def test_a_run_says_what_it_waits_for_and_a_stopped_worker_is_replaced(ray_cluster, tmp_path, monkeypatch):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setenv("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "13")
    monkeypatch.setattr(owners, "BEAT_S", 0.2)
    more = ["train.total_steps=100000000", "checkpoint.every=1", "tracking.progress=false", "evaluation.every=0"]
    run_config = config(f"storage={tmp_path}", "name=stopped", TWO, *more)
    held = placement_group([{"CPU": 3}])
    ray.get(held.ready(), timeout=60)
    log = tmp_path / "stopped" / "run.log"

    def wait_for(text: str) -> None:
        until(lambda: log.exists() and text in log.read_text(), text)

    failures: list[str] = []

    def disturb() -> None:
        try:
            wait_for("; the cluster has 1 CPU free on 1 node")
            remove_placement_group(held)
            wait_for("its workers are there, after")
            until(lambda: "kept iteration" in resume_line(run_config), "a checkpoint", 120)
            stopped = next(actor.pid for actor in alive(ray_cluster) if actor.class_name == "stopped worker")
            os.kill(stopped, signal.SIGSTOP)
            wait_for(" has not answered for 1")
            wait_for("its workers start again from the checkpoint of iteration ")
        except AssertionError as error:
            failures.append(str(error))
        finally:
            Path(owner_file(str(tmp_path / "stopped"), 2)).write_text("{}")  # another owner: so the run ends

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    with pytest.raises(LeaseLostError):
        train(run_config)
    thread.join(60)
    assert failures == []
    lines = log.read_text()
    assert re.search(
        r"waiting for 2 workers of 1 CPU each, since [\d:]+ and at most until [\d :-]+; the cluster has", lines
    )
    silent = r"worker \d on node [\d.]+ has not answered for 1\d s; it counts as lost at [\d:]+, and all start again"
    assert re.search(silent, lines)
    assert re.search(r"start again from the checkpoint of iteration \d+: worker \d: .*has been hanging for 1\d", lines)


@pytest.mark.slow
def test_a_worker_that_the_others_wait_for_in_vain_ends_in_a_named_error_and_a_restart(
    ray_cluster, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", "5")
    stalling = f'env={{"id": "toys.envs:fragile", "kwargs": {{"marker": "{tmp_path}/x", "at": 35, "stall": 40}}}}'
    run_config = config(TWO, FEW, stalling, f"storage={tmp_path}", "name=stalls", "tracking.progress=false")
    assert train(run_config).metrics["steps"] == 192
    lines = (tmp_path / "stalls" / "run.log").read_text()
    assert re.search(r"start again from the checkpoint of iteration \d+: worker \d: .*[Tt]imed? ?out", lines), lines
    rows = read_metrics(LocalFileSystem(), str(tmp_path / "stalls"))
    assert [iteration_of(row) for row in rows] == list(range(7))


@pytest.mark.long
def test_a_run_whose_disk_is_full_ends_at_once_in_one_line(ray_cluster, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], timeout=60).returncode:
        pytest.skip("this user cannot mount a small disk")
    more = ["train.total_steps=100000000", "checkpoint.every=1", "tracking.progress=false", "evaluation.every=0"]
    run_config = config(f"storage={disk}", "name=full", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", *more)

    mistakes: list[str] = []

    def fill() -> None:
        try:
            until(lambda: "kept iteration" in resume_line(run_config), "a checkpoint", 120)
        except AssertionError as error:
            mistakes.append(str(error))
        with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        with pytest.raises(MarlRayError, match=r"run 'full' failed: .*No space left on device") as caught:
            train(run_config)
        assert mistakes == [] and "\n" not in str(caught.value) and str(disk) in str(caught.value)
    finally:
        thread.join(60)
        subprocess.run(["umount", "-l", disk], check=True, timeout=60)


def test_a_name_has_one_owner(ray_cluster, tmp_path):
    run_config, folder = config(f"storage={tmp_path}"), str(tmp_path / "toy")
    with Lease(LocalFileSystem(), folder, "run 'toy'"):
        with pytest.raises(
            MarlRayError, match=rf"name: run 'toy' is owned by process {os.getpid()} of .* beat is \d s old"
        ):
            train(run_config)
        assert os.listdir(folder) == ["owner"] and not (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
def test_a_run_whose_name_was_taken_stops_at_the_next_beat_and_frees_its_cpus(ray_cluster, tmp_path, monkeypatch):
    import ray

    cpus = ray.available_resources()["CPU"]
    monkeypatch.setattr(owners, "BEAT_S", 0.2)
    monkeypatch.setattr(owners, "LOST_S", 0.0)
    run_config = config(f"storage={tmp_path}", "name=taken", "train.total_steps=100000000", "tracking.progress=false")
    owner, ended = threading.Event(), threading.Event()

    def take() -> None:
        while "kept" not in resume_line(run_config) and not ended.wait(0.1):
            pass
        with Lease(LocalFileSystem(), str(tmp_path / "taken"), "run 'taken'") as lease:
            owner.set()
            ended.wait(60)
            assert lease.number == 2 and not lease.lost.is_set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        with pytest.raises(LeaseLostError, match=f"run 'taken' is now owned by process {os.getpid()} of "):
            train(run_config)
    finally:
        ended.set()
        thread.join(60)
    assert owner.is_set()
    record = json.loads((tmp_path / "taken" / "run.json").read_text())
    client = MlflowRun(run_config, record["mlflow_run_id"]).client
    assert client.get_run(record["mlflow_run_id"]).info.status == "RUNNING"  # it is the other owner's
    assert client.search_registered_models() == []
    until(
        lambda: ray.available_resources().get("CPU") == cpus, "the CPUs of its workers", details=ray.available_resources
    )


def alive(ray_cluster: LocalRay) -> list[Any]:
    from ray.util.state import list_actors

    return list_actors(ray_cluster.dashboard_url, filters=[("state", "=", "ALIVE")], detail=True)
