"""The storage of the unit tests of stored runs."""

from pathlib import Path

import pytest
from toy_runs.runs import store_run


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Two finished runs that differ in their seed, a third one of another algorithm, and a folder of something else."""
    store_run(tmp_path, "first", "seed=1", score=1.0)
    store_run(tmp_path, "second", "seed=2", score=2.0)
    store_run(tmp_path, "other", "algorithm=ippo", score=3.0, finished=False)
    (tmp_path / "mlartifacts").mkdir()
    return tmp_path
