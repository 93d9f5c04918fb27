"""Adapters to Ray Tune's interfaces: a searcher, a callback for rows and a stopper."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import ray.tune
from ray.tune.search import Searcher as TuneSearcher
from ray.tune.stopper import Stopper

from marl_ray.tuning.records import TrialRecord
from marl_ray.tuning.running.trial_files import Leg
from marl_ray.tuning.search.plan import ENDED, SweepPlan

QUIET = ("ray.tune.analysis.experiment_analysis", "ray.tune.execution.experiment_state", "ray.tune.utils.util")
"""Tune's loggers that warn about files which nobody reads, and about every operation that takes half a second."""


def quieten() -> None:
    """Silence warnings of Tune that say nothing to the user of a sweep."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


class Searcher(TuneSearcher):
    """Hands Tune the legs that the sweep's plan decides on."""

    def __init__(
        self,
        plan: SweepPlan,
        begin: Callable[[TrialRecord], Leg],
        ended: Callable[[Leg, Mapping[str, Any] | None, bool], None],
    ):
        """`begin` makes a record's next leg. `ended` gets a leg, its result (None if there is none) and whether it
        failed."""
        super().__init__()
        self.plan, self.begin, self.ended = plan, begin, ended
        self.legs: dict[str, Leg] = {}

    def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        record = self.plan.next()
        if record is ENDED:
            return TuneSearcher.FINISHED
        if record is None:
            return None
        leg = self.begin(record)
        self.legs[trial_id] = leg
        return {"leg": asdict(leg)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        text = (result or {}).get("leg_result")
        self.ended(self.legs.pop(trial_id), json.loads(text) if text else None, error)

    def save(self, checkpoint_path: str) -> None:
        pass  # the sweep's records hold the state

    def restore(self, checkpoint_path: str) -> None:
        pass


class RowsCallback(ray.tune.Callback):
    """Passes every row of metrics to a function."""

    def __init__(self, on_rows: Callable[[Leg, list[dict[str, float]]], None]):
        """`on_rows` is called with the rows that a leg has just sent."""
        self.on_rows = on_rows

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        rows = json.loads(result.get("rows", "[]"))
        if rows:
            self.on_rows(Leg(**trial.config["leg"]), rows)

    def get_state(self) -> None:
        return None


def stopper(over: Callable[[], bool]) -> Stopper:
    """A stopper that ends all trials once `over` returns True."""

    class Over(Stopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return over()

    return Over()
