"""An experiment of the store with two arms, its units, and the clock that ends their windows."""

from typing import Any

from clocks import Clock

from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.evidence.looks import Look
from marl_ray.experiments.lifecycle import Action, ExperimentRecord
from marl_ray.experiments.store.facade import Stores
from marl_ray.experiments.store.units import Exposure

NOW = 1.7e9
"""The moment, in seconds since 1970, at which the experiment begins."""


def config(**weights: float) -> dict[str, Any]:
    return {"salt": "s", "arms": {arm: {"digest": f"digest-{arm}", "weight": w} for arm, w in weights.items()}}


def exposure(unit: str, arm: str, epoch: int = 1) -> Exposure:
    return Exposure("exp", unit, Assignment(arm, epoch, 0.5), 0.0)


def over(stores: Stores) -> None:
    """The windows of all units end."""
    assert isinstance(stores.database.clock, Clock)
    stores.database.clock.now += 1_000.0


def gradual(**weights: float) -> dict[str, Any]:
    return config(**weights) | {"strategy": "gradual", "stages": [0.1, 0.5, 1.0]}


def read_record(stores: Stores, name: str = "exp") -> ExperimentRecord:
    """The experiment as the store has it."""
    record = stores.experiments.read(name)
    assert record is not None
    return record


def act(stores: Stores, action: Action, name: str = "exp", **more: Any) -> Any:
    keys: dict[str, Any] = {"epoch": read_record(stores, name).epoch, "actor": "test", "reason": "because"}
    return stores.experiments.change(name, action, **(keys | more))


def look(stores: Stores, name: str = "exp", now: float | None = None) -> Look:
    return stores.evidence.look(read_record(stores, name), now)
