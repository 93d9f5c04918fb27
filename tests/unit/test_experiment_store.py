"""The experiment store on SQLite."""

from collections.abc import Callable
from itertools import count

import pytest
from state_cases import *  # noqa: F403
from store_cases import *  # noqa: F403

from marl_ray.errors import MarlRayError
from marl_ray.experiments.store import ExperimentStore


@pytest.fixture(scope="module")
def make_url(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    folder, number = tmp_path_factory.mktemp("databases"), count()

    def make() -> str:
        (folder / (name := f"deep{next(number)}")).mkdir()
        return f"sqlite:///{folder}/{name}/experiments.db"

    return make


def test_folders_of_the_file_are_made(tmp_path):
    ExperimentStore(f"sqlite:///{tmp_path}/deep/er/experiments.db").close()
    assert (tmp_path / "deep/er/experiments.db").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "expected an SQLAlchemy URL"),
        ("sqlite://", "SQLite needs a file"),
        ("mysql://localhost/x", "expected sqlite or postgresql, got 'mysql'"),
        ("sqlite:////proc/nothing/here.db", "cannot be opened"),
    ],
)
def test_unusable_databases_are_one_line(url, message):
    with pytest.raises(MarlRayError, match=message):
        ExperimentStore(url)
