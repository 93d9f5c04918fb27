"""The Ray that a call of the API runs on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def cluster_of_call() -> str | None:
    """The cluster that exists already: the one that this process is connected to, or that of RAY_ADDRESS; None if the call
    starts a Ray of its own."""
    import ray

    return "the Ray of this process" if ray.is_initialized() else os.environ.get("RAY_ADDRESS")


@contextmanager
def ray_of_call() -> Iterator[None]:
    """The Ray that this process is connected to, or else that of `ray_here` within the block."""
    import ray

    from marl_ray.cluster.local_ray import ray_here

    if ray.is_initialized():
        yield
        return
    with ray_here():
        yield
