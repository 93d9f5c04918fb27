"""What the cluster can hold: how many trials at a time, and which can never run."""

from dataclasses import dataclass
from typing import Any

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.training.cluster_capacity import check_capacity, most_resources, node_resources

DRIVER_BYTES = 1 << 20
"""Memory that a trial's driver reserves, because Tune takes no trial that needs nothing."""


@dataclass(frozen=True)
class Need:
    """What one trial occupies."""

    workers: int
    cpus: float
    """Per worker."""
    use_gpu: bool

    @property
    def nested(self) -> bool:
        """Whether it has a worker group of its own; one worker on a CPU trains in the trial's process."""
        return self.workers > 1 or self.use_gpu

    @property
    def total(self) -> dict[str, float]:
        return {"CPU": self.workers * self.cpus} | ({"GPU": float(self.workers)} if self.use_gpu else {})


def need_of(config: RunConfig) -> Need:
    """Raises MarlRayError naming the key if no node, or the cluster however it scales, can hold the trial."""
    use_gpu = check_capacity(config)
    need = config.resources
    wanted = {"CPU": need.cpus_per_worker} | ({"GPU": 1.0} if use_gpu else {})
    nodes = node_resources()
    if not any(all(node.get(kind, 0) >= amount for kind, amount in wanted.items()) for node in nodes):
        text = " and ".join(f"{amount:g} {kind}s" for kind, amount in wanted.items())
        biggest = max((node.get("CPU", 0) for node in nodes), default=0)
        raise MarlRayError(
            f"resources.cpus_per_worker={need.cpus_per_worker:g}: a worker needs {text} on one node, "
            f"but no node (group) has them; the biggest has {biggest:g} CPUs"
        )
    return Need(need.workers, need.cpus_per_worker, use_gpu)


def slots(need: Need) -> int:
    """Trials of this size that the cluster holds at a time, at the most it can scale to."""
    most = most_resources()
    return max(1, min(int(most.get(kind, 0) // amount) for kind, amount in need.total.items()))


def resources_of(config: dict[str, Any]) -> Any:
    """What Tune reserves for a trial: its CPUs where it trains in its own process; where it drives workers, which are Ray
    Train's affair, a place on a node that has the resource `safe` (one that is not taken away), if there is any."""
    import ray
    from ray.tune import PlacementGroupFactory

    leg = config["leg"]
    if not leg["nested"]:
        return PlacementGroupFactory([{"CPU": leg["cpus"]}])
    safe = "safe" in ray.cluster_resources()
    return PlacementGroupFactory([{"safe": 0.001} if safe else {"memory": DRIVER_BYTES}])
