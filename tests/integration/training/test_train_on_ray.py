"""Training runs on a real Ray: tracking, registry, resume, death of a worker, and refusals by name."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
from processes.two_workers import two_workers
from pyarrow.fs import LocalFileSystem
from toys.runs import config, mlflow_database, trained

from marl_ray.cluster.local_ray import LocalRay
from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.actor_critic import load_bundle
from marl_ray.training.checkpoints.index import published, resume_line
from marl_ray.training.checkpoints.storage import folder_here
from marl_ray.training.driver import train
from marl_ray.training.run_checks import check_run
from marl_ray.training.run_folder import owners
from marl_ray.training.run_folder.lease import DisownedError, Lease
from marl_ray.training.run_folder.metrics_file import history_of, iteration_of, read_metrics
from marl_ray.training.run_folder.owners import owner_file
from marl_ray.training.run_folder.record import storage_of
from marl_ray.training.run_result import RunResult, read_finished_result
from marl_ray.training.tracking.mlflow_run import MlflowRun

TWO = "resources.workers=2"
FEW = "evaluation.episodes=2"
"""Copies of an evaluation take fewer steps than those of training, so that these die."""


def fragile(marker: Path) -> str:
    """An environment that kills its worker once, in the second iteration."""
    return f'env={{"id": "toys.envs:fragile", "kwargs": {{"marker": "{marker}", "at": 35}}}}'


def run(storage: Path, *overrides: str) -> tuple[RunConfig, RunResult]:
    run_config = config(
        TWO, FEW, fragile(storage / "died"), f"storage={storage}", "tracking.progress=false", *overrides
    )
    check_run(run_config)
    return run_config, train(run_config)


def returns(run_config: RunConfig, outcome: RunResult) -> list[tuple[int, float]]:
    return MlflowRun(run_config, outcome.run_id).history("return")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def died(ray_cluster: LocalRay, storage: Path) -> tuple[RunConfig, RunResult]:
    """A run of which a worker dies."""
    kept = run(storage)
    assert (storage / "died").exists()
    return kept


def test_a_run_whose_worker_dies_equals_one_that_never_died(died: tuple[RunConfig, RunResult], tmp_path: Path):
    (tmp_path / "died").touch()
    calm = two_workers(trained, str(tmp_path / "calm"), TWO, FEW, fragile(tmp_path / "died"))
    run_config, outcome = died
    for key in ("return", "eval/return"):
        expected = [(row["steps"], row[key]) for row in calm if key in row]
        assert MlflowRun(run_config, outcome.run_id).history(key) == expected and expected, key
    assert len(mlflow.MlflowClient(tracking_uri=outcome.tracking_uri).search_runs(["1"])) == 1
    folder = storage_of(run_config) + "/toy"
    rows = read_metrics(LocalFileSystem(), folder)
    assert [iteration_of(row) for row in rows] == list(range(7))
    assert history_of(rows, "return") == MlflowRun(run_config, outcome.run_id).history("return")
    lines = Path(folder, "run.log").read_text()
    for part in (
        "2 workers on CPU",
        "evaluating before training",
        "reading the checkpoint",
        "finished",
    ):
        assert part in lines
    assert outcome.bundle == f"{folder}/bundle"
    best = load_bundle(outcome.bundle).manifest
    (same,) = (str(row["iteration"]) for row in calm if row["steps"] == best.lineage.steps)
    assert load_bundle(tmp_path / "calm" / same / "bundle").manifest.policies == best.policies


def test_a_run_is_tracked_registered_and_resumed(died: tuple[RunConfig, RunResult], storage: Path):
    run_config, outcome = died
    client = mlflow.MlflowClient(tracking_uri=outcome.tracking_uri)
    record = client.get_run(outcome.run_id)
    assert record.info.status == "FINISHED"
    assert record.data.params["team.shared.hyper.lr"] == "0.01"
    assert {"return", "policy_loss", "entropy", "kl", "steps_per_second", "time/rollout"} <= set(record.data.metrics)
    assert [step for step, _ in returns(run_config, outcome)] == [32, 64, 96, 128, 160, 192]
    assert outcome.model == "models:/toy/1"
    served = load_bundle(outcome.model, outcome.tracking_uri)
    assert served.digest == load_bundle(outcome.bundle).digest
    assert served.manifest.lineage.run == "toy"
    assert outcome.curve is not None
    assert outcome.curve.read_bytes().startswith(b"\x89PNG")
    scored = MlflowRun(run_config, outcome.run_id)
    assert scored.history("eval/return")[0][0] == 0  # the baseline
    # What is told of the bundle is of other episodes than it was chosen by, and lies with it.
    assert outcome.best_return == served.manifest.lineage.metrics["best/return"]
    assert [line.split()[0] for line in outcome.summary] == ["best", "last"]

    assert record.data.tags["algorithm"] == "mappo" and record.data.tags["environment"] == "toys.envs:fragile"
    assert record.data.metrics["best_score"] == outcome.best_return
    assert load_bundle("models:/toy@best", outcome.tracking_uri).digest == served.digest

    # What is finished is not run again, and says what it has; both need no Ray.
    assert train(run_config) == read_finished_result(run_config) == replace(outcome, trained=False)
    with pytest.raises(MarlRayError, match=r"name: run 'toy' exists .* with another team.shared.hyper.lr; "):
        check_run(config(TWO, FEW, fragile(storage / "died"), f"storage={storage}", "hyper.lr=0.5"))

    # The same name goes on where it ended, or from the checkpoint before where its last one is damaged; another config under
    # that name is refused before anything runs.
    before, last = published(folder_here(storage / "toy"))[-2:]
    (storage / "toy" / last.name / "envs-1.json").unlink()
    longer, second = run(storage, "train.total_steps=256")
    log = (storage / "toy" / "run.log").read_text()
    assert f"{last.place}/envs-1.json is missing; the run goes on from {before.place}" in log
    assert second.run_id == outcome.run_id
    assert [step for step, _ in returns(longer, second)] == [32, 64, 96, 128, 160, 192, 224, 256]
    assert [iteration_of(row) for row in read_metrics(LocalFileSystem(), str(storage / "toy"))] == list(range(9))
    assert load_bundle(second.bundle).digest == load_bundle(second.model, second.tracking_uri).digest


@pytest.mark.slow
def test_a_copied_run_goes_on_where_it_lies_now(died: tuple[RunConfig, RunResult], storage: Path, tmp_path: Path):
    _, outcome = died
    shutil.copytree(storage / "toy", tmp_path / "toy", symlinks=True)
    before = {path: path.stat().st_mtime_ns for path in (storage / "toy").rglob("*")}
    options = (TWO, FEW, fragile(storage / "died"), f"storage={tmp_path}", "tracking.progress=false")
    steps = json.loads((tmp_path / "toy" / "run.json").read_text())["finished"]["total_steps"]
    same = read_finished_result(config(*options, f"train.total_steps={steps}"))
    assert same is not None and same.curve == tmp_path / "toy" / "return.png" and same.curve.exists()
    assert same.bundle == f"{tmp_path}/toy/bundle" and load_bundle(same.bundle).manifest.lineage.run == "toy"
    longer = config(*options, f"train.total_steps={steps + 32}")
    check_run(longer)
    result = train(longer)
    assert result.metrics["steps"] == steps + 32 and result.run_id != outcome.run_id
    rows = read_metrics(LocalFileSystem(), str(tmp_path / "toy"))
    assert [iteration_of(row) for row in rows] == list(range(steps // 32 + 2))
    assert load_bundle(result.bundle).digest == load_bundle(result.model, result.tracking_uri).digest
    assert before == {path: path.stat().st_mtime_ns for path in (storage / "toy").rglob("*")}


def test_a_run_that_keeps_failing_says_why(ray_cluster: LocalRay, tmp_path: Path):
    run_config = config(
        f"storage={tmp_path}",
        "resources.max_failures=0",
        "tracking.progress=false",
        f'env={{"id": "toys.envs:fragile", "kwargs": {{"marker": "{tmp_path / "no" / "folder"}", "at": 5}}}}',
    )
    with pytest.raises(MarlRayError, match=r"run 'toy' failed: worker 0: FileNotFoundError: .*No such file") as caught:
        train(run_config)
    assert "\n" not in str(caught.value)
    trace = tmp_path / "toy" / "errors" / "worker-0.txt"
    assert str(caught.value).endswith(f"; its traceback is in {trace}")
    assert "Traceback" in trace.read_text() and "toys/envs.py" in trace.read_text()
    log = (tmp_path / "toy" / "run.log").read_text()
    assert "worker 0: Traceback" in log and "toys/envs.py" in log and f"failed: {caught.value}" in log
    record = json.loads((tmp_path / "toy" / "run.json").read_text())
    assert (
        MlflowRun(run_config, record["mlflow_run_id"]).client.get_run(record["mlflow_run_id"]).info.status == "FAILED"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["resources.workers=4", "resources.cpus_per_worker=2"],
            "resources.workers=4 .*needs 8 CPUs, .*never have more than 4",
        ),
        (["resources.device=cuda"], "resources.workers=1 on cuda needs 1 GPUs"),
        (["storage=/proc/nothing"], "storage: '/proc/nothing' cannot be written"),
        (["storage=s3://bucket/x"], "tracking.uri: expected a tracking URI|storage: .*cannot be written"),
        (["tracking.uri=http://127.0.0.1:9"], "tracking.uri: 'http://127.0.0.1:9' cannot be used"),
        (['team={"x": {"agents": ["z*"]}}'], "team: no policy plays agent 'a'"),
        (['team={"x": {"bundle": "/no/such"}}'], "bundle '/no/such' has no readable bundle.json"),
    ],
)
def test_what_cannot_work_is_refused_by_name(ray_cluster: LocalRay, tmp_path: Path, monkeypatch, overrides, message):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    run_config = config(f"storage={tmp_path}", *overrides)
    with pytest.raises(MarlRayError, match=message) as caught:  # noqa: PT012  either may refuse
        check_run(run_config)
        train(run_config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "toy").exists()


def test_a_run_whose_numbers_stop_being_finite_ends_at_once_and_keeps_its_checkpoint(
    ray_cluster: LocalRay, tmp_path: Path
):
    poison = 'env={"id": "toys.envs:poisoned", "kwargs": {"after": 7}}'
    more = ["train.total_steps=100000", "evaluation.every=0"]
    run_config = config(f"storage={tmp_path}", "tracking.progress=false", poison, *more)
    with pytest.raises(
        MarlRayError, match=r"run 'toy' stopped at policy 'shared', .*rewards of the batch are not"
    ) as caught:
        train(run_config)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "toy").glob("checkpoint_*/state.json"))


def test_ctrl_c_says_what_is_kept_and_its_actors_have_the_name_of_the_run(
    ray_cluster: LocalRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    run_config = config(f"storage={tmp_path}", "name=broken-off", "train.total_steps=100000000", "checkpoint.every=1")
    (tmp_path / "run.yaml").write_text(json.dumps(run_config.given()))
    command = [sys.executable, "-c", "from marl_ray.cli import main; main()", "train", str(tmp_path / "run.yaml")]
    mlflow_database(tmp_path)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        deadline = time.monotonic() + 120
        while "kept" not in resume_line(run_config):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        actors = alive(ray_cluster)
        assert "broken-off worker" in {actor.class_name for actor in actors}
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(30)
    assert process.returncode == 130, said
    assert "broken-off: interrupted; kept iteration " in said
    phases = (
        "checking the run",
        "connecting to 127.0.0.1",
        "1 worker on CPU",
        "making the policies",
        "training from step 0",
    )
    assert all(re.search(rf"broken-off: \d+\.\d s  {phase}", said) for phase in phases), said
    assert "Traceback" not in said
    record = json.loads((tmp_path / "broken-off" / "run.json").read_text())
    run_id = record["mlflow_run_id"]
    assert MlflowRun(run_config, run_id).client.get_run(run_id).info.status == "KILLED"
    deadline = time.monotonic() + 60
    while any(actor.class_name == "broken-off worker" for actor in alive(ray_cluster)):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.2)


@pytest.mark.slow
def test_a_run_says_what_it_waits_for_and_a_stopped_worker_is_replaced(
    ray_cluster: LocalRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setenv("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "13")
    monkeypatch.setattr(owners, "BEAT_S", 0.2)
    more = ["train.total_steps=100000000", "checkpoint.every=1", "tracking.progress=false", "evaluation.every=0"]
    run_config = config(f"storage={tmp_path}", "name=stopped", TWO, *more)
    held = placement_group([{"CPU": 3}])
    ray.get(held.ready(), timeout=60)
    log = tmp_path / "stopped" / "run.log"

    def until(text: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not (log.exists() and text in log.read_text()):
            assert time.monotonic() < deadline, text
            time.sleep(0.1)

    problems: list[str] = []

    def disturb() -> None:
        try:
            until("; the cluster has 1 CPU free on 1 node")
            remove_placement_group(held)
            until("its workers are there, after")
            while "kept iteration" not in resume_line(run_config):
                time.sleep(0.1)
            stopped = next(actor.pid for actor in alive(ray_cluster) if actor.class_name == "stopped worker")
            os.kill(stopped, signal.SIGSTOP)
            until(" has not answered for 1")
            until("its workers start again from the checkpoint of iteration ")
        except AssertionError as error:
            problems.append(str(error))
        finally:
            Path(owner_file(str(tmp_path / "stopped"), 2)).write_text("{}")  # another owner: so the run ends

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    with pytest.raises(DisownedError):
        train(run_config)
    thread.join(60)
    assert problems == []
    lines = log.read_text()
    assert re.search(
        r"waiting for 2 workers of 1 CPU each, since [\d:]+ and at most until [\d :-]+; the cluster has", lines
    )
    silent = r"worker \d on node [\d.]+ has not answered for 1\d s; it counts as lost at [\d:]+, and all start again"
    assert re.search(silent, lines)
    assert re.search(r"start again from the checkpoint of iteration \d+: worker \d: .*has been hanging for 1\d", lines)


@pytest.mark.slow
def test_a_worker_that_the_others_wait_for_in_vain_ends_in_a_named_error_and_a_restart(
    ray_cluster: LocalRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
def test_a_run_whose_disk_is_full_ends_at_once_in_one_line(ray_cluster: LocalRay, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], timeout=30).returncode:
        pytest.skip("this user cannot mount a small disk")
    more = ["train.total_steps=100000000", "checkpoint.every=1", "tracking.progress=false", "evaluation.every=0"]
    run_config = config(f"storage={disk}", "name=full", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", *more)

    def fill() -> None:
        while "kept iteration" not in resume_line(run_config):
            time.sleep(0.1)
        with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        with pytest.raises(MarlRayError, match=r"run 'full' failed: .*No space left on device") as caught:
            train(run_config)
        assert "\n" not in str(caught.value) and str(disk) in str(caught.value)
    finally:
        thread.join(60)
        subprocess.run(["umount", "-l", disk], check=True, timeout=30)


def test_a_name_has_one_owner(ray_cluster: LocalRay, tmp_path: Path):
    run_config, folder = config(f"storage={tmp_path}"), str(tmp_path / "toy")
    with Lease(LocalFileSystem(), folder, "run 'toy'"):
        with pytest.raises(
            MarlRayError, match=rf"name: run 'toy' is owned by process {os.getpid()} of .* beat is \d s old"
        ):
            train(run_config)
        assert os.listdir(folder) == ["owner"] and not (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
def test_a_run_whose_name_was_taken_stops_at_the_next_beat(
    ray_cluster: LocalRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
        with pytest.raises(DisownedError, match=f"run 'taken' is now owned by process {os.getpid()} of "):
            train(run_config)
    finally:
        ended.set()
        thread.join(30)
    assert owner.is_set()
    record = json.loads((tmp_path / "taken" / "run.json").read_text())
    client = MlflowRun(run_config, record["mlflow_run_id"]).client
    assert client.get_run(record["mlflow_run_id"]).info.status == "RUNNING"  # it is the other owner's
    assert client.search_registered_models() == []


def alive(ray_cluster: LocalRay) -> list[Any]:
    from ray.util.state import list_actors

    return list_actors(ray_cluster.dashboard_url, filters=[("state", "=", "ALIVE")], detail=True)
