"""A process that advances an experiment while others do."""

from typing import Any

from marl_ray.experiments.lifecycle import Action, StaleEpochError
from marl_ray.experiments.store.experiment_store import ExperimentStore
from stores.units import stored


def advance(url: str, rounds: int, together: Any, results: Any, number: int) -> None:
    """Begin the next stage in `rounds` turns, each at the same moment as the others; `results` gets who won."""
    store = ExperimentStore(url)
    for turn in range(rounds):
        together.wait(60)
        epoch = stored(store).epoch
        together.wait(60)
        try:
            store.change("exp", Action.NEXT_STAGE, epoch=epoch, actor=str(number), reason="")
            results.put((turn, "won"))
        except StaleEpochError:
            results.put((turn, "stale"))
    store.close()
