"""Cost of the driver of a run for each worker while it waits.

Ray Train looks after its workers, which are simulated. Ray Train's own code asks every worker by a call of its actor
and gathers the answers, with the callbacks that a run adds. The calls are real and cross process borders. Behind them
are ANSWERING processes instead of one for each worker, so that the look's cost for the driver's process is measured,
and not that of a machine with a thousand processes.
"""

import statistics
import time
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from marl_ray.ray_seams import naming_callback
from marl_ray.training.machines.ray_variables import poll_interval

ANSWERING, LOOKS, WARM_UP = 2, 20, 3
"""Actors that answer for all workers, looks that are counted, and first looks that are not."""
ANSWER_S = 60.0
"""Deadline of a worker's answer, in seconds."""


@ray.remote(num_cpus=0)
class Answering:
    """Answers for many workers that train."""

    def poll_status(self) -> WorkerStatus:
        return WorkerStatus(running=True)


class SimulatedGroup(WorkerGroup):
    """A worker group that has started, with this many workers behind a few processes."""

    def __init__(self, workers: int, actors: list[Any]):
        self.actors = [actors[k % len(actors)] for k in range(workers)]
        self._callbacks: list[WorkerGroupCallback] = [naming_callback("run")]
        self._worker_rank_to_replica_group_rank = None
        self._world_rank_to_ongoing_poll = {}
        self._worker_health_check_timeout_s = ANSWER_S

    def has_started(self) -> bool:
        return True

    def get_workers(self) -> list[Any]:
        return [SimulatedWorker(actor) for actor in self.actors]


class SimulatedWorker:
    """The part of a worker that Ray Train needs for a look."""

    def __init__(self, actor: Any):
        self.actor = actor


def look_times(workers: int) -> dict[str, float]:
    """Return what a look at this many workers costs the driver.

    That is microseconds of CPU and of wall time for each worker at a look; seconds between two looks; and the share of
    one CPU that the looks take.
    """
    answering: Any = Answering
    actors = [answering.remote() for _ in range(ANSWERING)]
    group = SimulatedGroup(workers, actors)
    cpu, wall = [], []
    for _ in range(WARM_UP + LOOKS):
        began, used = time.perf_counter(), time.process_time()
        status = group.poll_status(timeout=ANSWER_S)
        cpu.append(time.process_time() - used)
        wall.append(time.perf_counter() - began)
        assert len(status.worker_statuses) == workers and not status.errors
    for actor in actors:
        ray.kill(actor)
    between = poll_interval(workers)
    median = statistics.median(cpu[WARM_UP:])
    return {
        "cpu": 1e6 * median / workers,
        "wall": 1e6 * statistics.median(wall[WARM_UP:]) / workers,
        "between": between,
        "share": median / (between + statistics.median(wall[WARM_UP:])),
    }
