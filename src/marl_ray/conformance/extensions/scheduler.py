"""Checks schedulers in whole sweeps with made-up scores, by the plan that decides real ones."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.conformance.extensions.properties import CheckedProperty, check_property, load_part
from marl_ray.extensions import SCHEDULER
from marl_ray.json_types import JsonMapping
from marl_ray.tuning.records import SweepRecords, TrialRecord, identity_of
from marl_ray.tuning.search.plan import Pause, SweepPlan
from marl_ray.tuning.search.schedulers import TrialVerdicts, make_scheduler

TOTAL_STEPS = 100_000
"""Environment steps of a trial."""
TRIALS = 8
"""Trials of a made-up sweep, enough for a population in which some exploit others."""
MAX_LEGS = 1000
"""Maximum number of legs; a sweep of TRIALS trials that has more counts as endless."""


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Run made-up sweeps; `settings` are the scheduler's keys."""
    load_part(SCHEDULER, name)
    config = _sweep_config({"kind": name, **settings})
    yield check_property("settings", "unknown settings are refused by name", lambda: _check_refusal(name, settings))
    stops = check_property(
        "stops", "decision points rise and lie before the end of training", lambda: _check_stops(config)
    )
    yield stops
    if stops.failure is not None:
        return
    yield check_property(
        "verdicts", "verdicts are about waiting trials, and exploits have donors", lambda: _check_verdicts(config)
    )
    yield check_property("end", "every trial ends, with one, two or all of them at a time", lambda: _check_ends(config))
    yield check_property(
        "memory", "a sweep that is continued decides as one that was never stopped", lambda: _check_memory(config)
    )


def _sweep_config(scheduler: Mapping[str, object]) -> SweepConfig:
    run = {"env": {"id": "budget_dag"}, "train": {"total_steps": TOTAL_STEPS}}
    space = {"hyper.lr": {"loguniform": [1e-4, 1e-2]}}
    data = {"name": "check", "run": run, "space": space, "search": "random", "budget": {"trials": TRIALS}}
    return parse_config(SweepConfig, {**data, "scheduler": dict(scheduler)}, source="check scheduler")


def _check_refusal(name: str, settings: JsonMapping) -> str | None:
    try:
        SCHEDULER.load(name).Settings.model_validate({"kind": name, **settings, "no_such_setting": 1})
    except ValidationError:
        return None
    return "Settings takes a key that it does not have; expected a class that extends SchedulerSettings"


def _check_stops(config: SweepConfig) -> str | None:
    scheduler, steps = make_scheduler(config, TOTAL_STEPS), 0
    for _ in range(MAX_LEGS):
        stop = scheduler.next_stop(steps)
        if stop is None:
            return None
        if not steps < stop < TOTAL_STEPS:
            return f"next_stop({steps}) is {stop}, expected more, and less than {TOTAL_STEPS}"
        steps = stop
    return f"more than {MAX_LEGS} decision points in {TOTAL_STEPS} steps"


def _check_verdicts(config: SweepConfig) -> str | None:
    plan, faults = _make_plan(config), list[str]()
    decide = plan.scheduler.decide

    def decide_watched(trials: Any, more: int | None) -> Any:
        verdicts = decide(trials, more)
        waiting = {number for number, trial in trials.items() if trial.state == "waiting"}
        for what in ("continuing", "stopping", "exploits"):
            if others := set(getattr(verdicts, what)) - waiting:
                faults.append(f"{what} has {sorted(others)}, which do not wait")
        if both := verdicts.continuing & verdicts.stopping:
            faults.append(f"{sorted(both)} are in continuing and in stopping")
        for number, exploit in verdicts.exploits.items():
            if not config.scheduler.hands_weights:
                faults.append("exploits, although hands_weights of Settings is False")
            if exploit.donor not in trials or number not in verdicts.continuing:
                faults.append(f"the exploit of {number} has no donor, or {number} is not in continuing")
        return verdicts

    plan.scheduler.decide = decide_watched  # type: ignore[method-assign]
    _play_legs(plan, 2)
    return faults[0] if faults else None


def _check_ends(config: SweepConfig) -> str | None:
    for slots in (1, 2, TRIALS):
        plan = _make_plan(config)
        if not _play_legs(plan, slots):
            return f"{slots} at a time: the sweep is not over after {MAX_LEGS} legs"
        if waiting := [record.number for record in plan.records.trials if record.state != "ended"]:
            return f"{slots} at a time: trials {waiting} wait for ever"
        if not any(record.status == "finished" for record in plan.records.trials):
            return f"{slots} at a time: no trial is trained to its end"
    return None


def _check_memory(config: SweepConfig) -> str | None:
    """Return the difference from a sweep whose plan is made anew from its records before each leg; None without one."""
    straight = _make_plan(config)
    _play_legs(straight, 1)
    records = _make_plan(config).records
    for _ in range(MAX_LEGS):
        if not _play_legs(_make_plan(config, records), 1, 1):
            continue
        break
    first, other = ([(r.status, r.steps, r.values) for r in each.trials] for each in (straight.records, records))
    return None if first == other else "the scheduler remembers what the records do not hold"


def _make_plan(config: SweepConfig, records: SweepRecords | None = None) -> SweepPlan:
    records = records or SweepRecords(config.name, config.resolve(), identity_of(config))
    return SweepPlan(config, records)


def _play_legs(plan: SweepPlan, slots: int, legs: int = MAX_LEGS) -> bool:
    """Run this many legs, `slots` at a time; return True if the sweep is over.

    Each leg has a score that grows with the learning rate.
    """
    running: list[tuple[TrialRecord, int | None]] = []
    for _ in range(legs):
        while len(running) < slots:
            step = plan.next_step()
            if isinstance(step, Pause):
                break
            if isinstance(step, TrialVerdicts):
                # There are no weights to copy.
                plan.apply_verdicts(step, {})
                continue
            plan.begin_leg(step, [], 1.0, 0.0)
            running.append((step, plan.next_leg_end(step)))
        if not running:
            return True
        record, until = running.pop(0)
        at = TOTAL_STEPS if until is None else until
        status, score = "finished" if until is None else "waiting", record.values["hyper.lr"] * at
        played = record.played + at - record.steps
        result = {"status": status, "objectives": [score], "error": "", "steps": at, "played": played}
        plan.note_leg_end(record.number, copy.deepcopy(result), False, until)
    return False
