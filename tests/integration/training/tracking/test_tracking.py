"""MLflow: where it is, what runs and versions say of themselves, and the aliases of the registry."""

import json
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import mlflow
import pytest
from toy_runs.runs import config
from toy_runs.sweeps import ToySweep
from toy_serving.gateways import LINEAGE, make_bundle

from marl_ray.config import RunConfig, resolve_tracking_uri
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.bundles.manifest import pin_reference
from marl_ray.training.run_folder.record import pin_bundles
from marl_ray.training.tracking import mlflow_run
from marl_ray.training.tracking.mlflow_run import PARENT_TAG, MlflowRun, uri_of
from marl_ray.tuning.reporting.mlflow_runs import OUTBOX_FILE, SweepMlflowRuns


def test_everything_has_one_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    default = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert resolve_tracking_uri() == uri_of(config()) == default
    assert uri_of(config(f"storage={tmp_path}/other")) == f"sqlite:///{tmp_path}/other/mlflow.db"
    with pytest.raises(MarlRayError, match=r"^tracking.uri: expected a tracking URI here or in MLFLOW_TRACKING_URI"):
        uri_of(config("storage=s3://bucket/runs"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert (
        resolve_tracking_uri() == uri_of(config()) == uri_of(config("storage=s3://bucket/runs")) == "http://mlflow:5000"
    )
    assert uri_of(config("tracking.uri=http://own:5000")) == "http://own:5000"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[str]]:
    """Three versions with scores 0.5, 0.9 and 0.7, in the default place of the folder."""
    folder = tmp_path_factory.mktemp("registry")
    run_config = config(f"storage={folder}/runs", "tracking.experiment=mine")
    tracker = MlflowRun(run_config)
    bundles = [Path(make_bundle(folder, action)) for action in (1, 2, 3)]
    scores = (0.5, 0.9, 0.7)
    return run_config, [
        tracker.register(bundle, load_bundle(bundle).digest, score)
        for bundle, score in zip(bundles, scores, strict=True)
    ]


def test_a_run_says_what_it_is_and_what_its_best_weights_earn(registry):
    run_config, _ = registry
    client = mlflow.MlflowClient(uri_of(run_config), registry_uri=uri_of(run_config))
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert run.data.tags["algorithm"] == "mappo"
    assert run.data.tags["environment"] == "toys.envs:countdown"
    assert len(run.data.tags["config_hash"]) == 64
    assert run.data.tags.get("mlflow.source.git.commit", "") == commit
    assert run.data.metrics["best_score"] == 0.7
    versions = {
        str(version.version): version.tags["best_score"] for version in client.search_model_versions("name = 'toy'")
    }
    assert versions == {"1": "0.5", "2": "0.9", "3": "0.7"}


def test_a_sweeps_version_has_the_score_of_its_own_bundle(tmp_path):
    lineage = LINEAGE.model_copy(update={"metrics": {"return": 9.0, "best/return": 2.0, "best/episode_cost_0": 45.0}})
    sweep = ToySweep(tmp_path, seeds=1, set={"constraints": [{"budget": 30}]})
    record = sweep.add({"algorithm": "ppo_lagrangian", "hyper.lr": 0.001}, objectives=[123.0])
    tracker = SweepMlflowRuns(sweep.config, sweep.records)
    assert tracker.register(record, Path(make_bundle(tmp_path / "bundles", 1, lineage=lineage))) == "models:/toy/1"
    client = mlflow.MlflowClient(tracker.parent.uri, registry_uri=tracker.parent.uri)
    assert client.get_model_version("toy", "1").tags["best_score"] == repr(
        2.0 - 0.5e6
    )  # half a budget above its budget


def test_damaged_lines_of_a_sweep_s_outbox_cost_no_others(tmp_path):
    sweep = ToySweep(tmp_path, seeds=1)
    record = sweep.add({"algorithm": "ippo", "hyper.lr": 0.001}, objectives=[1.0])
    rows = [{"iteration": k, "steps": 32 * k, "exploits": 0, "return": k / 2} for k in range(1, 7)]
    tracker = SweepMlflowRuns(sweep.config, sweep.records)
    tracker.log(record, rows[:3])
    tracker.close("interrupted")
    outbox = tmp_path / sweep.config.name / OUTBOX_FILE
    rubbish = (
        '{"trixl": 0, "row": {"iteration": 9, "steps": 1}}',
        '{"trial": 7, "row": {"iteration": 9, "steps": 1}}',
        '{"trial": 0, "row": {"iteration": 9, "stgps": 1}}',
        '{"trial": 0, "row": 3}',
        '{"trial": 0, "fnd": "FINISHED", "tags": {}}',
        '{"trial": 0, "end": "FIN", "tags": {}}',
    )
    outbox.write_text(outbox.read_text() + "".join(f"{line}\n" for line in rubbish))
    tracker = SweepMlflowRuns(sweep.config, sweep.records)
    tracker.log(record, rows)
    tracker.end(record)
    tracker.close("finished")
    history = tracker.parent.client.get_metric_history(record.mlflow_run_id, "iteration")
    assert [point.value for point in history] == [1, 2, 3, 4, 5, 6]
    runs = [tracker.parent.client.get_run(each) for each in (record.mlflow_run_id, tracker.parent.run_id)]
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]


