"""Bundles of language models. Each policy has a folder in Hugging Face format, which transformers reads as it is.

Weights are safetensors, with adapters merged. A policy that was trained with adapters also has a folder of these, in
peft's format, beside its weights. Critics live in checkpoints.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from marl_ray.config.run.model import ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.manifest import (
    BaseBundle,
    Lineage,
    TokenManifest,
    TokenPolicyManifest,
    file_hash,
    publish,
)
from marl_ray.policies.language.base_model import BASE_SHA256, base_sha256, known_base, unmerge_adapter
from marl_ray.policies.language.lora import save_adapters
from marl_ray.policies.language.model_files import load_model
from marl_ray.policies.language.sampling_copy import WeightSnapshot, sampling_dtype
from marl_ray.policies.language.sharding.hugging_face import write_model
from marl_ray.policies.language.sharding.stored_weights import StoredWeights, open_weights
from marl_ray.policies.language.token_policy import TokenPolicy, save_merged
from marl_ray.policies.prompting.tokenizers import load_tokenizer

ADAPTER_FOLDER = "adapter"
"""Folder of the adapter within a policy's. transformers would take an adapter beside `config.json` for part of the model."""


class Models(Mapping[str, TokenPolicy]):
    """The policies of a bundle by name; each is read at its first use."""

    def __init__(self, folder: Path, manifest: TokenManifest):
        self._folder, self._manifest = folder, manifest
        self._merged: dict[str, TokenPolicy] = {}
        self._unmerged: dict[str, TokenPolicy] = {}

    def __getitem__(self, name: str) -> TokenPolicy:
        if name not in self._merged:
            self._merged[name] = self._load(name, unmerged=False)
        return self._merged[name]

    def load_unmerged(self, name: str) -> TokenPolicy:
        """Return a policy with its adapter beside the weights, where the adapter tells its base model.

        Any other policy is returned as it is. Raises MarlRayError for an adapter of a model of another shape.
        """
        if known_base(self._folder / name / ADAPTER_FOLDER) is None:
            return self[name]
        if name not in self._unmerged:
            self._unmerged[name] = self._load(name, unmerged=True)
        return self._unmerged[name]

    def open_weights(self, name: str) -> StoredWeights:
        """Return the files of a policy's weights, opened and unread; an adapter is merged in them."""
        return open_weights(sorted(str(path) for path in (self._folder / name).glob("*.safetensors")))

    def _load(self, name: str, unmerged: bool) -> TokenPolicy:
        part, folder = self._manifest.policies[name], self._folder / name
        config = ModelConfig(path=str(folder), context=part.context, chat=part.chat)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(str(folder), sampling_dtype(config, device), part.context)
        if unmerged:
            try:
                lora = unmerge_adapter(model.to(device), folder / ADAPTER_FOLDER)
            except MarlRayError as error:
                raise MarlRayError(f"{str(folder)!r}: its adapter is of another base model: {error}") from error
            config = config.model_copy(update={"lora": lora})
        policy = TokenPolicy(model, load_tokenizer(str(folder)), config, part.generation)
        policy.base_sha256 = known_base(folder / ADAPTER_FOLDER) if unmerged else None
        return policy.requires_grad_(False).to(device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.policies)

    def __len__(self) -> int:
        return len(self._manifest.policies)


@dataclass(frozen=True)
class TokenBundle(BaseBundle):
    """A team of language models read from a bundle, ready to sample on the GPU if there is one."""

    manifest: TokenManifest
    policies: Models


class StreamedPolicy(NamedTuple):
    """A policy whose weights come one by one."""

    snapshot: WeightSnapshot
    weights: Iterator[tuple[str, Tensor]]
    """The result of `WeightSnapshot.read_merged`."""


def save_token_bundle(
    folder: str | Path,
    agents: Mapping[str, str],
    policies: Mapping[str, TokenPolicy | StreamedPolicy],
    lineage: Lineage,
) -> Path:
    """Write a bundle as `folder/DIGEST[:DIGEST_DIGITS]` and return that path.

    The folder is complete or absent, never half-written. `policies` are sampling copies (`plain_copy`), or, of empty
    copies, what brings their weights.
    """

    def write(work: Path) -> TokenManifest:
        parts = {name: _write_policy(work / name, policy) for name, policy in policies.items()}
        return TokenManifest(agents=dict(agents), policies=parts, lineage=lineage)

    return publish(folder, write)


def _write_policy(folder: Path, policy: TokenPolicy | StreamedPolicy) -> TokenPolicyManifest:
    snapshot = policy.snapshot if isinstance(policy, StreamedPolicy) else None
    token_policy = policy.snapshot.policy if isinstance(policy, StreamedPolicy) else policy
    bars_were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # else a progress bar for each file would stand among the lines of a run
    try:
        if isinstance(policy, StreamedPolicy):
            write_model(folder, token_policy.lm, policy.snapshot.shapes, policy.weights)
        else:
            save_merged(token_policy, folder)
    finally:
        if bars_were_shown:
            logging.enable_progress_bar()
    token_policy.tokenizer.save_pretrained(folder)
    if token_policy.config.lora is not None:
        save_adapters(token_policy.lm, token_policy.config.lora, token_policy.base, folder / ADAPTER_FOLDER)
        (folder / ADAPTER_FOLDER / BASE_SHA256).write_text(
            base_sha256(token_policy.lm, None if snapshot is None else snapshot.read_base())
        )
    return TokenPolicyManifest(
        generation=token_policy.generation,
        context=token_policy.config.context,
        chat=token_policy.config.chat,
        files={str(path.relative_to(folder)): file_hash(path) for path in sorted(folder.rglob("*")) if path.is_file()},
    )
