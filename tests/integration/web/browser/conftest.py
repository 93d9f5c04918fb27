"""The little site that the files of this folder play on."""

from collections.abc import Iterator

import pytest
from servers.little_site import LittleSite, little_site


@pytest.fixture(scope="module")
def site() -> Iterator[LittleSite]:
    with little_site() as running:
        yield running
