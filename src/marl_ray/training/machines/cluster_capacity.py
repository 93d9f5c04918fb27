"""Compare the resources that this process's cluster has, or can scale to, with those that a run needs."""

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.ray_seams import autoscaled_nodes, autoscaled_resources


def check_capacity(config: RunConfig) -> bool:
    """Return True if the run uses GPUs.

    Raises MarlRayError if the cluster can never hold the workers, however it scales.
    """
    largest, need = max_resources(), config.resources
    engine_workers = config.engine_actors * need.tensor_parallel
    gpus = need.workers + engine_workers
    use_gpu = need.device == "cuda" or (need.device == "auto" and largest.get("GPU", 0) >= gpus)
    check_cpus(config, largest.get("CPU", 0.0))
    if use_gpu and gpus > largest.get("GPU", 0):
        engines = f" with {engine_workers} for engines" if engine_workers else ""
        raise MarlRayError(
            f"resources.workers={need.workers}{engines} on cuda needs {gpus} GPUs, "
            f"but this cluster can never have more than {largest.get('GPU', 0):g}"
        )
    return use_gpu


def check_cpus(config: RunConfig, max_cpus: float) -> None:
    """Raise MarlRayError if the workers, and engines of their own, need more than `max_cpus` logical CPUs."""
    need = config.resources
    engine_workers = config.engine_actors * need.tensor_parallel
    cpus = (need.workers + engine_workers) * need.cpus_per_worker
    if cpus > max_cpus:
        engines = f" and {engine_workers} for engines" if engine_workers else ""
        raise MarlRayError(
            f"resources.workers={need.workers}{engines} with cpus_per_worker={need.cpus_per_worker:g} needs {cpus:g} CPUs, "
            f"but this cluster can never have more than {max_cpus:g}"
        )


def max_resources() -> dict[str, float]:
    """Return the greatest amount of each resource that the cluster has now or can scale to."""
    import ray

    present, scaled = ray.cluster_resources(), autoscaled_resources()
    return {kind: max(present.get(kind, 0.0), scaled.get(kind, 0.0)) for kind in {*present, *scaled}}


def node_resources() -> list[dict[str, float]]:
    """Return the resources of each node that is alive, and of one node of each group that an autoscaler could add."""
    import ray

    return [*(node["Resources"] for node in ray.nodes() if node["Alive"]), *autoscaled_nodes()]
