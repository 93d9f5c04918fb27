"""Schedulers and the plan, with scores from a formula instead of training: what continues, what stops, who copies whom."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.records import SweepRecords, TrialRecord, identity_of
from marl_ray.tuning.records_file import RecordsFile, load_records
from marl_ray.tuning.search.plan import Pause, SweepPlan, retry_failed
from marl_ray.tuning.search.schedulers import Exploit, TrialStanding, TrialStandings, TrialVerdicts, make_scheduler
from marl_ray.tuning.search.schedulers.pb2 import observed_changes, upper_bounds
from marl_ray.tuning.search.schedulers.protocol import WORST_SCORE
from marl_ray.tuning.search.spaces import TpeSearch

TOTAL = 1000
TOO_BIG = "resources.workers=9: the cluster has 2 CPUs"
FULL = "exploit of trial 0007: OSError: [Errno 28] No space left on device"
ASHA = {"scheduler": {"kind": "asha", "grace": 125, "reduction": 2}}


def config_of(count: int = 8, **keys: Any) -> SweepConfig:
    data = {
        "name": "s",
        "run": {"env": {"id": "toys.envs:countdown"}, "train": {"total_steps": TOTAL}},
        "space": {"hyper.lr": {"grid": [(k + 1) / 100 for k in range(count)]}},
    }
    return parse_config(SweepConfig, data | keys)


class Bench:
    """Runs a plan with this many slots; a trial's score at s steps is `score(values, s)`."""

    def __init__(self, config: SweepConfig, score: Callable[[dict[str, Any], int], float], records: Any = None):
        self.config, self.score = config, score
        self.records = records or SweepRecords(config.name, config.resolve(), identity_of(config))
        self.exploits: list[tuple[int, int, Exploit, int]] = []
        self.snapshots: list[SweepRecords] = []
        self.failing: dict[int, str] = {}
        self.too_big: set[float] = set()
        """The values of `hyper.lr` that no cluster can run."""
        self.refuses_all = False
        self.disk_is_full = False
        self.plan = SweepPlan(config, self.records)

    def next_trial(self) -> TrialRecord | Pause:
        """Begin a leg of the trial that is next, as the driver of a sweep does."""
        while True:
            step = self.plan.next_step()
            if isinstance(step, TrialVerdicts):
                self.plan.apply_verdicts(step, dict.fromkeys(step.exploits, FULL) if self.disk_is_full else {})
                for number, exploit in step.exploits.items():
                    self.exploits.append((number, exploit.donor, exploit, max(self.records.trials[number].scores)))
            self.note_changes()
            if isinstance(step, Pause):
                return step
            if isinstance(step, TrialRecord):
                if step.values.get("hyper.lr") not in self.too_big and not self.refuses_all:
                    self.plan.begin_leg(step, [], 1.0, 0.0)
                    self.snapshots.append(copy.deepcopy(self.records))
                    return step
                self.plan.refuse(step, TOO_BIG)
                self.note_changes()

    def note_changes(self) -> None:
        if self.plan.take_changes():
            self.snapshots.append(copy.deepcopy(self.records))

    def run(self, slots: int = 2, max_legs: int = 10**6) -> "Bench":
        running: list[tuple[TrialRecord, int | None]] = []
        for _ in range(max_legs):
            while len(running) < slots:
                record = self.next_trial()
                if isinstance(record, Pause):
                    break
                running.append((record, self.plan.next_leg_end(record)))
            if not running:
                return self
            record, until = running.pop(0)
            at = TOTAL if until is None else until
            result = {
                "status": "finished" if until is None else "waiting",
                "objectives": [self.score(record.values, at)],
                "error": "",
                "steps": at,
                "played": record.played + at - record.steps,
            }
            if record.number in self.failing:
                result = {"status": "failed", "error": self.failing[record.number]}
            self.plan.note_leg_end(record.number, result, False, until)
            self.note_changes()
        return self

    def statuses(self) -> list[str]:
        return [record.status for record in self.records.trials]


def by_lr(values: dict[str, Any], steps: int) -> float:
    return float(values["hyper.lr"] * steps)


def test_a_configuration_that_can_never_run_is_refused_and_the_others_go_on():
    bench = Bench(config_of(3), by_lr)
    bench.too_big = {0.02}
    bench.run()
    assert bench.statuses() == ["finished", "refused", "finished"]
    assert bench.records.trials[1].error == TOO_BIG
    assert bench.records.trials[1].legs == 0


