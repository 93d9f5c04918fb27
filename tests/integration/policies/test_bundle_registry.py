"""A bundle of language models in MLflow's model registry."""

import gc
import sqlite3
from pathlib import Path

import mlflow
import pytest
from mlflow.store.model_registry import SEARCH_REGISTERED_MODEL_MAX_RESULTS_DEFAULT
from toy_models.tokens import tiny

from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.language import save_token_bundle
from marl_ray.policies.bundles.loading import load_actor_critics, load_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.policies.bundles.mlflow_client import mlflow_client
from marl_ray.policies.language.sampling_copy import plain_copy

LINEAGE = Lineage(run="r", algorithm={}, config_hash="c", code_version="0", seed=0, env={}, steps=1, metrics={})


def test_a_bundle_is_read_from_the_registry(tmp_path):
    folder = save_token_bundle(tmp_path, {"a": "asker"}, {"asker": plain_copy(tiny(chat=False))}, LINEAGE)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(uri, registry_uri=uri)
    client.create_registered_model("team")
    client.create_model_version("team", folder.as_uri())
    bundle = load_bundle("models:/team/1", uri)
    assert bundle.digest == load_bundle(folder).digest
    policy = bundle.policies["asker"]
    local = Path(policy.config.path)
    assert local.is_dir()
    del bundle, policy
    gc.collect()
    assert not local.exists()
    with pytest.raises(MarlRayError, match="'models:/team/1' holds language models, expected actor-critics"):
        load_actor_critics("models:/team/1", uri)


def test_a_model_beyond_the_first_page_of_a_registry_is_answered_with_its_versions(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow_client(uri)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:  # MLflow's client takes a second for each hundred
        columns = "(name, creation_time, last_updated_time)"
        names = [*(f"model-{number:03d}" for number in range(SEARCH_REGISTERED_MODEL_MAX_RESULTS_DEFAULT)), "zebra"]
        database.executemany(f"INSERT INTO registered_models {columns} VALUES (?, 0, 0)", [(name,) for name in names])
        columns = "(name, version, creation_time, last_updated_time, source, current_stage, status)"
        database.executemany(
            f"INSERT INTO model_versions {columns} VALUES ('zebra', ?, 0, 0, 'nowhere', 'None', 'READY')",
            [(number,) for number in range(1, 12)],
        )
    assert "zebra" not in [model.name for model in client.search_registered_models()]
    for version, answer in (
        ("zebra/99", "its versions are 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 or 1 earlier one"),
        ("zebre/1", r"did you mean zebra\?"),
    ):
        with pytest.raises(MarlRayError, match=f"not found.*; {answer}$"):
            load_bundle(f"models:/{version}", uri)
