"""A worker of several whose device has no room for a pass.

It has a module of its own so that other processes can import it.
"""

import itertools
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from toys.texts import config

from marl_ray.algorithms import PolicyLoss, PolicyLossInputs, algorithm_of
from marl_ray.config import HyperParameters
from marl_ray.envs.registry import make_env
from marl_ray.training.collectives import worker_mesh
from marl_ray.training.costs import CostStats
from marl_ray.training.errors import PassMemoryError
from marl_ray.training.loop.collection import build_collector
from marl_ray.training.team.assembly import build_team
from marl_ray.training.team.joint_update import update_team


def fail_to_update(passes: int, short: int) -> str:
    """Update a team in passes of two sequences, and return the error's text.

    Worker `short` has memory for this many passes. Its process ends with the error, as one of a run does.
    """
    rank, workers = dist.get_rank(), dist.get_world_size()
    run = config(f"resources.workers={workers}", "train.group_size=2", "train.micro_batch=2")
    env = make_env(run.env, run.constraints)
    team = build_team(run, env, worker_mesh("cpu"), False)
    batch = build_collector(run, env, team.agents, rank, workers).collect(team.players(), 0)
    remaining = [passes]

    def take(*_: Any) -> None:
        remaining[0] -= 1
        if rank == short and remaining[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    team.learners["speaker"].policy.model.lm.get_decoder().register_forward_pre_hook(take)
    try:
        update_team(run, team, batch.trajectories, 0, 0, {"speaker": CostStats(None, 0)})
    except PassMemoryError as error:
        if workers > 1:
            os._exit(0)
        return str(error)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was refused")


_passes = itertools.count()


def _allocate(batch: PolicyLossInputs, before: int) -> None:
    """Fail as an allocator does in a pass of more than two sequences on the last worker, after `before` passes."""
    if dist.get_rank() == dist.get_world_size() - 1 and next(_passes) >= before and len(batch.log_probs) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _crowded(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    _allocate(batch, 0)
    return algorithm_of("grpo").policy_loss(batch, hyper)


def _crowded_later(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    _allocate(batch, 1)
    return algorithm_of("grpo").policy_loss(batch, hyper)


CROWDED = replace(algorithm_of("grpo"), name="crowded", policy_loss=_crowded)
CROWDED_LATER = replace(algorithm_of("grpo"), name="crowded_later", policy_loss=_crowded_later)
