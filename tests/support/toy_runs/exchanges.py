"""The exchanges between workers in an update.

They have a module of their own so that other processes can import it.
"""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from toys.texts import config

from marl_ray.envs.registry import make_env
from marl_ray.policies.language.sharding import shard
from marl_ray.training.collectives import worker_mesh
from marl_ray.training.costs import CostStats
from marl_ray.training.loop.collection import build_collector
from marl_ray.training.team.assembly import build_team


class Exchanges(TorchDispatchMode):
    """Counts exchanges by torch's names.

    torch's `CommDebugMode` also follows modules, and fails where one is called apart from its parent, as our
    packing does it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1  # noqa: SLF001  torch's
        return func(*args, **(kwargs or {}))


def count_exchanges(replicate: int, gathered_once: int, *overrides: str) -> dict[str, int]:
    """Count a worker's exchanges during an update of one gradient step: name -> how often.

    Models of at most `gathered_once` bytes stay gathered.
    """
    shard.MAX_GATHERED_ONCE_BYTES = gathered_once
    rank, workers = dist.get_rank(), dist.get_world_size()
    run = config(f"resources.workers={workers}", "train.group_size=2", *overrides)
    env = make_env(run.env, run.constraints)
    team = build_team(run, env, worker_mesh("cpu", replicate), False)
    batch = build_collector(run, env, team.agents, rank, workers).collect(team.players(), 0)
    with Exchanges() as exchanges:
        team.learners["speaker"].update(batch.trajectories["speaker"], 0, 0, CostStats(None, 0))
    return dict(exchanges.counts)
