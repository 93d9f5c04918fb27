"""Asynchronous successive halving (Li et al. 2020, arXiv 1810.05934).

Rungs lie at grace * reduction^k environment steps; of n_k trials that reach rung k, n_k / reduction continue. Unlike in
Ray's ASHA, which only stops, trials wait at their rung and are promoted later, so those that come first have no advantage.

Where the number of configurations is known, a trial continues as soon as no trial still to come can take its place. Then the
same trials are promoted in whatever order they arrive. Where it is not (a budget of hours or steps), a trial continues when
it is among the best floor(n_k / reduction) of those that have arrived, as in the paper's algorithm 2.
"""

from typing_extensions import override

from marl_ray.config.schedulers import AshaSettings
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.search.schedulers.protocol import Scheduler, TrialStandings, TrialVerdicts


class AshaScheduler(Scheduler):
    """Promotes the best part of the trials at each rung; the others wait until no place is left."""

    Settings = AshaSettings

    def __init__(self, settings: AshaSettings, sweep: SweepConfig, total_steps: int):
        self.config = settings
        self.rungs: list[int] = []
        rung = settings.grace
        while rung < total_steps:
            self.rungs.append(rung)
            rung *= settings.reduction

    @override
    def next_stop(self, steps: int) -> int | None:
        return next((rung for rung in self.rungs if rung > steps), None)

    def decide(self, trials: TrialStandings, more: int | None) -> TrialVerdicts:
        """Let the best floor(n / reduction) waiting trials of each rung continue.

        `reduction` and n are those of the module's docstring. Once nothing runs and nothing can continue, those that wait
        are stopped.
        """
        continuing: set[int] = set()
        size = len(trials) + (0 if more is None else more)
        for rung in self.rungs:
            count = trials.count_reached(rung)
            places = count // self.config.reduction
            if more is not None:
                places = max(1, size // self.config.reduction) - (size - count)
                size = max(1, size // self.config.reduction)
            continuing.update(trials.waiting_in_best(rung, places))
        idle = not continuing and more == 0 and not trials.running
        return TrialVerdicts(frozenset(continuing), frozenset(trials.waiting if idle else ()))
