"""The experiment store on any database: when units are judged, and by what."""

import math
import threading
import time

import numpy as np
import pytest
from clocks import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from stores.single_reports import record_metrics, record_outcome
from stores.units import NOW, config, exposure, look, over
from waiting import until

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import Assignment, block_of
from marl_ray.experiments.evidence.looks import Look, look_at
from marl_ray.experiments.evidence.running_sums import Totals
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.moments import Moments
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.records import look_settings
from marl_ray.experiments.store.reports import OutcomeConflictError, Report, UnknownUnitError
from marl_ray.experiments.store.units import Exposure

WINDOW, GRACE = 60.0, 1.0


def same(first: Look, other: Look) -> bool:
    """Equal but for the rounding of sums taken in another order."""
    assert (first.exposed, first.assigned, first.reported) == (other.exposed, other.assigned, other.reported)
    assert first.units.keys() == other.units.keys()
    for arm, units in first.units.items():
        assert (units.exposures, units.judged) == (other.units[arm].exposures, other.units[arm].judged)
    for part, other_part in ((first, other), (first.reporting, other.reporting)):
        assert part.values.keys() == other_part.values.keys()
        for metric, arms in part.values.items():
            assert arms.keys() == other_part.values[metric].keys()
            for arm, moments in arms.items():
                expected = other_part.values[metric][arm]
                assert (moments.n, moments.mean) == (expected.n, pytest.approx(expected.mean, rel=1e-12, nan_ok=True))
                assert moments.variance == pytest.approx(expected.variance, rel=1e-9, abs=1e-9)
    return True


class History:
    """A record of all that the stores were given; its sums are counted anew each time."""

    def __init__(self, design: str, missing: float | str):
        more = {
            "randomize": design,
            "washout_s": 20.0,
            "block_s": 100.0,
            "outcome_window_s": WINDOW,
            "missing": missing,
        }
        self.config = config(a=1, b=1) | more | {"guardrails": [{"name": "violation"}, {"name": "cost"}]}
        self.units: list[tuple[Exposure, float]] = []
        self.reported: dict[tuple[str, str], tuple[float, float]] = {}

    def tell(self, unit: str, metric: str, value: float, now: float) -> None:
        stored_at = next(at for exposed, at in self.units if exposed.unit == unit)
        if (unit, metric) not in self.reported or now <= stored_at + WINDOW:
            self.reported[unit, metric] = value, now

    def look(self, now: float) -> Look:
        design, totals = look_settings(self.config), Totals()
        counted: dict[tuple, list[float]] = {}
        for exposed, stored_at in self.units:
            arm, epoch = exposed.assignment.arm, exposed.assignment.epoch
            cluster = "" if design.randomize == "session" else exposed.cluster
            assert cluster is not None
            totals.exposures[epoch, arm, cluster] = totals.exposures.get((epoch, arm, cluster), 0) + 1
            if stored_at > now - WINDOW - GRACE:
                continue
            counts = design.randomize != "switchback" or exposed.at % 100 >= 20
            key = epoch, arm, cluster, counts
            totals.judged[key] = totals.judged.get(key, 0) + 1
            for (unit, metric), (value, arrived_at) in self.reported.items():
                if unit == exposed.unit and arrived_at <= stored_at + WINDOW:
                    counted.setdefault((metric, *key), []).append(value)
        for metric_key, values in counted.items():
            totals.values[metric_key] = Moments(
                len(values), float(np.mean(values)), float(np.var(values)) * len(values)
            )
        return look_at(totals, design, now)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("expose"), st.integers(0, 12), st.integers(0, 3)),
        st.tuples(st.just("report"), st.integers(0, 12), st.sampled_from([0.0, 1.0, 1e6])),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 30.0, 60.0, 61.0, 200.0]), st.none()),
        st.tuples(st.just("look"), st.integers(0, 1), st.none()),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=25)
