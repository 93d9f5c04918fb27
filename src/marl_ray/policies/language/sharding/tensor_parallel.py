"""Tensor parallelism: divide every layer of a language model over workers, by the plan that transformers has for it."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from marl_ray.errors import MarlRayError

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
"""Name in transformers' plans -> how torch divides a linear layer: by outputs or by inputs."""


def plan_of(settings: Any) -> dict[str, str]:
    """Layer, with `*` for the number of its block -> a name of STYLES, for an architecture's config.

    Raises MarlRayError if transformers has no plan for the architecture, or one that does more than divide linear layers.
    """
    kind, given = settings.model_type, getattr(settings.get_text_config(), "base_model_tp_plan", None) or {}
    plan = {layer: style for layer, style in given.items() if ".*." in layer}  # without embeddings, which stay complete
    if not plan:
        raise MarlRayError(f"transformers has no tensor-parallel plan for architecture {kind}")
    if unknown := sorted({style for style in plan.values() if style not in STYLES}):
        raise MarlRayError(
            f"the plan of architecture {kind} has layers of kind {unknown[0]}, expected {', '.join(STYLES)}"
        )
    return plan


def check_divisible(settings: Any, parts: int) -> None:
    """Raise MarlRayError if a model's heads or inner width cannot be divided over so many workers."""
    plan_of(settings)
    text = settings.get_text_config()
    heads = text.num_attention_heads
    numbers = {
        "attention heads": heads,
        "heads of keys": getattr(text, "num_key_value_heads", None) or heads,
        "numbers of the inner width": text.intermediate_size,
    }
    for name, number in numbers.items():
        if number % parts:
            raise MarlRayError(f"expected a divisor of its {number} {name}")


def divide(lm: Any, workers: DeviceMesh) -> None:
    """Divide the layers of a model, which may be on the meta device, over the workers of a mesh of one dimension. Each takes
    its part of the weights that it holds; nothing is exchanged."""
    plan = plan_of(lm.config)
    blocks: nn.Module = lm.base_model
    styles = {name: STYLES[style]() for name, style in plan.items()}
    parallelize_module(blocks, workers, styles, src_data_rank=None)
