"""Tensor parallelism: every layer of a language model is divided over workers.

The plan is the one that transformers has for the architecture.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from marl_ray.errors import MarlRayError

PARALLEL_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
"""Name in transformers' plans -> how torch divides a linear layer: by outputs or by inputs."""


def plan_of(settings: Any) -> dict[str, str]:
    """Return layer, with `*` for the number of its block, -> a name of PARALLEL_STYLES, for an architecture's config.

    Raises MarlRayError if transformers has no plan for the architecture, or one that does more than divide linear layers.
    """
    kind, styles = settings.model_type, getattr(settings.get_text_config(), "base_model_tp_plan", None) or {}
    # Without embeddings, which stay complete.
    plan = {layer: style for layer, style in styles.items() if ".*." in layer}
    if not plan:
        raise MarlRayError(f"transformers has no tensor-parallel plan for architecture {kind}")
    if unknown := sorted({style for style in plan.values() if style not in PARALLEL_STYLES}):
        raise MarlRayError(
            f"the plan of architecture {kind} has layers of kind {unknown[0]}, expected {', '.join(PARALLEL_STYLES)}"
        )
    return plan


def check_divisible(lm: Any, parts: int) -> None:
    """Raise MarlRayError if the layers of a model cannot be divided over this many workers.

    The model may be on the meta device.
    """
    plan = plan_of(lm.config)
    text = lm.config.get_text_config()
    heads = text.num_attention_heads
    numbers = {
        "attention heads": heads,
        "heads of keys": getattr(text, "num_key_value_heads", None) or heads,
        "numbers of the inner width": text.intermediate_size,
    }
    for name, number in numbers.items():
        if number % parts:
            raise MarlRayError(f"expected a divisor of its {number} {name}")
    layers = _divided_modules(lm.base_model, plan)
    blocks = {id(module) for module in decoder_layers(lm).modules()}
    for name, style in layers.items():
        layer = lm.base_model.get_submodule(name)
        if not isinstance(layer, nn.Linear) or id(layer) not in blocks:
            raise MarlRayError(
                f"expected {name}, which the plan of its architecture divides, to be a linear layer of a block"
            )
        number = layer.out_features if PARALLEL_STYLES[style] is ColwiseParallel else layer.in_features
        if number % parts:
            raise MarlRayError(f"expected a divisor of the {number} numbers by which its layer {name} is divided")
    # Weights beside divided layers work on their numbers, of which each worker has some, and would need the gradient of all.
    for parent in sorted({name.rpartition(".")[0] for name in layers}):
        for name, _ in lm.base_model.get_submodule(parent).named_parameters():
            if f"{parent}.{name}".rpartition(".")[0] not in layers:
                raise MarlRayError(f"expected no weight {parent}.{name} beside the layers that are divided")


def decoder_layers(lm: nn.Module) -> nn.ModuleList:
    """Return the model's blocks: the list of modules that holds the most parameters."""
    lists = [module for module in lm.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters()))


def _divided_modules(blocks: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return name of each module of `blocks` that a plan divides -> a name of PARALLEL_STYLES."""
    forms = {re.compile(re.escape(layer).replace(r"\*", r"\d+")): style for layer, style in plan.items()}
    return {name: style for name, _ in blocks.named_modules() for form, style in forms.items() if form.fullmatch(name)}


def divide_layers(lm: Any, workers: DeviceMesh) -> None:
    """Divide the layers of a model, which may be on the meta device, over the workers of a mesh of one dimension.

    Each takes its part of the weights that it holds; nothing is exchanged.
    """
    plan = plan_of(lm.config)
    blocks: nn.Module = lm.base_model
    styles = {name: PARALLEL_STYLES[style]() for name, style in plan.items()}
    parallelize_module(blocks, workers, styles, src_data_rank=None)
