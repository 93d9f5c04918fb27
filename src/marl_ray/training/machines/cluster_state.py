"""The state of the cluster that this process is connected to, as Ray's public calls report it."""

from typing import Any

from marl_ray.ray_seams import placement_group_states


def _connected_ray() -> Any:
    """Return the Ray of which this process is a part.

    Raises RuntimeError where it is part of none: Ray's own calls would start a cluster.
    """
    import ray

    if not ray.is_initialized():
        raise RuntimeError("this process is not connected to Ray")
    return ray


def alive_nodes() -> set[str]:
    """Return the addresses of the cluster's nodes. Raises RuntimeError in a process without Ray."""
    return {node["NodeManagerAddress"] for node in _connected_ray().nodes() if node["Alive"]}


def free_resources() -> dict[str, float]:
    """Return the resources of the cluster that nobody has booked. Raises RuntimeError in a process without Ray."""
    return dict(_connected_ray().available_resources())


def has_all_placement_groups() -> bool:
    """Return True if the cluster has booked all resources that this job has asked for in placement groups.

    What the job still waits for then are processes. Raises RuntimeError in a process without Ray.
    """
    states = placement_group_states(_connected_ray().get_runtime_context().get_job_id())
    return "CREATED" in states and not {"PENDING", "RESCHEDULING", "PREPARED"} & set(states)
