"""The experiment store on PostgreSQL: a server of the tests' own, in a temporary folder, on a socket in that folder."""

import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import sqlalchemy as sa
from processes.faults import postgres
from stores.bet_cases import *  # noqa: F403
from stores.migration_cases import *  # noqa: F403
from stores.rollback_cases import *  # noqa: F403
from stores.single_reports import record_outcome
from stores.state_cases import *  # noqa: F403
from stores.unit_cases import *  # noqa: F403
from stores.unit_cases import Clock, config, exposure, look, over
from stores.window_cases import *  # noqa: F403

from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.store.experiment_store import ExperimentStore


@pytest.fixture(scope="module")
def make_database() -> Iterator[Callable[[str], str]]:
    """Makes a database out of another one, and returns its URL."""
    with postgres() as server:
        url, number = sa.make_url(server.url), count()
        admin = sa.create_engine(url.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")

        def make(template: str) -> str:
            name = f"test{next(number)}"
            with admin.connect() as connection:
                connection.execute(sa.text(f"CREATE DATABASE {name} TEMPLATE {template}"))
            return url.set(database=name).render_as_string()

        yield make
        admin.dispose()


@pytest.fixture(scope="module")
def make_empty_url(make_database: Callable[[str], str]) -> Callable[[], str]:
    return lambda: make_database("template1")


@pytest.fixture(scope="module")
def make_url(make_database: Callable[[str], str]) -> Callable[[], str]:
    migrated = make_database("template1")
    ExperimentStore(migrated).close()  # once: migrations take half a second
    name = str(sa.make_url(migrated).database)
    return lambda: make_database(name)


def test_a_look_misses_nothing_of_transactions_that_end_in_another_order(url):
    store = ExperimentStore(url, Clock())
    store.open_experiment("exp", config(a=1, b=1))
    slow = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    columns = "experiment, unit, arm, epoch, propensity, first_at, stored_at"
    insert = f"INSERT INTO exposures ({columns}) VALUES ('exp', 'slow', 'a', 1, 0.5, 0, 1.7e9)"
    with slow.connect() as connection:
        begun = connection.begin()
        connection.execute(sa.text(insert))
        for k in range(3):
            store.record_exposures([exposure(f"u{k}", "a")])
            record_outcome(store, "exp", f"u{k}", float(k))
            over(store)
            # What comes after the oldest open transaction is there, and not counted twice.
            assert look(store).exposed == {1: {"a": k + 1}}
            assert look(store).values["outcome"]["a"].n == k + 1
        begun.commit()
    slow.dispose()
    assert look(store).exposed == {1: {"a": 4}}
    assert look(store).units["a"].judged == 4
    assert look(store).values["outcome"]["a"] == Summary(3, 1.0, 1.0)
    store.close()


def test_nobody_is_judged_while_a_report_that_came_in_time_is_under_way(url):
    store = ExperimentStore(url)
    store.open_experiment("exp", config(a=1, b=1) | {"outcome_window_s": 0.5})
    store.record_exposures([exposure("u", "a")])
    slow = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    now = "extract(epoch FROM clock_timestamp())"
    with slow.connect() as connection:
        begun = connection.begin()
        connection.execute(sa.text(f"INSERT INTO outcomes VALUES ('exp', 'u', 2.5, 0, {now})"))
        time.sleep(1.2)
        assert (look(store).units["a"].exposures, look(store).units["a"].judged) == (1, 0)
        begun.commit()
    slow.dispose()
    assert look(store).values["outcome"]["a"] == Summary(1, 2.5, 0.0)
    store.close()
