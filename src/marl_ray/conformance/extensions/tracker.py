"""Checks trackers for what a run relies on when it logs to one."""

import math
import time
from collections.abc import Iterator, Mapping

from marl_ray.config import RunConfig, parse_config
from marl_ray.conformance.extensions.properties import (
    CheckedProperty,
    check_property,
    load_part,
    refuse_unknown_settings,
)
from marl_ray.extensions import TRACKER
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.tracking.sinks import check_sinks, open_sink

RUN_ID = "0123456789abcdef0123456789abcdef"
"""A made-up id, of the form that MLflow gives."""
QUICK_S = 10.0
"""Seconds that a call may take; a run waits for its rows at its end, and no longer than three times this."""
ROWS = [
    {"iteration": number, "steps": 64 * number, "timestamp": 1.7e9 + number, "return": number / 10, "loss": math.nan}
    for number in range(100)
]


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Log rows of a made-up run into a folder that is deleted again; a tracker has no settings."""
    refuse_unknown_settings("tracker", settings)
    load_part(TRACKER, name)
    with temporary_folder("check") as folder:
        data = {"name": "check", "env": {"id": "budget_dag"}, "storage": str(folder), "tracking": {"also": [name]}}
        config = parse_config(RunConfig, data, source="check tracker")
        ready = check_property("check", "it can work here", lambda: check_sinks(config))
        yield ready
        if ready.failure is not None:
            return
        yield check_property(
            "rows", "it takes rows, values that are not finite among them", lambda: _log_rows(config, name, ROWS)
        )
        yield check_property(
            "resume",
            "a run that continues repeats steps and is the same run",
            lambda: _log_rows(config, name, ROWS[50:]),
        )
        yield check_property("failure", "a run that fails closes it", lambda: _log_rows(config, name, [], "FAILED"))


def _log_rows(config: RunConfig, name: str, rows: list[dict[str, float]], status: str = "FINISHED") -> str | None:
    """Log rows as a run does, in two parts. Return which call takes too long; None if none does."""
    times = {}
    begun = time.monotonic()
    sink = open_sink(config, RUN_ID, name)
    times["opening it"] = time.monotonic()
    sink.log(rows[:1])
    sink.log(rows[1:])
    times["log"] = time.monotonic()
    sink.end(status)
    times["end"] = time.monotonic()
    for what, done in times.items():
        if done - begun > QUICK_S:
            return f"{what} took {done - begun:.0f} s, expected at most {QUICK_S:.0f} s"
        begun = done
    return None
