"""An external model, known by its URL and name; it stands where other arms have a bundle."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from marl_ray.policies.bundles.manifest import Described, Lineage, TokenManifest

ALONE = {"assistant": "model"}
"""Agents of an experiment that has external models only."""


class ExternalManifest(TokenManifest):
    """The manifest of an external model. Its digest is of URL and name alone: the model behind them may change all the
    same."""

    @property
    def weights_sha256(self) -> str:
        return self.digest


@dataclass(frozen=True)
class ExternalModel(Described):
    """An external model in a bundle's place. It plays the agents that the other arms play."""

    manifest: ExternalManifest
    model: str


def external_model(url: str, model: str, agents: Mapping[str, str] | None) -> ExternalModel:
    """The model of a URL; with no `agents` it has one of its own."""
    digest = hashlib.sha256(json.dumps([url, model]).encode()).hexdigest()
    lineage = Lineage(
        run=url, algorithm={}, config_hash="", code_version="", seed=0, env={"model": model}, steps=0, metrics={}
    )
    manifest = ExternalManifest(agents=dict(agents or ALONE), policies={}, lineage=lineage, digest=digest)
    return ExternalModel(manifest, model)
