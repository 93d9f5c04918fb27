"""The model below an adapter: its digest, its weights, and one copy of them for several adapters."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from marl_ray.config.run.model import LoraConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.language.lora import adapted_layers, add_adapters, bare_name, bare_weights

BASE_SHA256 = "base_sha256"
"""File with the digest, beside an adapter's. peft does not read it."""
_KEYS_WITHOUT_EFFECT = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
} | {f"{kind}_token_id" for kind in ("bos", "eos", "pad")}
MAX_ULPS = 16
"""Two recoveries of one base model differ by fewer units in the last place of a tensor's greatest weight."""


def base_sha256(lm: PreTrainedModel, weights: Iterable[tuple[str, Tensor]] | None = None) -> str:
    """Return the sha256 (hex) of the weights without adapters and of the config's keys that a forward pass reads.

    `weights` are given, sorted by their names, where the model does not have them.
    """
    config = {name: value for name, value in lm.config.to_diff_dict().items() if name not in _KEYS_WITHOUT_EFFECT}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(bare_weights(lm).items()) if weights is None else weights:
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def known_base(folder: Path) -> str | None:
    """Return the digest of the base model of an adapter's folder.

    Returns None if there is no adapter, or one that does not tell.
    """
    path = folder / BASE_SHA256
    return path.read_text() if path.is_file() else None


@torch.no_grad()
def unmerge_adapter(lm: PreTrainedModel, folder: Path) -> LoraConfig:
    """Take an adapter out of the weights that it is merged into, put it beside them, and return what it is made as.

    The sum stays what it was; the base model's weights are right to one rounding in the type in which both were written.
    Raises MarlRayError if the adapter does not fit the model.
    """
    written = json.loads((folder / "adapter_config.json").read_text())
    config = LoraConfig(rank=written["r"], alpha=written["lora_alpha"], targets=tuple(written["target_modules"]))
    add_adapters(lm, config)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
        for name, layer in adapted_layers(lm):
            for part, matrix in (("A", layer.down), ("B", layer.up)):
                key = f"base_model.model.{name}.lora_{part}.weight"
                if key not in names:
                    raise MarlRayError(f"{key} is missing")
                value = file.get_tensor(key)
                if value.shape != matrix.shape:
                    raise MarlRayError(f"{key} is {list(value.shape)}, expected {list(matrix.shape)}")
                matrix.copy_(value)
            delta = layer.scale * layer.up.float() @ layer.down.float()
            layer.matrix.copy_((layer.matrix.float() - delta).to(value.dtype))
    return config


def share_base(lm: nn.Module, other: nn.Module) -> None:
    """Let a model with an adapter have the base model's weights of another one, so that they are in memory once.

    Raises MarlRayError if these are not the same weights.
    """
    weights, other_weights = bare_weights(lm), bare_weights(other)
    if weights.keys() != other_weights.keys():
        raise MarlRayError(f"{min(weights.keys() ^ other_weights.keys())} is in one of them only")
    for name, tensor in weights.items():
        _check_same(name, tensor, other_weights[name])
    targets: dict[str, Any] = {bare_name(name): value for name, value in lm.named_parameters()}
    for name, tensor in other_weights.items():
        if name in targets:  # a tied weight has one name among the parameters
            targets[name].data = tensor


def _check_same(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.shape != other.shape:
        raise MarlRayError(f"{name} is {list(tensor.shape)}, expected {list(other.shape)}")
    difference = float((tensor.float() - other.float()).abs().amax())
    # Weights that were written in bfloat16 may be in another type here.
    is_bfloat16 = torch.equal(other.bfloat16().float(), other.float())
    bound = MAX_ULPS * torch.finfo(torch.bfloat16 if is_bfloat16 else torch.float32).eps * float(other.abs().amax())
    if difference > bound:
        raise MarlRayError(f"{name} differs by {difference:.2g}, expected at most {bound:.2g}")
