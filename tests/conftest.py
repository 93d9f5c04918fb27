"""The one Ray that all integration and end-to-end tests share: a start costs more than most tests."""

from collections.abc import Iterator

import pytest

from marl_ray.cluster.local import LocalRay, local_ray


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalRay]:
    """A local Ray with four logical CPUs, a dashboard and token authentication."""
    with local_ray(num_cpus=4) as ray:
        yield ray
