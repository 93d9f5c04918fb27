"""Training runs on a real Ray: tracking, registry, resume, death of a worker, and refusals by name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
from processes.two_workers import two_workers
from pyarrow.fs import LocalFileSystem
from toy_runs.runs import config, train_rows

from marl_ray.cluster.local_ray import LocalRay
from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.training.checkpoints.index import published_checkpoints
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.driver import train
from marl_ray.training.run_checks import check_run
from marl_ray.training.run_folder.metrics_file import history_of, iteration_of, read_metrics
from marl_ray.training.run_folder.record import storage_of
from marl_ray.training.run_result import RunResult, read_finished_result
from marl_ray.training.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.shared_ray("one")

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
    config_and_result = run(storage)
    assert (storage / "died").exists()
    return config_and_result


def test_a_run_whose_worker_dies_equals_one_that_never_died(died, tmp_path):
    (tmp_path / "died").touch()
    calm = two_workers(train_rows, str(tmp_path / "calm"), TWO, FEW, fragile(tmp_path / "died"))
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


def test_a_run_is_tracked_and_registered(died, storage):
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
    with pytest.raises(
        MarlRayError, match=r"name: run 'toy' exists .* with another team.shared.hyper.lr \(0.01, not 0.5\); "
    ):
        check_run(config(TWO, FEW, fragile(storage / "died"), f"storage={storage}", "hyper.lr=0.5"))


@pytest.mark.long
def test_a_longer_run_of_the_same_name_goes_on_from_the_checkpoint_before_a_damaged_one(died, storage):
    _, outcome = died
    before, last = published_checkpoints(local_stored_folder(storage / "toy"))[-2:]
    (storage / "toy" / last.name / "envs-1.json").unlink()
    longer, second = run(storage, "train.total_steps=256")
    log = (storage / "toy" / "run.log").read_text()
    assert f"{last.place}/envs-1.json is missing; the run continues from {before.place}" in log
    assert second.run_id == outcome.run_id
    assert [step for step, _ in returns(longer, second)] == [32, 64, 96, 128, 160, 192, 224, 256]
    assert [iteration_of(row) for row in read_metrics(LocalFileSystem(), str(storage / "toy"))] == list(range(9))
    assert load_bundle(second.bundle).digest == load_bundle(second.model, second.tracking_uri).digest


@pytest.mark.slow
def test_a_copied_run_goes_on_where_it_lies_now(died, storage, tmp_path):
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


@pytest.mark.long
def test_a_run_that_keeps_failing_says_why(ray_cluster, tmp_path):
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
        (["storage=s3://bucket/x"], "tracking.uri: expected a tracking URI|storage: .*cannot be (written|used)"),
        (["tracking.uri=http://127.0.0.1:9"], "tracking.uri: 'http://127.0.0.1:9' cannot be used"),
        (['team={"x": {"agents": ["z*"]}}'], "team: no policy plays agent 'a'"),
        (['team={"x": {"bundle": "/no/such"}}'], "bundle '/no/such' has no readable bundle.json"),
    ],
)
def test_what_cannot_work_is_refused_by_name(ray_cluster, tmp_path, monkeypatch, overrides, message):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    run_config = config(f"storage={tmp_path}", *overrides)
    with pytest.raises(MarlRayError, match=message) as caught:  # noqa: PT012  either may refuse
        check_run(run_config)
        train(run_config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "toy").exists()


@pytest.mark.long
def test_a_run_whose_numbers_stop_being_finite_ends_at_once_and_keeps_its_checkpoint(ray_cluster, tmp_path):
    poison = 'env={"id": "toys.envs:poisoned", "kwargs": {"after": 7}}'
    more = ["train.total_steps=100000", "evaluation.every=0"]
    run_config = config(f"storage={tmp_path}", "tracking.progress=false", poison, *more)
    with pytest.raises(
        MarlRayError, match=r"run 'toy' stopped at policy 'shared', .*rewards of the batch are not"
    ) as caught:
        train(run_config)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "toy").glob("checkpoint_*/state.json"))
