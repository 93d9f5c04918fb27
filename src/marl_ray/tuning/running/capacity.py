"""Capacity of the cluster: the trials that it can hold at a time, and those that it can never hold."""

from dataclasses import dataclass
from typing import Any

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonObject
from marl_ray.training.machines.cluster_capacity import check_capacity, max_resources, node_resources

DRIVER_BYTES = 1 << 20
"""Bytes of memory that a trial's driver reserves, because Tune takes no trial that needs nothing."""


@dataclass(frozen=True)
class TrialResources:
    """Resources that one trial occupies."""

    workers: int
    cpus: float
    """CPUs per worker."""
    use_gpu: bool

    @property
    def has_worker_group(self) -> bool:
        """True if the trial has a worker group of its own.

        A single worker on a CPU trains in the trial's process.
        """
        return self.workers > 1 or self.use_gpu

    @property
    def total(self) -> dict[str, float]:
        """Ray's resources of all workers of the trial, by name."""
        return {"CPU": self.workers * self.cpus} | ({"GPU": float(self.workers)} if self.use_gpu else {})


def need_of(config: RunConfig) -> TrialResources:
    """Return the resources of a trial.

    Raises MarlRayError naming the key if no node, or the cluster however it scales, can hold it.
    """
    need = config.resources
    if need.engines:
        raise MarlRayError(
            f"resources.engines={need.engines}: expected 0 in a sweep, whose trials sample beside their workers"
        )
    use_gpu = check_capacity(config)
    per_worker = {"CPU": need.cpus_per_worker} | ({"GPU": 1.0} if use_gpu else {})
    nodes = node_resources()
    if not any(all(node.get(kind, 0) >= amount for kind, amount in per_worker.items()) for node in nodes):
        text = " and ".join(f"{amount:g} {kind}s" for kind, amount in per_worker.items())
        biggest = max((node.get("CPU", 0) for node in nodes), default=0)
        raise MarlRayError(
            f"resources.cpus_per_worker={need.cpus_per_worker:g}: a worker needs {text} on one node, "
            f"but no node (group) has them; the biggest has {biggest:g} CPUs"
        )
    return TrialResources(need.workers, need.cpus_per_worker, use_gpu)


def count_slots(need: TrialResources) -> int:
    """Return the number of trials of this size that the cluster holds at a time, after scaling up as far as it can."""
    most = max_resources()
    return max(1, min(int(most.get(kind, 0) // amount) for kind, amount in need.total.items()))


def resources_of(config: JsonObject) -> Any:
    """Return the resources that Tune reserves for a trial.

    A trial that trains in its own process needs its CPUs. A trial that drives workers leaves those to Ray Train; it
    needs a place on a node with the resource `safe` (a node that is not taken away), if there is one.
    """
    import ray
    from ray.tune import PlacementGroupFactory

    leg = config["leg"]
    if not leg["has_worker_group"]:
        return PlacementGroupFactory([{"CPU": leg["cpus"]}])
    safe = "safe" in ray.cluster_resources()
    return PlacementGroupFactory([{"safe": 0.001} if safe else {"memory": DRIVER_BYTES}])
