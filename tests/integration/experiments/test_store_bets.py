"""The experiment store on any database: bets on judged units, and values with bounds."""

import math

import numpy as np
import pytest
from clocks import Clock
from stores.units import NOW, act, config, over

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.evidence import judged_units
from marl_ray.experiments.evidence.judged_units import BetQuestion
from marl_ray.experiments.lifecycle import Action
from marl_ray.experiments.statistics.bets import BettingTest, Claim
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.reports import Report
from marl_ray.experiments.store.units import Exposure

QUESTIONS = (
    BetQuestion("outcome", "b", "a", Claim(1, 0.0, 2.0, 0.1)),
    BetQuestion("cost", "b", "a", Claim(-1, -1.0, 1.0, 0.0, False)),
    BetQuestion("outcome", "b", "a", Claim(1, 0.0, 2.0, 0.1, missing="high")),
)


def bounded_config() -> dict:
    rail = {"name": "cost", "winsorize": [-1.0, 1.0], "missing": 9.0}
    return config(a=1, b=1) | {"bounds": [0.0, 2.0], "guardrails": [rail], "outcome_window_s": 100.0}


def test_bets_go_on_from_look_to_look_whatever_the_pages(url, monkeypatch):
    monkeypatch.setattr(judged_units, "MAX_UNITS", 7)
    stores, late = (open_stores(url, Clock(NOW)) for _ in range(2))
    stores.experiments.open("exp", bounded_config())
    rng = np.random.default_rng(0)
    tests = {question: BettingTest(question.claim) for question in QUESTIONS}
    for part, share in enumerate((0.5, 0.5, 0.9)):
        if part == 2:  # other weights
            stores.experiments.open("exp", bounded_config() | {"arms": config(a=1, b=9)["arms"]})
        epoch = stores.experiments.read("exp").epoch
        names = sorted(f"{'zyx'[part]}{k}" for k in range(25))
        arms = ["b" if rng.random() < share else "a" for _ in names]
        stores.units.record_exposures(
            [Exposure("exp", name, Assignment(arm, epoch, 0.5), 0.0) for name, arm in zip(names, arms, strict=True)]
        )
        for k, (name, arm) in enumerate(zip(names, arms, strict=True)):
            outcome, cost = (round(float(x), 3) for x in rng.uniform((0, -3), (2, 3)))
            if k % 4:
                stores.units.record("exp", [Report(name, {"outcome": outcome, "cost": cost})])
            coin = np.array([arm == "b"]), np.array([share])
            if k % 4:
                tests[QUESTIONS[0]].add(np.array([outcome]), *coin)
            tests[QUESTIONS[2]].add(np.array([outcome if k % 4 else math.nan]), *coin)
            tests[QUESTIONS[1]].add(np.array([cost if k % 4 else 9.0]), *coin)
        assert (
            stores.evidence.look(stores.experiments.read("exp"), questions=QUESTIONS).bets[QUESTIONS[1]].n == 25 * part
        )
        over(stores)
        stores.units.record("exp", [Report(names[0], {"outcome": 2.0})])  # too late
    late.database.clock.now = stores.database.clock.now
    for shard in (stores, late):
        bets = shard.evidence.look(shard.experiments.read("exp"), questions=QUESTIONS).bets
        for question, test in tests.items():
            assert bets[question].n == test.memory.n
            assert bets[question].log_e == pytest.approx(test.evidence().log_e, rel=1e-9)
            assert bets[question].bound(0.3) == pytest.approx(test.evidence().bound(0.3))
    # A question that is asked later, or otherwise, begins with the first unit.
    other = BetQuestion("outcome", "b", "a", Claim(-1, 0.0, 2.0, 0.1))
    assert (
        stores.evidence.look(stores.experiments.read("exp"), questions=(*QUESTIONS, other)).bets[other].n
        == tests[QUESTIONS[0]].memory.n
    )
    assert not stores.evidence.look(stores.experiments.read("exp")).bets
    late.close()
    stores.close()


