"""The experiment store on any database: units, their arms and their outcomes."""

import math
import threading
import time

import numpy as np
import pytest
from clocks import Clock
from stores.single_reports import record_metrics, record_outcome
from stores.units import NOW, act, config, exposure, look, over

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import Assignment, block_of
from marl_ray.experiments.evidence.looks import ArmSummary
from marl_ray.experiments.lifecycle import Action
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.store.facade import Stores, open_stores
from marl_ray.experiments.store.notices import Notices
from marl_ray.experiments.store.reports import OutcomeConflictError, UnknownUnitError
from marl_ray.experiments.store.units import Exposure, Outcome


def test_first_exposure_stays_for_good(stores):
    stores.units.record_exposures([exposure("u", "a"), exposure("v", "b"), exposure("u", "b")])
    stores.units.record_exposures([exposure("u", "b", epoch=2)])
    stores.units.record_exposures([])
    assert stores.units.assignment("exp", "u") == Assignment("a", 1, 0.5)
    assert stores.units.assignment("exp", "w") is None
    assert {arm: part.exposures for arm, part in stores.evidence.summary("exp").items()} == {"a": 1, "b": 1}


def test_outcomes_are_idempotent_and_final_after_their_window(stores):
    stores.units.record_exposures([exposure("u", "a")])
    assert record_outcome(stores.units, "exp", "u", 0.2).arm == "a"
    record_outcome(stores.units, "exp", "u", 0.1)
    assert stores.evidence.summary("exp")["a"] == ArmSummary(
        1, 0, Summary(0, pytest.approx(math.nan, nan_ok=True), 0.0)
    )
    over(stores)
    record_outcome(stores.units, "exp", "u", 0.1)
    with pytest.raises(OutcomeConflictError, match=r"already has outcome 0\.1, got 0\.2; its window of 600 s for corr"):
        record_outcome(stores.units, "exp", "u", 0.2)
    with pytest.raises(UnknownUnitError, match="no exposure"):
        record_outcome(stores.units, "exp", "stranger", 1.0)
    assert stores.evidence.summary("exp")["a"] == ArmSummary(1, 1, Summary(1, 0.1, 0.0))


def test_summary_has_the_moments_of_the_outcomes_even_far_from_zero(stores):
    values = 1e9 + np.random.default_rng(0).normal(size=200)
    stores.units.record_exposures([exposure(f"u{i}", "b") for i in range(300)] + [exposure("v", "a")])
    for i, value in enumerate(values):
        record_outcome(stores.units, "exp", f"u{i}", float(value))
    over(stores)
    summary = stores.evidence.summary("exp")
    assert (summary["b"].exposures, summary["b"].outcomes.n) == (300, 200)
    assert summary["b"].outcomes.mean == pytest.approx(values.mean(), rel=1e-12)
    assert summary["b"].outcomes.variance == pytest.approx(values.var(ddof=1), rel=1e-4)
    assert summary["a"].exposures == 1
    assert math.isnan(summary["a"].outcomes.mean)


def test_epoch_counts_changes_of_the_assignment(stores):
    assert stores.experiments.open("exp", config(a=1, b=1)).epoch == 1
    assert stores.experiments.open("exp", config(a=1, b=1) | {"alpha": 0.01}).epoch == 1
    assert stores.experiments.open("exp", config(a=1, b=3)).epoch == 2
    assert stores.experiments.read("exp").config == config(a=1, b=3)
    assert stores.experiments.read("none") is None


def test_an_arm_with_sessions_keeps_its_bundle(stores):
    stores.experiments.open("exp", config(a=1, c=1))  # nobody has met b
    stores.units.record_exposures([exposure("u", "c")])
    with pytest.raises(
        MarlRayError, match="arm 'c' already has sessions with bundle digest-c, the config has no such arm"
    ):
        stores.experiments.open("exp", config(a=1, b=1))
    changed = config(a=1, c=1)
    changed["arms"]["c"]["digest"] = "other"
    with pytest.raises(MarlRayError, match="another bundle"):
        stores.experiments.open("exp", changed)
    assert stores.experiments.read("exp").epoch == 2


def test_replicas_that_start_and_write_together_agree(empty_url):
    url = empty_url
    errors, epochs = [], []

    def replica(k: int) -> None:
        try:
            stores = open_stores(url)
            epochs.append(stores.experiments.open("exp", config(a=1, b=1)).epoch)
            for i in range(20):
                stores.units.record_exposures([exposure(f"u{j}", "ab"[k % 2]) for j in range(i, i + 10)])
            stores.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=replica, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert epochs == [1] * 6
    assert sum(part.exposures for part in open_stores(url).evidence.summary("exp").values()) == 29


