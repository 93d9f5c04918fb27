"""A process that advances an experiment while others do."""

from typing import Any

from marl_ray.experiments.lifecycle import Action, StaleEpochError
from marl_ray.experiments.store.facade import open_stores
from stores.units import read_record


def advance(url: str, rounds: int, together: Any, results: Any, number: int) -> None:
    """Begin the next stage in `rounds` turns, each at the same moment as the others.

    `results` gets who won.
    """
    stores = open_stores(url)
    for turn in range(rounds):
        together.wait(60)
        epoch = read_record(stores).epoch
        together.wait(60)
        try:
            stores.experiments.change("exp", Action.NEXT_STAGE, epoch=epoch, actor=str(number), reason="")
            results.put((turn, "won"))
        except StaleEpochError:
            results.put((turn, "stale"))
    stores.close()
