"""The experiment store on any database: what its migrations take over, and what they refuse."""

import json

import pytest
import sqlalchemy as sa
from stores.units import act, config, look

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.lifecycle import Action, ExperimentStatus
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.units import Outcome

OLD_SCHEMA = """
CREATE TABLE experiments (name VARCHAR(100) NOT NULL, config JSON NOT NULL, epoch INTEGER NOT NULL,
    created FLOAT NOT NULL, PRIMARY KEY (name));
CREATE TABLE exposures (experiment VARCHAR(100) NOT NULL, unit VARCHAR(256) NOT NULL, arm VARCHAR(100) NOT NULL,
    epoch INTEGER NOT NULL, propensity FLOAT NOT NULL, first_at FLOAT NOT NULL, PRIMARY KEY (experiment, unit),
    FOREIGN KEY(experiment) REFERENCES experiments (name));
CREATE TABLE outcomes (experiment VARCHAR(100) NOT NULL, unit VARCHAR(256) NOT NULL, value FLOAT NOT NULL,
    at FLOAT NOT NULL, PRIMARY KEY (experiment, unit),
    FOREIGN KEY(experiment, unit) REFERENCES exposures (experiment, unit))
"""
"""The tables that the code before the migrations made."""


def test_a_database_without_migrations_is_taken_over_whole(empty_url):
    url = empty_url
    old = sa.create_engine(url)
    with old.begin() as connection:
        for statement in OLD_SCHEMA.split(";"):
            connection.execute(sa.text(statement))
        connection.execute(
            sa.text("INSERT INTO experiments VALUES ('exp', :config, 3, 12.5)"),
            {"config": json.dumps(config(a=1, b=3))},
        )
        connection.execute(sa.text("INSERT INTO exposures VALUES ('exp', 'u', 'a', 2, 0.5, 13.0)"))
        connection.execute(sa.text("INSERT INTO exposures VALUES ('exp', 'v', 'b', 3, 0.75, 14.0)"))
        connection.execute(sa.text("INSERT INTO outcomes VALUES ('exp', 'v', 0.25, 9000.0)"))
    old.dispose()
    stores = open_stores(url)
    record = stores.experiments.read("exp")
    assert (record.config, record.epoch, record.created) == (config(a=1, b=3), 3, 12.5)
    assert (record.state.status, record.state.stage_since, record.weights) == (
        ExperimentStatus.RUNNING,
        12.5,
        {"a": 1, "b": 3},
    )
    assert stores.units.assignment("exp", "u") == Assignment("a", 2, 0.5)
    assert list(stores.units.outcomes("exp")) == [Outcome("v", "b", 3, 0.75, 14.0, 0.25, 9_000.0)]
    assert look(stores).exposed == {2: {"a": 1}, 3: {"b": 1}}
    # It came after two hours, when there were no windows, and counts; the first window is chosen under the sessions.
    assert look(stores).values["outcome"]["b"] == Summary(1, 0.25, 0.0)
    assert stores.experiments.open("exp", config(a=1, b=3) | {"outcome_window_s": 7200.0}).epoch == 3
    assert look(stores).values["outcome"]["b"].n == 1
    with pytest.raises(MarlRayError, match=r"outcome_window_s: expected 7200\.0"):
        stores.experiments.open("exp", config(a=1, b=3))
    assert act(stores, Action.ROLLBACK).weights == {"a": 1, "b": 0}
    assert [(entry.actor, entry.action, entry.epoch) for entry in stores.experiments.audit("exp")] == [
        ("migration", "open", 3),
        ("config", "open", 3),
        ("test", "rollback", 4),
    ]
    stores.close()


def test_another_programs_and_a_newer_database_are_refused_and_left_alone(empty_url, make_url):
    url = empty_url
    foreign = sa.create_engine(url)
    with foreign.begin() as connection:
        connection.execute(sa.text("CREATE TABLE experiments (experiment_id INTEGER, name VARCHAR(256))"))
    with pytest.raises(MarlRayError, match="'experiments' is another program's"):
        open_stores(url)
    assert sa.inspect(foreign).get_table_names() == ["experiments"]
    foreign.dispose()
    newer = make_url()
    open_stores(newer).close()
    engine = sa.create_engine(newer)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE marl_ray_experiments_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(MarlRayError, match="revision 9999 is of a newer marl-ray"):
        open_stores(newer)