def test_a_sweep_takes_over_its_own_run_whose_id_was_not_noted(tmp_path, monkeypatch):
    def begun(storage: Path) -> SweepMlflowRuns:
        """The tracker of a sweep whose folder knows no run yet."""
        sweep = ToySweep(storage)
        tracker = SweepMlflowRuns(sweep.config, sweep.records)
        tracker.leave()
        return tracker

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with monkeypatch.context() as patch:
        patch.setattr(
            mlflow_run, "dotted_keys", lambda data: 1 / 0
        )  # the process ends between the run and its parameters
        with pytest.raises(MarlRayError):
            begun(tmp_path)
    first, again = begun(tmp_path).parent, begun(tmp_path).parent
    (run,) = first.client.search_runs(["1"])
    assert [run.info.run_id] == [first.run_id] == [again.run_id] and run.data.params["name"] == "toy"
    assert run.data.tags["marl_ray.kind"] == "sweep"
    assert begun(tmp_path / "other").parent.run_id != first.run_id  # another sweep of the same name
    MlflowRun(first.config, None, {PARENT_TAG: first.run_id, "trial": "0000"})
    assert begun(tmp_path).parent.run_id != first.run_id  # its trials are not this sweep's


def test_aliases_are_taken_wherever_versions_are(registry, monkeypatch):
    run_config, models = registry
    assert models == ["models:/toy/1", "models:/toy/2", "models:/toy/3"]
    monkeypatch.chdir(Path(run_config.storage).parent)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    digests = [load_bundle(model).digest for model in models]  # by the default tracking URI
    assert load_bundle("models:/toy@best").digest == digests[1]
    assert load_bundle("models:/toy@latest").digest == digests[2]
    assert pin_reference("models:/toy@best", None) == "models:/toy/2"
    assert [pin_reference(same, None) for same in ("models:/toy/3", "a/folder@best")] == [
        "models:/toy/3",
        "a/folder@best",
    ]
    foe = "{me: {agents: [a]}, foe: {agents: [b], bundle: 'models:/toy@best', frozen: true}}"
    rival = config(f"storage={run_config.storage}", f"team={foe}")
    record: dict[str, Any] = {}
    assert pin_bundles(rival, record)["team"]["foe"]["bundle"] == "models:/toy/2"
    alone = RunConfig.model_validate({"name": "alone", "env": {"id": "toys.envs:countdown"}})
    assert pin_bundles(alone, {}) == alone.as_given()  # no team was given
    client = mlflow.MlflowClient(uri_of(run_config), registry_uri=uri_of(run_config))
    client.set_registered_model_alias("toy", "best", "3")
    try:  # a run that is continued plays against whom it began with
        assert pin_bundles(rival, json.loads(json.dumps(record)))["team"]["foe"]["bundle"] == "models:/toy/2"
    finally:
        client.set_registered_model_alias("toy", "best", "2")
    for wrong in ("models:/toy@none", "models:/none@best"):
        with pytest.raises(MarlRayError, match=f"bundle '{wrong}' is not in the model registry: "):
            load_bundle(wrong)
    for wrong in ("models:/toy/9", "models:/toy@none"):
        with pytest.raises(MarlRayError, match=r"not found.*; its versions are 1, 2, 3$"):
            load_bundle(wrong)
    for wrong in ("models:/toy", "models:/@best"):
        with pytest.raises(MarlRayError, match=r"expected models:/name/version or models:/name@alias"):
            load_bundle(wrong)


def test_a_missing_version_is_answered_with_the_others_in_a_registry_of_several_pages(registry):
    run_config, _ = registry
    uri = uri_of(run_config)
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        database.executemany(
            "INSERT INTO registered_models (name, creation_time) VALUES (?, 0)", [(f"a{k}",) for k in range(150)]
        )
    try:
        with pytest.raises(MarlRayError, match=r"; its versions are 1, 2, 3$"):
            load_bundle("models:/toy/9", uri)
        with pytest.raises(MarlRayError, match=r"; did you mean toy"):
            load_bundle("models:/tyo/9", uri)
    finally:
        with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
            database.execute("DELETE FROM registered_models WHERE name LIKE 'a%'")


def test_an_experiment_keeps_the_version_that_an_alias_named(registry):
    from marl_ray.config import ExperimentConfig
    from marl_ray.serving.arm_loading.loaded_bundles import pin_aliases

    run_config, _ = registry
    arms = {"control": {"bundle": "models:/toy/1"}, "best": {"bundle": "models:/toy@best"}}
    fixed = pin_aliases(ExperimentConfig.model_validate({"name": "x", "arms": arms}), uri_of(run_config))
    assert [arm.bundle for arm in fixed.arms.values()] == ["models:/toy/1", "models:/toy/2"]
    assert json.loads(fixed.model_dump_json())["arms"]["best"]["bundle"] == "models:/toy/2"
    arms["best"]["bundle"] = "models:/toy@worst"
    with pytest.raises(MarlRayError, match=r"^experiments.x.arms.best: bundle 'models:/toy@worst' is not in"):
        pin_aliases(ExperimentConfig.model_validate({"name": "x", "arms": arms}), uri_of(run_config))
