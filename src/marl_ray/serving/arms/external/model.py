"""An external model, named by URL and model name; it stands where other arms have a bundle."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from marl_ray.policies.bundles.manifest import BaseBundle, Lineage, TokenManifest

DEFAULT_AGENTS = {"assistant": "model"}
"""Agents of an experiment that has only external models."""


class ExternalManifest(TokenManifest):
    """The manifest of an external model.

    Its digest covers only URL and name, so the model behind them may change unnoticed.
    """

    @property
    def weights_sha256(self) -> str:
        """The digest of URL and name, because the weights behind them are not known."""
        return self.digest


@dataclass(frozen=True)
class ExternalModel(BaseBundle):
    """An external model in place of a bundle. It plays the same agents as the other arms."""

    manifest: ExternalManifest
    model: str


def external_model(url: str, model: str, agents: Mapping[str, str] | None) -> ExternalModel:
    """Return the model at a URL; without `agents` it plays one agent of its own."""
    digest = hashlib.sha256(json.dumps([url, model]).encode()).hexdigest()
    lineage = Lineage(
        run=url, algorithm={}, config_hash="", code_version="", seed=0, env={"model": model}, steps=0, metrics={}
    )
    manifest = ExternalManifest(agents=dict(agents or DEFAULT_AGENTS), policies={}, lineage=lineage, digest=digest)
    return ExternalModel(manifest, model)
