"""The experiment store on PostgreSQL, whose transactions may end in another order than they began."""

import pytest
import sqlalchemy as sa
from clocks import Clock
from stores.single_reports import record_outcome
from stores.units import NOW, config, exposure, look, over
from waiting import until

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
    stores.experiments.open("exp", config(a=1, b=1) | {"outcome_window_s": 0.1})
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as slow, engine.connect() as watching:
        # The transaction is as old as the unit, however busy the machine is.
        slow.execute(sa.text("SELECT 1"))
        stores.units.record_exposures([exposure("u", "a")])
        slow.execute(sa.text("INSERT INTO outcomes SELECT experiment, unit, 2.5, 0, stored_at FROM exposures"))
        # The unit would be judged twice its window after it was stored.
        window_is_over = sa.text("SELECT extract(epoch FROM clock_timestamp()) > stored_at + 0.2 FROM exposures")
        until(lambda: watching.execute(window_is_over).scalar_one(), "the unit's window to end")
        assert (look(stores).units["a"].exposures, look(stores).units["a"].judged) == (1, 0)
        slow.commit()
    engine.dispose()
    assert look(stores).values["outcome"]["a"] == Summary(1, 2.5, 0.0)
    stores.close()
