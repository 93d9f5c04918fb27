"""The fixture of the files whose attacks run in a process of their own."""

from collections.abc import Iterator
from typing import Any

import pytest
from hostile.attacks import SETTINGS, attack

PARAMS = [pytest.param(name, marks=[pytest.mark.long] * (name != "best")) for name in SETTINGS]


@pytest.fixture(scope="module", params=PARAMS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The report of the program that a test file names `ATTACKS`, in one setting: what the attacks achieved."""
    yield from attack(request.module.ATTACKS, request.param, tmp_path_factory.mktemp("secret"))
