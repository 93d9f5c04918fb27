"""The optimiser of a policy's weights."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from marl_ray.config import AlgorithmConfig


def optimizer_of(hyper: AlgorithmConfig, parts: Sequence[tuple[Iterable[nn.Module], float]]) -> torch.optim.Optimizer:
    """`hyper.optimizer` over the trained parameters of some modules, with a learning rate for each part.

    Weight decay pulls matrices only. It leaves out vectors (biases, the scales of norms), as transformers' Trainer does, and
    embeddings, whose rows would shrink while their tokens do not occur (OLMo 2, arXiv 2501.00656, section 3.4).
    """
    groups = []
    for modules, rate in parts:
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for module in modules:
            tables = {id(own.weight) for own in module.modules() if isinstance(own, nn.Embedding)}
            for parameter in module.parameters():
                if parameter.requires_grad:
                    (plain if parameter.ndim < 2 or id(parameter) in tables else decayed).append(parameter)
        own = {"lr": rate, "initial_lr": rate, **_settings(hyper)}
        groups += [
            {"params": decayed, **own, "weight_decay": hyper.weight_decay},
            {"params": plain, **own, "weight_decay": 0.0},
        ]
    groups = [group for group in groups if group["params"]]
    if hyper.optimizer == "sgd":
        return torch.optim.SGD(groups)
    # Not fused, a step spends most of its time in DTensor's dispatch of every small operation.
    return torch.optim.AdamW(groups, fused=True)


def _settings(hyper: AlgorithmConfig) -> dict[str, Any]:
    return {"betas": hyper.adam_betas, "eps": hyper.adam_eps} if hyper.optimizer == "adamw" else {}
