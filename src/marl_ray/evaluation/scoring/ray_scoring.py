"""Score on a Ray cluster, where every node has an actor with a sandbox pool for small batches of samples."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.ray_batches import run_batches
from marl_ray.evaluation.scoring.local import SLACK_S, ResultRow, Scorer, ScoringJob, make_pool, score_locally
from marl_ray.sandbox import Level

IN_FLIGHT = 2
"""Number of batches that a node holds, so that it has work while a result travels."""
BATCH_PER_WORKER = 4
"""Number of samples of a batch per run at a time: enough to hide the way there, few enough to lose with a node."""
START_S = 120.0
"""Seconds that the nodes may take to have free CPUs and to start their pools."""


class ScoringNode:
    """Scores batches on its node; becomes a Ray actor."""

    def __init__(self, workers: int, packages: frozenset[str], min_level: Level) -> None:
        self._workers = workers
        self._pool = make_pool(workers, packages, min_level)

    def score(self, jobs: Sequence[ScoringJob]) -> list[ResultRow]:
        """Score a batch; results are in any order."""
        return [row for rows in score_locally(self._pool, jobs, self._workers) for row in rows]

    def ready(self) -> bool:
        """Return True once the pool exists."""
        return True


Nodes = dict[str, tuple[Any, int]]
"""Name in messages -> its actor and its number of runs at a time."""


@contextmanager
def ray_scorer(workers: int | None, packages: frozenset[str], min_level: Level) -> Iterator[Scorer]:
    """Make a scorer on the Ray that this process is connected to.

    `workers` is the number of runs at a time on a node; None takes the number of its CPUs. Raises MarlRayError if a
    node cannot have its pool.
    """
    import ray

    nodes = _start(workers, packages, min_level)
    try:
        yield partial(score_batches, nodes)
    finally:
        for actor, _ in nodes.values():
            ray.kill(actor)


def score_batches(nodes: Nodes, jobs: Sequence[ScoringJob]) -> Iterator[list[ResultRow]]:
    """Yield results as they arrive. Raises MarlRayError as `run_batches` does."""
    if not jobs:
        return iter(())
    if not nodes:
        raise MarlRayError("evaluate: no actor is left")
    size = BATCH_PER_WORKER * max(count for _, count in nodes.values())
    size = max(1, min(size, math.ceil(len(jobs) / (IN_FLIGHT * len(nodes)))))
    return run_batches(
        nodes,
        jobs,
        size,
        lambda node, batch: node[0].score.remote(batch),
        in_flight=IN_FLIGHT,
        limit_s=lambda batch: IN_FLIGHT * sum(job.max_wall_s for job in batch) + SLACK_S,
        task_of=lambda job: job.sample.problem.task_id,
        done="scored",
    )


def _start(workers: int | None, packages: frozenset[str], min_level: Level) -> Nodes:
    """Start an actor on every node that has CPUs, and return each with its number of runs at a time."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(ScoringNode)
    nodes: Nodes = {}
    for node in ray.nodes():
        cpus = int(node["Resources"].get("CPU", 0))
        if not node["Alive"] or cpus < 1:
            continue
        count = min(workers or cpus, cpus)
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor = remote.options(num_cpus=count, scheduling_strategy=place).remote(count, packages, min_level)
        nodes[f"node {node['NodeID']}"] = (actor, count)
    if not nodes:
        raise MarlRayError("evaluate: the cluster has no node with CPUs")
    try:
        ray.get([actor.ready.remote() for actor, _ in nodes.values()], timeout=START_S)
    except GetTimeoutError as error:
        raise MarlRayError(f"evaluate: not all nodes had free CPUs for a pool within {START_S:.0f} s") from error
    except RayActorError as error:
        raise MarlRayError(f"evaluate: a node cannot start its pool: {_last_line(error)}") from error
    return nodes


def _last_line(error: BaseException) -> str:
    """Return the cause of a remote error, which is the last line of its text, below the traceback."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
