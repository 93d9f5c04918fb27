"""A bundle of language models in MLflow's model registry."""

import gc
from pathlib import Path

import mlflow
import pytest
from toy_models.tokens import tiny

from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.actor_critic import Lineage, load_actor_critics, load_bundle
from marl_ray.policies.bundles.language import save_token_bundle
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
