"""Every configuration runs to its end."""

from collections.abc import Mapping

from marl_ray.tuning.search.schedulers.base import Standing, Verdicts


class FifoRule:
    """No decisions."""

    def next_stop(self, steps: int) -> int | None:
        return None

    def decide(self, trials: Mapping[int, Standing], more: int | None) -> Verdicts:
        return Verdicts()