def test_outcomes_and_metrics_come_late_and_in_any_order(stores):
    stores.units.record_exposures([exposure(f"u{i}", "ab"[i % 2]) for i in range(7)])
    act(stores, Action.STOP)
    for i in (5, 1, 3, 0):
        record_outcome(stores.units, "exp", f"u{i}", i / 10, at=100.0 - i)
    record_outcome(stores.units, "exp", "u2", 0.2, at=99.0)
    expected = [("u5", 95.0), ("u3", 97.0), ("u1", 99.0), ("u2", 99.0), ("u0", 100.0)]
    for page in (1, 2, 5, 100):
        assert [(row.unit, row.at) for row in stores.units.outcomes("exp", page)] == expected
    assert next(stores.units.outcomes("exp")) == Outcome("u5", "b", 1, 0.5, 0.0, 0.5, 95.0)
    assert list(stores.units.outcomes("none")) == []


def test_metrics_are_idempotent_final_and_summed_up_by_name_and_arm(stores):
    stores.units.record_exposures([exposure(unit, arm) for unit, arm in ("ua", "va", "wb", "xb")])
    record_metrics(stores.units, "exp", "u", {"cost": 1.0, "latency_s": 0.5})
    record_metrics(stores.units, "exp", "u", {"cost": 1.0})
    record_metrics(stores.units, "exp", "v", {"cost": 4})
    assert record_metrics(stores.units, "exp", "w", {"cost": 2.0}).arm == "b"
    over(stores)
    with pytest.raises(OutcomeConflictError, match=r"metrics\.cost: session 'u' already has 1\.0, got 2\.0"):
        record_metrics(stores.units, "exp", "u", {"another": 1.0, "cost": 2.0})
    with pytest.raises(UnknownUnitError):
        record_metrics(stores.units, "exp", "stranger", {"cost": 1.0})
    for wrong in ({"": 1.0}, {"x": math.nan}, {"x": math.inf}):
        with pytest.raises(MarlRayError, match="metrics"):
            record_metrics(stores.units, "exp", "u", wrong)
    assert look(stores).values == {
        "cost": {"a": Summary(2, 2.5, 4.5), "b": Summary(1, 2.0, 0.0)},
        "error": {"a": Summary(2, 0.0, 0.0), "b": Summary(2, 0.0, 0.0)},
        "latency_s": {"a": Summary(1, 0.5, 0.0)},
    }
    assert stores.evidence.summary("exp")["a"].outcomes.n == 0
    for page in (1, 2, 100):
        assert list(stores.units.metric_values("exp", "cost", page)) == [("u", 1.0), ("v", 4.0), ("w", 2.0)]
    assert list(stores.units.metric_values("exp", "none")) == []


def test_totals_of_shadows_are_summed_over_replicas_and_replaced_by_later_ones(stores):
    assert stores.units.shadow_totals("exp") == {}
    stores.units.record_shadows("exp", "r1", {"b": {"acts": 10, "agreed": 3, "decisions": 4, "seconds": 0.5}})
    stores.units.record_shadows("exp", "r1", {"b": {"acts": 12, "agreed": 4, "decisions": 5, "seconds": 0.75}})
    texts = {"tokens": 5, "log_prob": -7.5, "served_log_prob": -2.5}
    stores.units.record_shadows("exp", "r2", {"b": {"acts": 1, "errors": 2, "dropped": 3, **texts}, "c": {"acts": 1}})
    totals = stores.units.shadow_totals("exp")
    assert list(totals) == ["b", "c"]
    assert totals["b"].pop("at") == pytest.approx(time.time(), abs=60)
    counts = {"acts": 13, "errors": 2, "dropped": 3, "decisions": 5, "agreed": 4, "seconds": 0.75}
    assert totals["b"] == counts | texts
    assert type(totals["c"]["acts"]) is int


def test_units_of_a_session_experiment_add_up_to_their_arms_moments(stores):
    values = 1e9 + np.random.default_rng(2).normal(size=60)
    for batch in range(3):
        rows = range(20 * batch, 20 * batch + 20)
        stores.units.record_exposures([exposure(f"u{i}", "ab"[i % 2]) for i in rows])
        for i in rows:
            record_outcome(stores.units, "exp", f"u{i}", float(values[i]))
        over(stores)
        look(stores)
    moments = look(stores).values["outcome"]["b"]
    assert (moments.n, moments.mean) == (30, pytest.approx(values[1::2].mean(), rel=1e-15))
    assert moments.variance == pytest.approx(values[1::2].var(ddof=1), rel=1e-4)