def test_a_retry_starts_what_failed_and_refuses_again_what_still_can_never_run():
    bench = Bench(config_of(4), by_lr)
    bench.too_big, bench.failing = {0.02}, {2: "ValueError: broken"}
    bench.run()
    assert bench.statuses() == ["finished", "refused", "failed", "finished"]

    def retry(too_big: set[float]) -> Bench:
        records = copy.deepcopy(bench.records)
        retry_failed(records)
        again = Bench(config_of(4), by_lr, records)
        again.too_big = too_big
        return again.run()

    small, large = retry({0.02}), retry(set())
    assert small.statuses() == ["finished", "refused", "finished", "finished"]
    assert small.records.trials[1].error == TOO_BIG
    assert [record.legs for record in small.records.trials] == [1, 0, 2, 1]
    assert not Bench(config_of(4), by_lr, small.records).plan.has_work()
    assert large.statuses() == ["finished"] * 4
    assert [record.error for record in large.records.trials] == [""] * 4


@pytest.mark.parametrize("keys", [{}, ASHA])
def test_a_begun_trial_is_refused_where_the_sweep_continues_on_a_small_cluster(keys):
    bench = Bench(config_of(3, **keys), lambda values, steps: -by_lr(values, steps)).run(slots=1, max_legs=len(keys))
    begun = bench.records.trials[0] if keys else bench.next_trial()
    assert (begun.number, begun.state, begun.legs) == (0, "waiting" if keys else "running", 1)
    again = Bench(bench.config, bench.score, bench.records)
    again.too_big = {0.01}
    again.run(slots=1)
    assert again.statuses()[:2] == ["refused", "finished"]
    assert begun.legs == 1


@pytest.mark.parametrize("retried", [False, True])
def test_a_search_that_learns_is_told_of_each_trial_that_is_refused(retried):
    space = {"hyper.lr": {"uniform": [0.01, 0.1]}}
    keys = {"space": space, "search": {"kind": "tpe", "startup": 2}, "budget": {"trials": 3}}
    bench = Bench(config_of(**keys), by_lr)
    bench.refuses_all = True
    bench.run()
    if retried:
        retry_failed(bench.records)
        bench = Bench(config_of(**keys), by_lr, bench.records)
        bench.refuses_all = True
        bench.run()
    assert bench.statuses() == ["refused"] * 3
    assert isinstance(bench.plan.search, TpeSearch) and not bench.plan.search.open


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_asha_finds_the_best_with_a_fraction_of_the_steps_whatever_comes_first(slots):
    bench = Bench(config_of(**ASHA), by_lr).run(slots)
    assert bench.statuses()[-1] == "finished"
    assert bench.records.played <= 0.5 * 8 * TOTAL
    best_first = Bench(config_of(**ASHA), lambda values, steps: -by_lr(values, steps)).run(slots)
    assert best_first.statuses()[0] == "finished"
    assert best_first.records.played <= 0.5 * 8 * TOTAL


def test_asha_ends_with_a_winner_also_where_there_are_fewer_trials_than_the_reduction():
    bench = Bench(config_of(2, scheduler={"kind": "asha", "grace": 100, "reduction": 4}), by_lr).run()
    assert bench.statuses() == ["stopped", "finished"]


def test_asha_promotes_the_same_trials_in_whatever_order_they_arrive():
    merit = [3, 1, 4, 1.5, 9, 2.6, 5, 3.5]
    ends = [
        Bench(config_of(**ASHA), lambda values, steps: merit[round(values["hyper.lr"] * 100) - 1]).run(slots).records
        for slots in (1, 2, 3, 5, 8)
    ]
    assert len({tuple(record.steps for record in records.trials) for records in ends}) == 1


def test_the_scheduler_is_asked_no_more_than_once_for_a_leg_that_ends(monkeypatch):
    bench = Bench(config_of(40, **ASHA), by_lr)
    calls, decide = [], bench.plan.scheduler.decide

    def decide_and_count(trials, more):
        calls.append(more)
        return decide(trials, more)

    monkeypatch.setattr(bench.plan.scheduler, "decide", decide_and_count)
    running: list[TrialRecord] = []
    while True:
        suggested = [bench.next_trial() for _ in range(5)]  # Ray Tune asks again and again while it has room
        running += [record for record in suggested if isinstance(record, TrialRecord)]
        if not running:
            break
        record, until = running[0], bench.plan.next_leg_end(running[0])
        score = {"status": "waiting" if until else "finished", "objectives": [by_lr(running.pop(0).values, 1)]}
        bench.plan.note_leg_end(record.number, score, False, until)
    assert bench.statuses().count("finished") == 5
    legs = sum(record.legs for record in bench.records.trials)
    assert len(calls) <= legs + 2


