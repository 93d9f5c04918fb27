"""A cluster of KubeRay that KUBECONFIG names; without one every test here is skipped and says why."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kuberay_cluster import START_S, Site, settings

from marl_ray.cluster.kuberay.client.connection import connect


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A cluster takes minutes where other tests take seconds."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(4 * START_S))


@contextmanager
def _site() -> Iterator[Site]:
    image, namespace, storage = settings()
    made = Site(connect(namespace=namespace), image, storage)
    try:
        yield made
    finally:
        made.clean_up()


@pytest.fixture
def site() -> Iterator[Site]:
    """Gone with its test, so that one cluster at a time asks for a small machine."""
    with _site() as made:
        yield made


@pytest.fixture(scope="module")
def lasting_site() -> Iterator[Site]:
    """Gone with the last test of its file."""
    with _site() as made:
        yield made