@given(
    steps=STEPS,
    design=st.sampled_from(["session", "cluster", "switchback"]),
    missing=st.sampled_from(["exclude", 0.0, 7.0]),
    seed=st.integers(0, 100),
)
def test_looks_that_go_on_are_exact_at_any_moment(make_url, steps, design, missing, seed):
    """Two stores write in turns and look now and then; every look is what a count of everything from the beginning gives."""
    url, clock, rng = make_url(), Clock(NOW), np.random.default_rng(seed)
    databases = open_stores(url, clock), open_stores(url, clock)
    history = History(design, missing)
    databases[0].experiments.open("exp", history.config)
    for turn, (what, which, detail) in enumerate([*steps, ("wait", 100.0, None), ("look", 0, None), ("look", 1, None)]):
        stores, unit = databases[turn % 2], f"u{which}"
        known = {exposed.unit for exposed, _ in history.units}
        if what == "wait":
            clock.now += which
        elif what == "look":
            assert same(look(databases[which]), history.look(clock.now))
        elif what == "expose" and unit not in known:
            # Some come from the spool, and are older.
            at = clock.now - 50.0 * (detail == 3)
            cluster = block_of(at, 100.0) if design == "switchback" else f"c{detail}"
            exposed = Exposure("exp", unit, Assignment("ab"[rng.integers(2)], 1 + turn // 20, 0.5), at, cluster)
            stores.units.record_exposures([exposed])
            history.units.append((exposed, clock.now))
        elif what == "report" and unit in known:
            for metric in ("outcome", "cost", "violation"):
                if rng.random() < 0.6:
                    value = detail + float(rng.normal())
                    result = stores.units.record("exp", [Report(unit, {metric: value})])[0]
                    late = clock.now > WINDOW + next(at for exposed, at in history.units if exposed.unit == unit)
                    changed = (unit, metric) in history.reported
                    assert isinstance(result, OutcomeConflictError) == (late and changed)
                    history.tell(unit, metric, value, clock.now)
    fresh = open_stores(url, clock)
    assert same(look(fresh), history.look(clock.now))
    for stores in (*databases, fresh):
        stores.close()


def test_looks_that_go_on_while_others_write_are_exact(url):
    """Three writers report in time and too late, correct themselves, and are looked at all the while."""
    looking, fresh = open_stores(url), open_stores(url)
    record = looking.experiments.open("exp", config(a=1, b=1) | {"outcome_window_s": 0.3, "missing": 0.0})
    errors: list[BaseException] = []

    def write(writer: int) -> None:
        try:
            stores, rng = open_stores(url), np.random.default_rng(writer)
            for turn in range(20):
                units = [f"{writer}-{turn}-{k}" for k in range(4)]
                stores.units.record_exposures([exposure(unit, "ab"[rng.integers(2)]) for unit in units])
                # The windows run by the database's own clock: real time decides which reports come too late.
                time.sleep(float(rng.uniform(0.0, 0.1)))
                for unit in units[: rng.integers(5)]:
                    stores.units.record("exp", [Report(unit, {"outcome": float(rng.normal())})])
                back = f"{writer}-{max(turn - rng.integers(8), 0)}-{rng.integers(4)}"
                stores.units.record("exp", [Report(back, {"outcome": float(rng.normal()), "cost": 1.0})])
            stores.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        looking.evidence.look(record)
        time.sleep(0.01)
    assert not errors

    def judged() -> int:
        return sum(arm.judged for arm in looking.evidence.look(record).units.values())

    until(lambda: judged() == 240, "the windows of all units to end")
    assert same(looking.evidence.look(record), fresh.evidence.look(record))
    for stores in (looking, fresh):
        stores.close()


def test_a_unit_is_judged_when_its_window_is_over_by_what_arrived_within_it(stores):
    stores.units.record_exposures([exposure("u", "a"), exposure("v", "a"), exposure("w", "b")])
    stores.database.clock.now += 600.0
    assert stores.units.record("exp", [Report("u", {"outcome": 1.0, "cost": 2.0})])[0].late_s is None
    stores.database.clock.now += 0.5
    assert stores.units.record("exp", [Report("v", {"outcome": 5.0}, at=0.0)])[0].late_s == 0.5
    assert look(stores).units["a"].judged == 0  # what arrived in time may be on its way for a second
    stores.database.clock.now += 0.5
    stored = look(stores)
    assert (stored.units["a"].exposures, stored.units["a"].judged, stored.units["a"].outcomes.n) == (2, 2, 1)
    assert stored.values["outcome"] == {"a": Summary(1, 1.0, 0.0)}
    assert stored.values["cost"] == {"a": Summary(1, 2.0, 0.0)}
    assert stored.reported == {"outcome": {"a": 1}, "cost": {"a": 1}}
    assert stored.reporting.values["outcome"] == {"a": Summary(2, 0.5, 0.5), "b": Summary(1, 0.0, 0.0)}
    # The same late value again is still late.
    assert stores.units.record("exp", [Report("v", {"outcome": 5.0})])[0].late_s == 0.5


def test_units_that_report_nothing_count_as_the_config_says(url):
    stores = open_stores(url, Clock(NOW))
    rails = [{"name": "violation"}, {"name": "cost", "missing": 3.0}, {"name": "latency_s"}]
    stores.experiments.open("exp", config(a=1, b=1) | {"missing": -1.0, "guardrails": rails})
    stores.units.record_exposures([exposure("u", "a"), exposure("v", "a"), exposure("w", "b")])
    record_outcome(stores.units, "exp", "u", 1.0)
    record_metrics(stores.units, "exp", "u", {"cost": 1.0, "latency_s": 9.0, "violation": 1.0})
    over(stores)
    assert look(stores).values == {
        "outcome": {"a": Summary(2, 0.0, 2.0), "b": Summary(1, -1.0, 0.0)},
        "cost": {"a": Summary(2, 2.0, 2.0), "b": Summary(1, 3.0, 0.0)},
        "error": {"a": Summary(2, 0.0, 0.0), "b": Summary(1, 0.0, 0.0)},
        "latency_s": {"a": Summary(1, 9.0, 0.0)},
        "violation": {"a": Summary(2, 0.5, 0.5), "b": Summary(1, 0.0, 0.0)},
    }
    # A config that counts them otherwise is a look of its own.
    stores.experiments.open("exp", config(a=1, b=1) | {"guardrails": rails, "outcome_window_s": 600.0})
    assert look(stores).values["outcome"] == {"a": Summary(1, 1.0, 0.0)}
    with pytest.raises(
        MarlRayError, match=r"outcome_window_s: expected 600\.0, by which its sessions are judged, got 5"
    ):
        stores.experiments.open("exp", config(a=1, b=1) | {"outcome_window_s": 5.0})
    stores.close()


def test_corrections_within_the_window_are_kept_with_what_they_replace(stores):
    stores.units.record_exposures([exposure("u", "a")])
    stores.units.record("exp", [Report("u", {"outcome": 1.0, "cost": 2.0})], actor="game")
    stores.database.clock.now += 10.0
    stores.units.record(
        "exp", [Report("u", {"outcome": 1.0, "cost": 3.0}), Report("u", {"outcome": 4.0})], actor="other"
    )
    changes = [
        (change.unit, change.metric, change.old, change.new, change.at, change.actor)
        for change in stores.units.corrections("exp")
    ]
    assert changes == [
        ("u", "cost", 2.0, 3.0, stores.database.clock.now, "other"),
        ("u", "outcome", 1.0, 4.0, stores.database.clock.now, "other"),
    ]
    over(stores)
    with pytest.raises(OutcomeConflictError, match="over"):
        record_metrics(stores.units, "exp", "u", {"cost": 2.0})
    assert len(stores.units.corrections("exp")) == 2
    assert look(stores).values["cost"]["a"] == Summary(1, 3.0, 0.0)


def test_a_failure_is_not_taken_back_and_what_was_measured_replaces_nothing(stores):
    stores.units.record_exposures([exposure("u", "a")])
    record_metrics(stores.units, "exp", "u", {"error": 1.0, "latency_s": 2.0})
    record_metrics(stores.units, "exp", "u", {"error": 0.0})
    stores.units.record("exp", [Report("u", {"outcome": 1.0}, measured={"latency_s": 5.0, "error": 0.0, "more": 1.0})])
    over(stores)
    record_metrics(stores.units, "exp", "u", {"error": 0.0})
    values = look(stores).values
    assert [values[metric]["a"].mean for metric in ("error", "latency_s", "more")] == [1.0, 2.0, 1.0]
    assert stores.units.corrections("exp") == []


def test_a_value_of_which_an_amount_is_unknown_never_counts(stores):
    stores.units.record_exposures([exposure("u", "a"), exposure("v", "a"), exposure("w", "a")])
    stores.units.record("exp", [Report("u", {}, incomplete=["cost"]), Report("v", {}, added={"cost": 2.0})])
    stores.units.record("exp", [Report("u", {}, added={"cost": 1.0}), Report("v", {}, added={"cost": 3.0})])
    stores.units.record("exp", [Report("u", {"outcome": 1.0}, measured={"cost": 0.0})])
    stores.units.record("exp", [Report("w", {}, incomplete=["cost"])])
    stores.units.record("exp", [Report("w", {"cost": 0.0})])  # a client knows
    over(stores)
    stores.units.record("exp", [Report("v", {}, incomplete=["cost"])])  # too late: it is judged already
    stored = look(stores)
    assert (stored.values["cost"]["a"].n, stored.values["cost"]["a"].mean) == (2, 2.5)
    assert stored.reported == {"outcome": {"a": 1}, "cost": {"a": 2}}
    assert dict(stores.units.metric_values("exp", "cost")) == {"u": 1.0, "v": 5.0, "w": 0.0}


def test_reports_of_one_batch_are_answered_one_by_one(stores):
    stores.units.record_exposures([exposure("u", "a"), exposure("v", "b"), exposure("w", "b")])
    over(stores)
    stores.units.record_exposures([exposure("x", "a")])
    record_outcome(stores.units, "exp", "u", 1.0)
    reports = [("u", 2.0), ("v", 3.0), ("stranger", 1.0), ("w", math.inf), ("x", 5.0), ("x", 6.0), ("u", 1.0)]
    results = stores.units.record("exp", [Report(unit, {"outcome": value}) for unit, value in reports])
    assert [type(result).__name__ for result in results] == [
        *(
            "OutcomeConflictError",
            "RecordedReport",
            "UnknownUnitError",
            "MarlRayError",
            "RecordedReport",
            "RecordedReport",
            "RecordedReport",
        )
    ]
    assert [results[k].assignment.arm for k in (1, 4, 5, 6)] == ["b", "a", "a", "a"]
    assert [results[k].late_s for k in (1, 4, 5, 6)] == [400.0, None, None, 400.0]
    assert {(row.unit, row.value) for row in stores.units.outcomes("exp")} == {("u", 1.0), ("v", 3.0), ("x", 6.0)}
    assert isinstance(results[2], UnknownUnitError)


def test_when_a_further_unit_is_judged_is_known(stores):
    record = stores.experiments.open("exp", config(a=1, b=1) | {"outcome_window_s": WINDOW})
    assert stores.evidence.next_judged(record) is None
    for unit in "uv":
        stores.units.record_exposures([exposure(unit, "a")])
        stores.database.clock.now += 10.0
    ends = stores.database.clock.now - 20.0 + WINDOW + GRACE, stores.database.clock.now - 10.0 + WINDOW + GRACE
    for end, judged in zip(ends, (1, 2), strict=True):
        assert stores.evidence.next_judged(record) == pytest.approx(end)
        stores.database.clock.now = end + 1e-3
        assert stores.evidence.look(record).units["a"].judged == judged
    assert stores.evidence.next_judged(record) is None


def test_a_clock_that_is_put_back_judges_nobody_twice(stores):
    stores.units.record_exposures([exposure("u", "a")])
    over(stores)
    assert look(stores).units["a"].judged == 1
    stores.database.clock.now -= 5_000.0
    stores.units.record_exposures([exposure("v", "a")])
    assert look(stores).units["a"].judged == 2  # the look's own clock stands still meanwhile
    stores.database.clock.now += 10_000.0
    assert look(stores).units["a"].judged == 2