def test_asha_without_a_known_number_of_trials_promotes_as_they_come():
    space = {"hyper.lr": {"loguniform": [0.001, 0.1]}}
    bench = Bench(config_of(space=space, search="random", budget={"steps": 6000}, **ASHA), by_lr).run()
    assert bench.records.played >= 6000
    assert "finished" in bench.statuses()
    assert len(bench.records.trials) > 8


def test_asha_goes_on_without_trials_that_failed():
    bench = Bench(config_of(4, **ASHA), by_lr)
    bench.failing = {3: "ValueError: broken"}
    bench.run()
    assert bench.records.trials[3].error == "ValueError: broken"
    assert bench.statuses()[2:] == ["finished", "failed"]


def test_median_stops_what_is_below_the_others_average():
    median = {"kind": "median", "grace": 200, "interval": 200}
    bench = Bench(config_of(scheduler=median), lambda values, steps: -by_lr(values, steps)).run(slots=1)
    assert bench.statuses() == ["finished"] * 3 + ["stopped"] * 5
    rule = make_scheduler(config_of(scheduler={"kind": "median", "grace": 300, "interval": 200}), TOTAL)
    assert [rule.next_stop(s) for s in (0, 299, 300, 499, 500, 900)] == [300, 300, 500, 500, 700, None]


PBT = {
    "scheduler": {"kind": "pbt", "interval": 250, "quantile": 0.25},
    "space": {"hyper.lr": {"loguniform": [0.001, 0.1]}, "hyper.epochs": {"int": [1, 8]}},
    "search": {"kind": "random", "seed": 3},
    "budget": {"trials": 8},
}
PB2 = PBT | {"scheduler": {"kind": "pb2", "interval": 100, "quantile": 0.25}}
TPE = PBT | {"scheduler": {"kind": "fifo"}, "search": {"kind": "tpe", "startup": 3}}


def test_a_population_waits_for_all_then_the_worst_copy_the_best_with_other_values():
    bench = Bench(config_of(**PBT), by_lr).run(slots=3)
    assert bench.statuses() == ["finished"] * 8
    assert [at for *_, at in bench.exploits] == [250, 250, 500, 500, 750, 750]
    scores = {record.number: record.scores[250] for record in bench.records.trials}
    ranked = sorted(scores, key=lambda number: scores[number])
    first = bench.exploits[:2]
    assert {recipient for recipient, *_ in first} == set(ranked[:2])
    assert {donor for _, donor, *_ in first} <= set(ranked[-2:])
    for recipient, _, what, at in bench.exploits:
        before = bench.records.trials[recipient].history[at]
        assert what.values != before
        assert 0.001 <= what.values["hyper.lr"] <= 0.1
        assert what.values["hyper.epochs"] in range(1, 9)
    again = Bench(config_of(**PBT), by_lr).run(slots=8)
    assert [(r, d, dict(w.values)) for r, d, w, _ in again.exploits] == [
        (r, d, dict(w.values)) for r, d, w, _ in bench.exploits
    ]


def test_a_trial_that_cannot_take_over_another_fails_and_the_others_go_on(monkeypatch):
    bench, known = Bench(config_of(**PBT), by_lr), []
    bench.disk_is_full = True
    monkeypatch.setattr(
        bench.plan.search, "tell", lambda number, values, scores: known.append((number, scores is None))
    )
    bench.run(slots=3)
    # As a plan that is made anew from the records tells it.
    assert sorted(known) == [(record.number, record.status == "failed") for record in bench.records.trials]
    failed = [record for record in bench.records.trials if record.status == "failed"]
    assert failed and len(failed) < 8
    assert set(bench.statuses()) == {"failed", "finished"}
    for record in failed:
        assert record.error == FULL
        assert record.exploits == []


def test_bandits_move_towards_what_improves_the_score():
    bench = Bench(config_of(**PB2), lambda v, steps: steps * -abs(v["hyper.lr"] - 0.05)).run(slots=8)
    late = [what.values["hyper.lr"] for *_, what, at in bench.exploits if at >= 700]
    assert np.mean(np.abs(np.log(late) - np.log(0.05))) < 1.0


def test_the_upper_bound_is_high_where_changes_were_good_and_where_nothing_is_known():
    x = np.linspace(0, 1, 9)[:, None]
    bounds = upper_bounds(np.ones(9), x, -((x[:, 0] - 0.25) ** 2), 2.0, np.array([[0.25], [0.9]]))
    assert bounds[0] > bounds[1]


