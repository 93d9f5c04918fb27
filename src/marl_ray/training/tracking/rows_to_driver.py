"""The queue by which a sweep's trial gets the rows of its workers."""

import secrets
from typing import Any


def metrics_queue(owner: str) -> Any:
    """Make a Ray queue for rows of metrics. The dashboard shows its actor as `OWNER metrics`."""
    from ray.util.queue import Queue

    # A name must be unique in Ray's namespace, and the queue of a trial that has just failed may still exist.
    return Queue(
        actor_options={"num_cpus": 0, "name": f"{owner} metrics", "namespace": f"marl-ray-{secrets.token_hex(8)}"}
    )