def test_an_interrupted_look_bets_on_nothing_twice(stores, monkeypatch):
    stores.experiments.open("exp", bounded_config())
    epoch = stores.experiments.read("exp").epoch
    arms = "ab" * 20
    stores.units.record_exposures(
        [Exposure("exp", f"u{k}", Assignment(arm, epoch, 0.5), 0.0) for k, arm in enumerate(arms)]
    )
    stores.units.record("exp", [Report(f"u{k}", {"outcome": 1.0 + (k % 2)}) for k in range(40)])
    over(stores)
    record, add = stores.experiments.read("exp"), BettingTest.add
    calls: list[int] = []

    def add_once(*arguments):
        add(*arguments)
        if not calls:
            calls.append(1)
            raise MarlRayError("interrupted")

    monkeypatch.setattr(BettingTest, "add", add_once)
    with pytest.raises(MarlRayError, match="interrupted"):
        stores.evidence.look(record, questions=QUESTIONS)
    assert stores.evidence.look(record, questions=QUESTIONS).bets[QUESTIONS[0]].n == 40


def test_values_outside_bounds_are_refused_and_others_kept_as_they_came(stores):
    stores.experiments.open("exp", bounded_config())
    epoch = stores.experiments.read("exp").epoch
    stores.units.record_exposures([Exposure("exp", unit, Assignment("a", epoch, 0.5), 0.0) for unit in "uvw"])
    results = stores.units.record("exp", [Report("u", {"outcome": 2.5}), Report("v", {"outcome": 2.0, "cost": 50.0})])
    assert str(results[0]) == "value: expected a number from 0 to 2, its bounds, got 2.5"
    assert not isinstance(results[1], MarlRayError)
    over(stores)
    look = stores.evidence.look(stores.experiments.read("exp"))
    assert (look.summary("outcome", "a").mean, look.summary("cost", "a").mean) == (2.0, 1.0)
    assert list(stores.units.metric_values("exp", "cost")) == [("v", 50.0)]
    units = stores.evidence.judged_units(stores.experiments.read("exp"), ["cost"])
    assert units.arms.tolist() == ["a"] * 3 and units.values["cost"].tolist() == [1.0, 50.0, 1.0]
    assert [math.isnan(value) for value in units.values["outcome"]] == [True, False, True]
    (points,) = stores.evidence.series("exp").values()
    assert points[-1][1].mean == 2.0


def test_arrivals_are_counted_by_arm_since_a_moment(stores):
    for k, arm in enumerate("aab"):
        stores.units.record_exposures([Exposure("exp", f"u{k}", Assignment(arm, 1, 0.5), 0.0)])
        stores.database.clock.now += 10
    assert stores.evidence.arrivals("exp", stores.database.clock.now - 100) == {"a": 2, "b": 1}
    assert stores.evidence.arrivals("exp", stores.database.clock.now - 25) == {"a": 1, "b": 1}


def test_units_of_an_epoch_in_which_an_arm_had_no_chance_are_not_bet_on(stores):
    stores.experiments.open("exp", bounded_config())
    act(stores, Action.PAUSE)
    epoch = stores.experiments.read("exp").epoch
    stores.units.record_exposures([Exposure("exp", f"u{k}", Assignment("a", epoch, 1.0), 0.0) for k in range(9)])
    stores.units.record("exp", [Report(f"u{k}", {"outcome": 1.0}) for k in range(9)])
    over(stores)
    look = stores.evidence.look(stores.experiments.read("exp"), questions=QUESTIONS)
    assert look.summary("outcome", "a").n == 9 and look.bets[QUESTIONS[0]].n == 0


def test_both_ends_are_bet_on_from_the_first_unit_once_one_lacks_its_outcome(stores):
    stores.experiments.open("exp", bounded_config())
    test, plain, high = BettingTest(QUESTIONS[2].claim), QUESTIONS[0], QUESTIONS[2]
    for silent, name in ((None, "u"), (3, "v"), (None, "w")):
        units = [f"{name}{k}" for k in range(10)]
        arms = ["ab"[k % 2] for k in range(10)]
        stores.units.record_exposures(
            [Exposure("exp", unit, Assignment(arm, 1, 0.5), 0.0) for unit, arm in zip(units, arms, strict=True)]
        )
        values = [None if k == silent else 0.1 * k for k in range(10)]
        stores.units.record(
            "exp", [Report(u, {"outcome": x}) for u, x in zip(units, values, strict=True) if x is not None]
        )
        test.add(np.array(values, float), np.array(arms) == "b", np.full(10, 0.5))
        over(stores)
        bets = stores.evidence.look(stores.experiments.read("exp"), questions=QUESTIONS).bets
        if name == "u":
            assert high not in bets and bets[plain].n == 10
        else:
            assert bets[high].n == test.memory.n == bets[plain].n + 1
            assert bets[high].log_e == pytest.approx(test.evidence().log_e)
