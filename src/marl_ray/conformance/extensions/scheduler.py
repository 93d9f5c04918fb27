"""Schedulers: whole sweeps with made-up scores, decided by the plan that decides real ones."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.conformance.extensions.base import CheckedProperty, check_property, load_part
from marl_ray.extensions import SCHEDULER
from marl_ray.json_types import JsonMapping
from marl_ray.tuning.records import SweepRecords, TrialRecord, identity_of
from marl_ray.tuning.search.plan import Pause, SweepPlan
from marl_ray.tuning.search.schedulers import Exploit, make_scheduler

TOTAL_STEPS = 100_000
"""Environment steps of a trial."""
TRIALS = 8
"""Trials of a sweep: enough for a scheduler to rank and to stop some."""
MAX_LEGS = 1000
"""Legs after which a sweep of eight trials counts as endless."""


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Run made-up sweeps; `settings` are the scheduler's keys."""
    load_part(SCHEDULER, name)
    config = _config({"kind": name, **settings})
    yield check_property("settings", "unknown settings are refused by name", lambda: _refusal(name, settings))
    stops = check_property("stops", "decision points rise and lie before the end of training", lambda: _stops(config))
    yield stops
    if stops.failure is not None:
        return
    yield check_property(
        "verdicts", "verdicts are about waiting trials, and exploits have donors", lambda: _verdicts(config)
    )
    yield check_property("end", "every trial ends, with one, two or all of them at a time", lambda: _ends(config))
    yield check_property(
        "memory", "a sweep that is continued decides as one that was never stopped", lambda: _memory(config)
    )


def _config(scheduler: Mapping[str, object]) -> SweepConfig:
    run = {"env": {"id": "budget_dag"}, "train": {"total_steps": TOTAL_STEPS}}
    space = {"hyper.lr": {"loguniform": [1e-4, 1e-2]}}
    data = {"name": "check", "run": run, "space": space, "search": "random", "budget": {"trials": TRIALS}}
    return parse_config(SweepConfig, {**data, "scheduler": dict(scheduler)}, source="check scheduler")


def _refusal(name: str, settings: JsonMapping) -> str | None:
    try:
        SCHEDULER.load(name).Settings.model_validate({"kind": name, **settings, "no_such_setting": 1})
    except ValidationError:
        return None
    return "Settings takes a key that it does not have; expected a class that extends SchedulerSettings"


def _stops(config: SweepConfig) -> str | None:
    scheduler, steps = make_scheduler(config, TOTAL_STEPS), 0
    for _ in range(MAX_LEGS):
        stop = scheduler.next_stop(steps)
        if stop is None:
            return None
        if not steps < stop < TOTAL_STEPS:
            return f"next_stop({steps}) is {stop}, expected more, and less than {TOTAL_STEPS}"
        steps = stop
    return f"more than {MAX_LEGS} decision points in {TOTAL_STEPS} steps"


def _verdicts(config: SweepConfig) -> str | None:
    plan, wrong = _plan(config), []
    decide = plan.scheduler.decide

    def decide_watched(trials: Any, more: int | None) -> Any:
        verdicts = decide(trials, more)
        waiting = {number for number, trial in trials.items() if trial.state == "waiting"}
        for what, numbers in (("go", verdicts.go), ("stop", verdicts.stop), ("exploits", verdicts.exploits)):
            if others := set(numbers) - waiting:
                wrong.append(f"{what} has {sorted(others)}, which do not wait")
        if both := verdicts.go & verdicts.stop:
            wrong.append(f"{sorted(both)} are in go and in stop")
        for number, exploit in verdicts.exploits.items():
            if not config.scheduler.hands_weights:
                wrong.append("exploits, although hands_weights of Settings is False")
            if exploit.donor not in trials or number not in verdicts.go:
                wrong.append(f"the exploit of {number} has no donor, or {number} is not in go")
        return verdicts

    plan.scheduler.decide = decide_watched  # type: ignore[method-assign]
    _play(plan, 2)
    return wrong[0] if wrong else None


def _ends(config: SweepConfig) -> str | None:
    for slots in (1, 2, TRIALS):
        plan = _plan(config)
        if not _play(plan, slots):
            return f"{slots} at a time: the sweep is not over after {MAX_LEGS} legs"
        if waiting := [record.number for record in plan.records.trials if record.state != "ended"]:
            return f"{slots} at a time: trials {waiting} wait for ever"
        if not any(record.status == "finished" for record in plan.records.trials):
            return f"{slots} at a time: no trial is trained to its end"
    return None


def _memory(config: SweepConfig) -> str | None:
    """Compare with a sweep whose plan is made anew from its records before every leg."""
    straight = _plan(config)
    _play(straight, 1)
    records = _plan(config).records
    for _ in range(MAX_LEGS):
        if not _play(_plan(config, records), 1, 1):
            continue
        break
    first, other = ([(r.status, r.steps, r.values) for r in each.trials] for each in (straight.records, records))
    return None if first == other else "the scheduler remembers what the records do not hold"


def _plan(config: SweepConfig, records: SweepRecords | None = None) -> SweepPlan:
    records = records or SweepRecords(config.name, config.resolve(), identity_of(config))

    def exploit(recipient: TrialRecord, donor: TrialRecord, what: Exploit, at: int) -> None:
        """Copy no weights: there are none."""

    return SweepPlan(config, records, exploit, lambda values: None, lambda ended: None)


def _play(plan: SweepPlan, slots: int, legs: int = MAX_LEGS) -> bool:
    """Run this many legs, `slots` at a time; return True if the sweep is over.

    Each leg has a score that grows with the learning rate.
    """
    running: list[tuple[TrialRecord, int | None]] = []
    for _ in range(legs):
        while len(running) < slots:
            record = plan.next_trial()
            if isinstance(record, Pause):
                break
            running.append((record, plan.leg_end(record)))
        if not running:
            return True
        record, until = running.pop(0)
        at = TOTAL_STEPS if until is None else until
        status, score = "finished" if until is None else "waiting", record.values["hyper.lr"] * at
        played = record.played + at - record.steps
        result = {"status": status, "objectives": [score], "error": "", "steps": at, "played": played}
        plan.leg_ended(record.number, copy.deepcopy(result), False, until)
    return False
