"""The experiment store on SQLite."""

import shutil
from collections.abc import Callable
from itertools import count

import pytest
import sqlalchemy as sa
from stores.bet_cases import *  # noqa: F403
from stores.migration_cases import *  # noqa: F403
from stores.rollback_cases import *  # noqa: F403
from stores.state_cases import *  # noqa: F403
from stores.unit_cases import *  # noqa: F403
from stores.unit_cases import exposure, look, over
from stores.window_cases import *  # noqa: F403

from marl_ray.errors import MarlRayError
from marl_ray.experiments.store.experiment_store import ExperimentStore


@pytest.fixture(scope="module")
def make_empty_url(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    folder, number = tmp_path_factory.mktemp("databases"), count()

    def make() -> str:
        (folder / (name := f"deep{next(number)}")).mkdir()
        return f"sqlite:///{folder}/{name}/experiments.db"

    return make


@pytest.fixture(scope="module")
def make_url(make_empty_url: Callable[[], str]) -> Callable[[], str]:
    migrated = make_empty_url()
    ExperimentStore(migrated).close()  # once: migrations take a fifth of a second

    def make() -> str:
        url = make_empty_url()
        shutil.copy(str(sa.make_url(migrated).database), str(sa.make_url(url).database))
        return url

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


def test_a_look_that_goes_on_reads_its_units_by_an_index(store):
    store.record_exposures([exposure(f"u{k}", "ab"[k % 2]) for k in range(50)])
    over(store)
    look(store)
    statements: list[tuple[str, tuple]] = []

    def note(connection, cursor, statement, parameters, context, executemany) -> None:
        statements.append((statement, parameters))

    sa.event.listen(store._engine, "before_cursor_execute", note)
    store.record_exposures([exposure("new", "a")])
    over(store)
    look(store)
    sa.event.remove(store._engine, "before_cursor_execute", note)
    plans = []
    with store._engine.connect() as connection:
        for statement, parameters in statements:
            if "first_at" in statement or "exposures" not in statement or statement.startswith("INSERT"):
                continue
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            plans.append("; ".join(row[-1] for row in plan))
    assert len(plans) == 4
    for plan in plans[1:]:
        assert "SCAN exposures" not in plan and "SCAN outcomes" not in plan and "SCAN unit_metrics" not in plan, plan
    for plan in plans[2:]:
        assert "exposures_as_stored (experiment=? AND stored_at>? AND stored_at<?)" in plan, plan
        assert "(experiment=? AND rowid>?)" in plan and "(experiment=? AND unit=?" in plan, plan
