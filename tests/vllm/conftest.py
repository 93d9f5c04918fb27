"""`make test-vllm` runs these tests where vLLM is installed."""

from collections.abc import Iterator

import pytest
from toy_models.sampled_by_vllm import Sampled


@pytest.fixture(scope="session")
def sampled() -> Iterator[Sampled]:
    """One process for all tests that leave it as it was."""
    one = Sampled()
    yield one
    one.engine.close()