def test_bandits_learn_from_the_values_and_the_weights_that_a_score_came_from():
    config = config_of(**PB2)
    old, new, donor = ({"hyper.lr": lr, "hyper.epochs": 1} for lr in (0.1, 0.001, 0.01))
    taker = TrialStanding(
        *(0, "waiting", {100: 5.0, 200: 6.0, 300: 1.0, 400: 9.0}, new), history={300: old}, donors={300: 1}
    )
    giver = TrialStanding(1, "waiting", {200: 7.0, 300: 8.0}, donor)
    silent = TrialStanding(2, "waiting", {100: WORST_SCORE, 200: 4.0}, donor)

    def seen(*standings: TrialStanding) -> list[tuple[float, ...]]:
        times, points, changes = observed_changes(TrialStandings(standings), config.space, 100)
        return [(t, round(float(point[0]), 6), change) for t, point, change in zip(times, points, changes, strict=True)]

    expected = [(2, 1.0, 1.0), (3, 1.0, -5.0), (4, 0.0, 1.0)]
    assert seen(taker, giver, silent) == sorted([*expected, (3, 0.5, 1.0)], key=lambda row: row[0])
    assert seen(taker) == expected[:2]  # the donor has failed since


@pytest.mark.parametrize(
    "keys", [{}, ASHA, PBT, PB2, TPE, {"scheduler": {"kind": "median", "grace": 200, "interval": 100}}]
)
def test_a_plan_taken_up_from_any_of_its_records_comes_to_the_same_end(keys):
    unbroken = Bench(config_of(**keys), by_lr).run(slots=1)
    for snapshot in unbroken.snapshots[:: max(1, len(unbroken.snapshots) // 12)]:
        resumed = Bench(config_of(**keys), by_lr, copy.deepcopy(snapshot)).run(slots=1)
        ends = [(r.status, r.values, r.objectives, r.steps) for r in resumed.records.trials]
        assert ends == [(r.status, r.values, r.objectives, r.steps) for r in unbroken.records.trials]
        done = [record.number for record in snapshot.trials if record.state == "ended"]
        assert all(resumed.records.trials[n].legs == snapshot.trials[n].legs for n in done)


@pytest.mark.parametrize(("budget", "status"), [({"trials": 3}, "finished"), ({"steps": 2500}, "interrupted")])
def test_a_budget_ends_the_sweep_and_a_bigger_one_goes_on(budget, status):
    bench = Bench(config_of(budget=budget), by_lr).run(slots=1)
    assert len(bench.records.trials) == 3
    if status == "interrupted":
        assert bench.plan.used_up() == "budget.steps=2500"
    more = Bench(config_of(), by_lr, bench.records).run()
    assert more.statuses() == ["finished"] * 8


def test_a_trial_cut_by_the_budget_is_taken_up_again_under_a_bigger_one():
    bench = Bench(config_of(budget={"steps": 500}), by_lr)
    record = bench.next_trial()
    bench.plan.note_progress(record.number, {"steps": 600, "played": 600})
    bench.plan.note_leg_end(record.number, None, False, None)
    assert record.status == "interrupted"
    assert bench.next_trial() is Pause.END
    again = Bench(config_of(), by_lr, bench.records)
    assert again.next_trial().number == record.number


def test_records_survive_their_file(tmp_path):
    config, folder = config_of(), Folder(str(tmp_path), "s")
    trial = TrialRecord(0, {"hyper.lr": 0.1}, scores={125: 1.0}, history={125: {"hyper.lr": 0.2}})
    records = SweepRecords(config.name, config.resolve(), identity_of(config), trials=[trial])
    RecordsFile(folder, records).save()
    assert load_records(folder) == records


def test_a_record_says_which_hyper_parameters_its_algorithm_does_not_read():
    run = {"env": {"id": "toys.envs:countdown"}, "constraints": [{"budget": 1}], "hyper": {"pid_ki": 0.1}}
    space = {"algorithm": {"grid": ["mappo", "pid_lagrangian"]}, "hyper.pid_kp": {"grid": [0.1]}}
    records = Bench(config_of(run=run, space=space), lambda values, steps: 0.0).run().records
    assert [record.unread for record in records.trials] == [["hyper.pid_ki", "hyper.pid_kp"], []]


def test_tunes_warnings_about_slow_operations_reach_nobody(caplog, monkeypatch):
    from ray.tune.utils import util

    from marl_ray.tuning.running.ray_tune import silence_warnings

    monkeypatch.setattr(util, "START_OF_TIME", 0.0)  # Tune warns after its first minute
    monkeypatch.setattr(util.logger, "handlers", [caplog.handler])
    level = util.logger.level
    util.logger.setLevel(logging.NOTSET)  # a sweep in this process has made it quiet already
    try:
        for expected in ("which may be a performance bottleneck", ""):
            with util.warn_if_slow("an operation", threshold=-1.0):
                pass
            assert expected in caplog.text and bool(expected) == bool(caplog.text)
            caplog.clear()
            silence_warnings()
    finally:
        util.logger.setLevel(level)
