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
RAY = "ray"
"""The xdist group of the tests that share it."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `--dist loadgroup` keeps in one process: all tests of the shared Ray, and the others file by file.

    The tests of Ray take longest, so they begin first.
    """
    for item in items:
        name = RAY if "ray_cluster" in getattr(item, "fixturenames", ()) else item.path.stem
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: next(item.iter_markers("xdist_group")).args[0] != RAY)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalRay]:
    """A local Ray with four logical CPUs, a dashboard and token authentication; its workers can import the toys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with local_ray(num_cpus=4) as ray:
            yield ray