def write(stores: Stores, rows: list[tuple[str, str, int, str, float, float | None]]) -> None:
    """(unit, arm, epoch, cluster, exposed at, outcome)."""
    stores.units.record_exposures(
        [Exposure("exp", unit, Assignment(arm, epoch, 0.5), at, cluster) for unit, arm, epoch, cluster, at, _ in rows]
    )
    for unit, *_, value in rows:
        if value is not None:
            record_outcome(stores.units, "exp", unit, value)
    over(stores)


def test_a_cluster_is_one_observation_in_its_first_arm(url):
    stores = open_stores(url, Clock(NOW))
    stores.experiments.open("exp", config(a=1, b=1) | {"randomize": "cluster"})
    write(stores, [("u1", "a", 1, "x", 0, 1.0), ("u2", "a", 1, "x", 0, 3.0), ("u3", "a", 1, "y", 0, 5.0)])
    write(stores, [("u4", "b", 2, "x", 0, 100.0), ("u5", "b", 2, "z", 0, 7.0), ("u6", "b", 2, "w", 0, None)])
    stored = look(stores)
    assert stored.exposed == {1: {"a": 3}, 2: {"b": 3}}
    assert stored.assigned == {1: {"a": 2}, 2: {"b": 2}}
    assert stored.values["outcome"] == {"a": Summary(2, 3.5, 4.5), "b": Summary(1, 7.0, 0.0)}
    assert stored.units["b"].outcomes.n == 2
    assert stored.reporting.values["outcome"] == {"a": Summary(2, 1.0, 0.0), "b": Summary(2, 0.5, 0.5)}
    assert {arm: points[-1][1] for arm, points in stores.evidence.series("exp").items()} == stored.values["outcome"]
    with pytest.raises(
        MarlRayError, match="randomize: expected 'cluster', by which its sessions were assigned, got 's"
    ):
        stores.experiments.open("exp", config(a=1, b=1))


def test_a_block_counts_in_one_epoch_once_its_windows_are_over_without_its_washout(url):
    stores = open_stores(url, Clock(NOW))
    settings = {"randomize": "switchback", "block_s": 100.0, "washout_s": 10.0, "outcome_window_s": 50.0}
    stores.experiments.open("exp", config(a=1, b=1) | settings)
    starts = [1_700_000_000.0 + 100 * k for k in range(4)]
    first, second, mixed, last = (block_of(start, 100.0) for start in starts)
    rows = [(0, 9, "a", 1, first, 50.0), (0, 10, "a", 1, first, 1.0), (0, 99, "a", 1, first, 3.0)]
    rows += [(1, 50, "b", 1, second, 4.0), (2, 50, "a", 1, mixed, 9.0), (2, 90, "b", 2, mixed, 9.0)]
    for k, (block, after, arm, epoch, name, value) in enumerate([*rows, (3, 20, "b", 2, last, 9.0)]):
        stores.database.clock.now = starts[block] + after
        stores.units.record_exposures(
            [Exposure("exp", f"u{k}", Assignment(arm, epoch, 0.5), stores.database.clock.now, name)]
        )
        record_outcome(stores.units, "exp", f"u{k}", value)
    for after, b in ((99, Summary(1, 4.0, 0.0)), (100, Summary(2, 6.5, 12.5))):
        stores.database.clock.now = starts[3] + after
        stored = look(stores)
        assert stored.values["outcome"] == {"a": Summary(1, 2.0, 0.0), "b": b}
        assert {arm: points[-1][1] for arm, points in stores.evidence.series("exp").items()} == stored.values["outcome"]
    assert stored.blocks["outcome"] == {1: {"a": {first: 2.0}, "b": {second: 4.0}}, 2: {"b": {last: 9.0}}}
    assert stored.assigned == {1: {"a": 2, "b": 1}, 2: {"b": 1}}
    assert stored.units["a"] == ArmSummary(4, 4, Summary(4, 15.75, pytest.approx(1598.75 / 3)))
    # A session that the spool brings later is within its window, and its block waits for it.
    stores.units.record_exposures([Exposure("exp", "late", Assignment("b", 1, 0.5), starts[1] + 60, second)])
    record_outcome(stores.units, "exp", "late", 6.0)
    assert look(stores).values["outcome"]["b"] == Summary(1, 9.0, 0.0)
    stores.database.clock.now += 51.0
    assert look(stores).values["outcome"]["b"] == Summary(2, 7.0, 8.0)


