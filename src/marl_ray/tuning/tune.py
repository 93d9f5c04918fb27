"""The seams to Ray Tune: who is asked for trials, who watches them, who stops them all."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray.tune
from ray.tune.search import Searcher as TuneSearcher
from ray.tune.stopper import Stopper

from marl_ray.tuning.plan import ENDED, Plan
from marl_ray.tuning.trials import Leg

if TYPE_CHECKING:
    from marl_ray.tuning.driver import _Sweep


class Searcher(TuneSearcher):
    """Hands out legs as the plan says."""

    def __init__(self, sweep: "_Sweep"):
        super().__init__()
        self.sweep = sweep
        self.legs: dict[str, Leg] = {}

    def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        record = self.sweep.plan.next()
        if record is ENDED:
            return TuneSearcher.FINISHED
        if record is None:
            return None
        leg = self.sweep.leg(record)
        self.legs[trial_id] = leg
        self.sweep.save()
        return {"leg": asdict(leg)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        leg = self.legs.pop(trial_id)
        self.sweep.events.end(leg.name)
        text = (result or {}).get("outcome")
        outcome = json.loads(text) if text else None
        self.sweep.tracker.flush(leg.number)
        lost = {"error": "its process was lost again and again"} if error else {}
        self.sweep.plan.done(leg.number, outcome or lost or None, error, leg.until)

    def save(self, checkpoint_path: str) -> None:
        pass  # the sweep's records are the state

    def restore(self, checkpoint_path: str) -> None:
        pass


class Watch(ray.tune.Callback):
    """Sees every row."""

    def __init__(self, sweep: "_Sweep"):
        self.sweep = sweep

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        rows = json.loads(result.get("rows", "[]"))
        number = trial.config["leg"]["number"]
        if rows:
            self.sweep.plan.note(number, {"steps": int(rows[-1]["steps"]), "played": int(rows[-1]["played"])})
            record = self.sweep.records.trials[number]
            found = [rows[-1].get(f"objective/{metric.name}") for metric in self.sweep.config.metric]
            if all(value is not None for value in found):
                record.objectives = found
            self.sweep.tracker.log(record, rows)
            self.sweep.events.log(Leg(**trial.config["leg"]).name, rows)
            self.sweep.progress.show()

    def get_state(self) -> None:
        return None


def stopper(plan: Plan) -> Stopper:
    """Ends all trials once a budget is used up."""

    class Budget(Stopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return bool(plan.over())

    return Budget()
