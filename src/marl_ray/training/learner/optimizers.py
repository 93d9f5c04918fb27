"""The optimiser of a policy's weights, and the gradients of all workers.

Gradients are summed over the workers, and clipped.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from marl_ray.config import HyperParameters
from marl_ray.training.collectives import count_holders, rank_and_world_size, sum_over_workers


def optimizer_of(hyper: HyperParameters, parts: Sequence[tuple[Iterable[nn.Module], float]]) -> torch.optim.Optimizer:
    """Make `hyper.optimizer` for the trained parameters of some modules, with a learning rate for each part.

    Weight decay pulls matrices only. It leaves out vectors (biases, the scales of norms), as transformers'
    Trainer does, and embeddings, whose rows would shrink while their tokens do not occur (OLMo 2, arXiv 2501.00656,
    section 3.4).
    """
    groups = []
    for modules, rate in parts:
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for module in modules:
            tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
            for parameter in module.parameters():
                if parameter.requires_grad:
                    (plain if parameter.ndim < 2 or id(parameter) in tables else decayed).append(parameter)
        settings = {"lr": rate, "initial_lr": rate, **_settings(hyper)}
        groups += [
            {"params": decayed, **settings, "weight_decay": hyper.weight_decay},
            {"params": plain, **settings, "weight_decay": 0.0},
        ]
    groups = [group for group in groups if group["params"]]
    if hyper.optimizer == "sgd":
        return torch.optim.SGD(groups)
    # Not fused, a step spends most of its time in DTensor's dispatch of every small operation.
    return torch.optim.AdamW(groups, fused=True)


def _settings(hyper: HyperParameters) -> dict[str, object]:
    return {"betas": hyper.adam_betas, "eps": hyper.adam_eps} if hyper.optimizer == "adamw" else {}


def backward_over_workers(loss: Tensor) -> None:
    """Add to the gradients of the weights this worker's part of the gradient of the sum of all workers' losses.

    A loss is this worker's sum over the count of all workers. FSDP2 averages gradients over the workers, so the loss is
    multiplied by their number. Every worker calls this, also one whose loss is 0.
    """
    (loss * rank_and_world_size()[1]).backward()


def clip_gradients(modules: Sequence[nn.Module], max_norm: float) -> Tensor:
    """Scale each module's sharded gradients to at most `max_norm`, and return the norms, (M,).

    Each module is scaled by its own global norm. One reduction serves all M modules, where
    `torch.nn.utils.clip_grad_norm_` would need one for each.
    """
    gradients = [[p.grad for p in module.parameters() if p.grad is not None] for module in modules]
    shards = [[local_part(gradient) for gradient in group] for group in gradients]
    squares = [
        torch.stack(
            [shard.float().square().sum() / count_holders(gradient) for shard, gradient in zip(*pair, strict=True)]
        ).sum()
        for pair in zip(shards, gradients, strict=True)
    ]
    norms = sum_over_workers(torch.stack(squares)).sqrt()
    for group, norm in zip(shards, norms, strict=True):
        torch._foreach_mul_(group, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norms


def local_part(gradient: Tensor) -> Tensor:
    """Return this worker's shard of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