def test_a_look_tells_the_weights_of_each_epoch_of_the_stage(stores):
    stores.experiments.open("exp", config(a=1, b=3))
    act(stores, Action.PAUSE)
    assert look(stores).shares == {2: {"a": 1.0, "b": 3.0}, 3: {"a": 1.0, "b": 0.0}}
    act(stores, Action.RESUME)
    assert look(stores).shares == {4: {"a": 1.0, "b": 3.0}}


def test_a_series_ends_with_everything_and_has_the_moments_asked_for(stores):
    assert stores.evidence.series("exp") == stores.evidence.series("none") == {}
    rng = np.random.default_rng(3)
    rows = [(f"u{k}", "ab"[k % 2], 10.0 + float(k), float(rng.normal())) for k in range(200)]
    stores.units.record_exposures([exposure(unit, arm) for unit, arm, *_ in rows])
    for unit, _, at, value in rows:
        record_outcome(stores.units, "exp", unit, value, at=at)
    assert stores.evidence.series("exp") == {}
    over(stores)
    for points in (1, 7, 60):
        points_of = stores.evidence.series("exp", points)
        assert points_of.keys() == {"a", "b"}
        for arm, moments in points_of.items():
            assert len(moments) == points
            times = [at for at, _ in moments]
            assert times == sorted(times) and times[-1] == pytest.approx(209.0)
            for at, stored in moments:
                known = [value for _, other_arm, when, value in rows if other_arm == arm and when < at + 1e-6]
                # What lies on the edge of two moments may belong to either.
                assert abs(stored.n - len(known)) <= 1
            assert moments[-1][1].mean == pytest.approx(np.mean(known))
            assert moments[-1][1].variance == pytest.approx(np.var(known, ddof=1))
    stores.experiments.open("one", config(a=1, b=1))
    stores.units.record_exposures([Exposure("one", "u", Assignment("a", 1, 0.5), 0.0)])
    record_outcome(stores.units, "one", "u", 2.0, at=5.0)
    over(stores)
    assert [(n.n, n.mean) for _, n in stores.evidence.series("one")["a"]] == [(1, 2.0)]


def test_a_change_is_due_until_it_is_delivered_and_one_replica_claims_it(stores):
    notices = Notices(stores.database)
    stores.experiments.change("exp", Action.ROLLBACK, epoch=None, actor="ops", reason="r", arm="b")
    ((entry, attempts),) = notices.due_changes(["exp"], 0.0, 1e10)
    assert (entry.action, entry.arm, attempts) == ("rollback", "b", 0)
    assert notices.due_changes(["other"], 0.0, 1e10) == []
    assert [notices.claim(entry.id, 100.0, 200.0) for _ in range(2)] == [True, False]
    assert notices.due_changes(["exp"], 0.0, 150.0) == []
    assert [(due.id, n) for due, n in notices.due_changes(["exp"], 0.0, 201.0)] == [(entry.id, 1)]
    assert notices.claim(entry.id, 201.0, 300.0)
    notices.note_delivery(entry.id, delivered_at=202.0, next_at=0.0)
    assert notices.due_changes(["exp"], 0.0, 1e10) == []
    assert not notices.claim(entry.id, 1e10, 2e10)


def test_bundles_to_load_ahead_are_listed_once_for_a_while(stores):
    notices = Notices(stores.database)
    for reference, at in (("models:/a/1", 10.0), ("models:/b/1", 20.0), ("models:/a/1", 30.0)):
        notices.preload(reference, at)
    assert notices.preloads(0.0) == ["models:/b/1", "models:/a/1"]
    assert notices.preloads(25.0) == ["models:/a/1"]


def test_states_are_the_same_object_until_something_changes(stores):
    first = stores.experiments.states()
    assert stores.experiments.states() is first
    stores.experiments.change("exp", Action.ROLLBACK, epoch=None, actor="ops", reason="r", arm="b")
    second = stores.experiments.states()
    assert second is not first and "b" in second["exp"].rolled_back
    stores.experiments.open("next", config(a=1))
    assert set(stores.experiments.states()) == {"exp", "next"}
