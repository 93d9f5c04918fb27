"""Low-rank adapters inside a language model: putting them in, switching them off, merging them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from marl_ray.config.model import LoraConfig
from marl_ray.errors import MarlRayError

ADAPTER = "default"


def add_adapters(lm: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze the model and give its target layers adapters, which change nothing yet.

    The model stays what it was, with other layers in it: no wrapper stands between FSDP2 and its decoder layers. Raises
    MarlRayError if a target names no linear layer, or one whose weights are the embedding's.
    """
    lm.requires_grad_(False)
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    linear = {name: module for name, module in lm.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    embedding = lm.get_input_embeddings().weight
    for target in targets if isinstance(targets, list) else ():
        found = [module for name, module in linear.items() if f".{name}".endswith(f".{target}")]
        if not found:
            raise MarlRayError(f"model.lora.targets: no linear layer is named {target!r}")
        if any(module.weight is embedding for module in found):
            raise MarlRayError(f"model.lora.targets: {target!r} shares its weights with the embedding")
    alpha: Any = config.alpha  # declared an int there, and only ever divided by the rank
    peft = PeftLoraConfig(r=config.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    inject_adapter_in_model(peft, lm, ADAPTER)


def adapted(module: nn.Module) -> list[tuple[str, LoraLayer]]:
    """Name and layer of all that have an adapter."""
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLayer)]


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """The model as it was before its adapters."""
    layers = [layer for _, layer in adapted(module)]
    # Not `enable_adapters`: it also freezes the adapters' weights, and FSDP2 remembers that from its first gather.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def strip_adapters(module: nn.Module) -> None:
    """Put the layers without adapters back in place."""
    for name, layer in adapted(module):
        module.set_submodule(name, layer.get_base_layer())


def merged_weight(layer: LoraLayer, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The layer's weight with its adapter in it: base + alpha / rank * up @ down (arXiv 2106.09685, equation 3)."""
    delta = (up.float() @ down.float()) * layer.scaling[ADAPTER]
    # GPT-2 keeps its weights transposed.
    return torch.add(base.float(), delta.T if getattr(layer, "fan_in_fan_out", False) else delta)
