"""Measure how many responses fit into one pass on a GPU.

The measurement is made before the first gradient step, so that none runs out of memory. A worker that runs out of
memory cannot try a smaller pass: the other workers would wait for it in the collectives of the pass that it left.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from marl_ray.errors import one_line
from marl_ray.policies.agreement import all_gather_values
from marl_ray.training.errors import PassMemoryError
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.learner.trained_policy import TrainedPolicy

USABLE_MEMORY_SHARE = 0.85
"""The share of the free memory that passes may take; the rest is left for fragmentation."""


def measure_pass_limits(learners: Mapping[str, Learner]) -> dict[str, int]:
    """Measure how many sequences fit into a pass of each learner on a GPU.

    The number is the same on every worker, at least 1. A model whose passes fit beside all of its weights, on every
    worker, is gathered once for all passes of a step.

    Every worker takes part. Two passes are measured, with one sequence and with two, each as long as the context; the
    second only if it is sure to fit on every worker. Raises PassMemoryError where the first does not fit.
    """
    gpu_learners = {name: learner for name, learner in learners.items() if learner.policy.device.type == "cuda"}
    # Adam makes its two moments in the first step.
    coming = sum(
        2 * _gpu_bytes(group["params"])
        for learner in gpu_learners.values()
        for group in learner.policy.optimizer.param_groups
        if learner.policy.hyper.optimizer == "adamw"
    )
    limits = {}
    for name, learner in gpu_learners.items():
        policy = learner.policy
        learn_entropy = learner.state.entropy_coef > 0 or policy.hyper.entropy_target is not None
        with translate_out_of_memory(f"policy {name!r}, before the first step", 1):
            one_row = peak_bytes(policy, 1, learn_entropy)
            two_fit = all(all_gather_values(2 * one_row <= USABLE_MEMORY_SHARE * free_bytes(policy)))
            two_rows = peak_bytes(policy, 2, learn_entropy) if two_fit else math.inf
            usable = USABLE_MEMORY_SHARE * free_bytes(policy) - coming
            limits[name] = min(all_gather_values(rows_that_fit(one_row, two_rows, usable)))
            sharded = policy.model.sharded
            if not sharded.gathers_once:
                rows = min(limits[name], policy.pass_size or limits[name])
                beside = fits_beside_weights(sharded.gathered_bytes, one_row, two_rows, usable, rows)
                policy.model.sharded = replace(sharded, gathers_once=all(all_gather_values(beside)))
    return limits


@contextmanager
def translate_out_of_memory(
    where: str, rows: int | None, policy: str | None = None, max_rows: int = 1
) -> Iterator[None]:
    """Raise PassMemoryError in place of torch's out-of-memory error, within the block.

    The error names `where` and a pass of `rows` sequences (None: all, which are `max_rows`) of a `policy`. The other
    workers wait for this one in the pass, so its process must end, and with it theirs.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        sequences = "all sequences" if rows is None else f"{rows} sequence{'s' if rows > 1 else ''}"
        smaller = "" if rows == 1 else "a smaller train.micro_batch, "
        raise PassMemoryError(
            f"{where}: out of memory in a pass of {sequences}; expected {smaller}a smaller model.context, "
            f"model.activation_checkpointing, model.cpu_offload or more workers ({one_line(error)})",
            policy,
            max_rows if rows is None else min(rows, max_rows),
        ) from error


def free_bytes(policy: TrainedPolicy) -> int:
    """Return the bytes of a GPU that nothing holds."""
    free, _ = torch.cuda.mem_get_info(policy.device)
    return free + torch.cuda.memory_reserved(policy.device) - torch.cuda.memory_allocated(policy.device)


def rows_that_fit(one_row: float, two_rows: float, free: float) -> int:
    """Return the number of rows of a pass that fits into `free` bytes, at least 1.

    A pass takes `one_row` bytes with one row, `two_rows` with two rows, and equally much more with each further row.
    """
    return 1 + max(0, int((free - one_row) // max(two_rows - one_row, 1.0)))


def fits_beside_weights(weights: float, one_row: float, two_rows: float, free: float, rows: int) -> bool:
    """Return True if a pass of `rows` fits into `free` bytes beside all weights, gathered.

    A pass takes what `rows_that_fit` says.
    """
    further = (rows - 1) * max(two_rows - one_row, 1.0) if rows > 1 else 0.0
    return weights + one_row + further <= free


def trial_pass(model: Any, rows: int, learn_entropy: bool) -> None:
    """Make a forward and a backward pass with `rows` responses that fill the context.

    No gradients are left.
    """
    steps = model.generation.max_tokens
    prompts = torch.zeros(rows, max(1, model.config.context - steps), dtype=torch.int64, device=model.device)
    responses = torch.zeros(rows, steps, dtype=torch.int64, device=model.device)
    prompts[:, 0] = torch.arange(rows)  # different first tokens, because the model would read equal prompts only once
    # Of workers that compute a pass together one has responses in it.
    has_rows = model.joint is None or model.joint.number == 0
    outputs = model.evaluate(
        prompts, responses, torch.full_like(responses, has_rows, dtype=torch.bool), learn_entropy=learn_entropy
    )
    parts = (outputs.log_probs, outputs.entropy, outputs.values, outputs.cost_values)
    sum(part.sum() for part in parts if part is not None).backward()
    model.zero_grad(set_to_none=True)


def peak_bytes(policy: TrainedPolicy, rows: int, learn_entropy: bool) -> float:
    """Return the bytes that a forward and a backward pass of `rows` sequences takes.

    The bytes come on top of what is allocated before the pass.
    """
    torch.cuda.reset_peak_memory_stats(policy.device)
    before = torch.cuda.memory_allocated(policy.device)
    policy.family.begin_pass(policy.model, last=True)
    trial_pass(policy.model, rows, learn_entropy)
    policy.family.end_passes(policy.model)
    return float(torch.cuda.max_memory_allocated(policy.device) - before)


def _gpu_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    local = (p.to_local() if hasattr(p, "to_local") else p for p in parameters)
    return sum(p.numel() * p.element_size() for p in local if p.device.type == "cuda")
