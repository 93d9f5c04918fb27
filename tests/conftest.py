"""The one Ray that all integration and end-to-end tests share, as a start costs more than most tests; no deadlines."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from marl_ray.cluster.local import LocalRay, local_ray

# Speed is measured in benchmarks; a busy machine fails no test.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalRay]:
    """A local Ray with four logical CPUs, a dashboard and token authentication; its workers can import the toys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with local_ray(num_cpus=4) as ray:
            yield ray
