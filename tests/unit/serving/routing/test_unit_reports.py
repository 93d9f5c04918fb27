"""The queue of failures and costs on its way to the store."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stores.clocked_experiments import WINDOW, open_experiment

from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.store.facade import Stores
from marl_ray.experiments.store.reports import Report
from marl_ray.experiments.store.units import Exposure
from marl_ray.serving.logs.exposures import ExposureLog
from marl_ray.serving.routing.unit_reports import UnitReports


def meet(log: ExposureLog, *sessions: str) -> None:
    for session in sessions:
        log.put(Exposure("exp", session, Assignment("a", 1, 0.5), 1.0))


def stored_values(stores: Stores, metric: str) -> dict[str, float]:
    return dict(stores.units.metric_values("exp", metric))


def test_reports_wait_for_the_database_and_costs_are_added_once(stores, monkeypatch):
    open_experiment(stores)
    log = ExposureLog(stores.units)
    reports = UnitReports(stores.units, log)
    meet(log, "u", "v")
    reports.note_failure("exp", "u")
    reports.note_cost("exp", "u", 0.25)
    reports.note_cost("exp", "v", 0.5)

    def away(*_: Any, **__: Any) -> None:
        raise StoreError("experiment store: away")

    with monkeypatch.context() as patch:
        patch.setattr(stores.units, "record", away)
        for _ in range(2):
            with pytest.raises(StoreError):
                reports.write()
    reports.note_cost("exp", "u", 1.0)
    reports.write()
    reports.write()
    assert stored_values(stores, "error") == {"u": 1.0} and stored_values(stores, "cost_usd") == {"u": 1.25, "v": 0.5}


def test_what_one_experiment_has_got_is_not_written_again_where_another_one_fails(stores, monkeypatch):
    open_experiment(stores)
    log = ExposureLog(stores.units)
    reports = UnitReports(stores.units, log)
    meet(log, "u")
    reports.note_cost("exp", "u", 1.0)
    reports.note_cost("other", "u", 1.0)
    record: Callable[..., Any] = stores.units.record

    def of_one(experiment: str, *more: Any) -> Any:
        if experiment == "other":
            raise StoreError("experiment store: away")
        return record(experiment, *more)

    monkeypatch.setattr(stores.units, "record", of_one)
    for _ in range(2):
        with pytest.raises(StoreError):
            reports.write()
    assert stored_values(stores, "cost_usd") == {"u": 1.0}


def test_a_failure_that_is_noted_while_others_are_written_is_stored_too(stores):
    """Its exposure was not there yet when those of the others were written."""
    open_experiment(stores)
    log = ExposureLog(stores.units)
    late = ["late"]

    class Busy:
        """Meets another session, which fails, as soon as exposures are written."""

        def flush(self) -> None:
            log.flush()
            if late:
                meet(log, late[0])
                reports.note_failure("exp", late.pop())

    reports = UnitReports(stores.units, Busy())
    meet(log, "early")
    reports.note_failure("exp", "early")
    reports.write()
    assert stored_values(stores, "error") == {"early": 1.0, "late": 1.0}


def test_of_too_many_sessions_the_oldest_are_dropped(stores, monkeypatch, caplog):
    monkeypatch.setattr("marl_ray.serving.routing.unit_reports.MAX_REMEMBERED", 2)
    open_experiment(stores)
    log = ExposureLog(stores.units)
    reports = UnitReports(stores.units, log)
    meet(log, "u", "v", "w")
    for session in ("u", "v", "w", "v", "u", "v", "w"):
        reports.note_failure("exp", session)
    reports.write()
    assert stored_values(stores, "error") == {"v": 1.0, "w": 1.0} and caplog.text.count("are dropped") == 1


@pytest.mark.parametrize("order", [(None, 1.0), (1.0, None), (None, None)])
def test_an_incomplete_value_never_counts(stores, clock, order):
    """Whatever is added before or after, here or by another replica; unless a client reports it itself."""
    open_experiment(stores, guardrails=[{"name": "cost_usd", "margin": 0.1}])
    log = ExposureLog(stores.units)
    meet(log, "u", "v", "w")
    for usd in order:
        reports = UnitReports(stores.units, log)
        for unit in "uv":
            reports.note_cost("exp", unit, usd)
        reports.note_cost("exp", "w", 2.0)
        reports.write()
    assert stores.units.record("exp", [Report("v", {"cost_usd": 1.0})])[0].late_s is None
    clock.now += WINDOW + 1
    stores.units.record("exp", [Report("w", {}, incomplete=("cost_usd",))])  # what is judged stays
    clock.now += 2
    record = stores.experiments.read("exp")
    values = stores.evidence.judged_units(record, ["cost_usd"]).values["cost_usd"]
    assert sorted(values[~np.isnan(values)]) == [1.0, 4.0]
    assert sum(stores.evidence.look(record).reported["cost_usd"].values()) == 2
