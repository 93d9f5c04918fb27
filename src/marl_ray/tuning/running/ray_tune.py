"""The legs of a sweep on Ray Tune, behind a searcher, a callback for what legs report, and a stopper."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import ray.tune
from ray.tune.search import Searcher as TuneSearcher
from ray.tune.stopper import Stopper
from typing_extensions import override

from marl_ray.json_types import JsonObject
from marl_ray.temporary_folders import new_temporary_folder
from marl_ray.tuning.running.capacity import resources_of
from marl_ray.tuning.running.sweep_legs import SweepLegs
from marl_ray.tuning.running.trial_files import Leg
from marl_ray.tuning.running.trials import trial_function
from marl_ray.tuning.search.plan import Pause

QUIET_LOGGERS = ("ray.tune.analysis.experiment_analysis", "ray.tune.execution.experiment_state", "ray.tune.utils.util")
"""Tune's loggers that warn about files which nobody reads, and about every operation that takes half a second."""
LOST_RETRIES = 3
"""Number of times that a leg is restarted after its process was lost."""
TUNE_VARIABLES = {
    # The product writes these files itself, into the sweep's folder.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # Ctrl-C ends the sweep at once; running the same command again continues it.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Tune's own pickled state is never read.
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",
    # The product prints its own table.
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Environment variables of Tune while a sweep runs."""


def run_legs(concurrent: int, legs: SweepLegs) -> None:
    """Run legs, `concurrent` at a time, until the sweep has no more."""
    sweep = legs.config.name
    silence_warnings()
    scratch = new_temporary_folder("tune")
    try:
        with _environment(TUNE_VARIABLES):
            tuner = ray.tune.Tuner(
                ray.tune.with_resources(trial_function(sweep), resources_of),
                tune_config=ray.tune.TuneConfig(
                    search_alg=Searcher(legs),
                    num_samples=-1,
                    max_concurrent_trials=concurrent,
                    reuse_actors=True,
                    trial_name_creator=lambda t: Leg(**t.config["leg"]).name,
                    trial_dirname_creator=lambda t: Leg(**t.config["leg"]).name,
                ),
                run_config=ray.tune.RunConfig(
                    name=sweep,
                    storage_path=str(scratch),
                    failure_config=ray.tune.FailureConfig(max_failures=LOST_RETRIES),
                    callbacks=[ReportsCallback(legs)],
                    stop=make_stopper(legs.is_over),
                    verbose=0,
                ),
            )
            tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a block."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def silence_warnings() -> None:
    """Silence warnings of Tune that say nothing to the user of a sweep."""
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


class Searcher(TuneSearcher):
    """Hands Tune the legs of the sweep."""

    def __init__(self, legs: SweepLegs):
        super().__init__()
        self.legs = legs
        self.running: dict[str, Leg] = {}
        """Tune's name of a trial -> the leg that it runs."""

    @override
    def set_search_properties(self, *args: object, **kwargs: object) -> bool:
        return True

    @override
    def suggest(self, trial_id: str) -> Any:
        leg = self.legs.next_leg()
        if isinstance(leg, Pause):
            return TuneSearcher.FINISHED if leg is Pause.END else None
        self.running[trial_id] = leg
        return {"leg": asdict(leg)}

    @override
    def on_trial_complete(self, trial_id: str, result: JsonObject | None = None, error: bool = False) -> None:
        text = (result or {}).get("leg_result")
        self.legs.note_end(self.running.pop(trial_id), json.loads(text) if text else None, error)

    @override
    def save(self, checkpoint_path: str) -> None:
        pass  # the sweep's records hold the state

    @override
    def restore(self, checkpoint_path: str) -> None:
        pass


class ReportsCallback(ray.tune.Callback):
    """Passes on what the legs report: rows of metrics, and lines for the user."""

    def __init__(self, legs: SweepLegs):
        self.legs = legs

    @override
    def on_trial_result(self, iteration: int, trials: object, trial: Any, result: JsonObject, **info: object) -> None:
        leg, rows = Leg(**trial.config["leg"]), json.loads(result.get("rows", "[]"))
        if rows:
            self.legs.note_rows(leg, rows)
        if "line" in result:
            self.legs.say(leg, json.loads(result["line"]))

    @override
    def get_state(self) -> None:
        return None


def make_stopper(over: Callable[[], bool]) -> Stopper:
    """Return a stopper that ends all trials once `over` returns True."""

    class Over(Stopper):
        def __call__(self, trial_id: str, result: dict[str, object]) -> bool:
            return False

        def stop_all(self) -> bool:
            return over()

    return Over()
