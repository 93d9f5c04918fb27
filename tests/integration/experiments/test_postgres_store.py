"""The experiment store on PostgreSQL, whose transactions may end in another order than they began."""

import time

import pytest
import sqlalchemy as sa
from clocks import Clock
from stores.single_reports import record_outcome
from stores.units import NOW, config, exposure, look, over

from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.store.facade import open_stores

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True, scope="module")


def test_a_look_misses_nothing_of_transactions_that_end_in_another_order(url):
    stores = open_stores(url, Clock(NOW))
    stores.experiments.open("exp", config(a=1, b=1))
    slow = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    columns = "experiment, unit, arm, epoch, propensity, first_at, stored_at"
    insert = f"INSERT INTO exposures ({columns}) VALUES ('exp', 'slow', 'a', 1, 0.5, 0, 1.7e9)"
    with slow.connect() as connection:
        begun = connection.begin()
        connection.execute(sa.text(insert))
        for k in range(3):
            stores.units.record_exposures([exposure(f"u{k}", "a")])
            record_outcome(stores.units, "exp", f"u{k}", float(k))
            over(stores)
            # What comes after the oldest open transaction is there, and not counted twice.
            assert look(stores).exposed == {1: {"a": k + 1}}
            assert look(stores).values["outcome"]["a"].n == k + 1
        begun.commit()
    slow.dispose()
    assert look(stores).exposed == {1: {"a": 4}}
    assert look(stores).units["a"].judged == 4
    assert look(stores).values["outcome"]["a"] == Summary(3, 1.0, 1.0)
    stores.close()


def test_nobody_is_judged_while_a_report_that_came_in_time_is_under_way(url):
    stores = open_stores(url)
    stores.experiments.open("exp", config(a=1, b=1) | {"outcome_window_s": 0.5})
    stores.units.record_exposures([exposure("u", "a")])
    slow = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    now = "extract(epoch FROM clock_timestamp())"
    with slow.connect() as connection:
        begun = connection.begin()
        connection.execute(sa.text(f"INSERT INTO outcomes VALUES ('exp', 'u', 2.5, 0, {now})"))
        time.sleep(1.2)
        assert (look(stores).units["a"].exposures, look(stores).units["a"].judged) == (1, 0)
        begun.commit()
    slow.dispose()
    assert look(stores).values["outcome"]["a"] == Summary(1, 2.5, 0.0)
    stores.close()
