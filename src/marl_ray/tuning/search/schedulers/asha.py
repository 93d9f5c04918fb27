"""Asynchronous successive halving (Li et al. 2020, arXiv 1810.05934).

Rungs lie at grace * reduction^k environment steps; of n_k trials that reach rung k, n_k / reduction go on. Unlike in Ray's
ASHA, which only stops, trials wait at their rung and are promoted later, so those that come first have no advantage.

Where the number of configurations is known, a trial goes on as soon as no trial still to come can take its place. Then the
same trials are promoted in whatever order they arrive. Where it is not (a budget of hours or steps), a trial goes on when it
is among the best floor(n_k / reduction) of those that have arrived, as in the paper's algorithm 2.
"""

from collections.abc import Mapping

from marl_ray.config.schedulers import Asha
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.search.schedulers.base import TrialStanding, TrialVerdicts


class AshaScheduler:
    """Promotes the best part of the trials at each rung; the others wait until no place is left."""

    Settings = Asha

    def __init__(self, settings: Asha, sweep: SweepConfig, total_steps: int):
        self.config = settings
        self.rungs: list[int] = []
        rung = settings.grace
        while rung < total_steps:
            self.rungs.append(rung)
            rung *= settings.reduction

    def next_stop(self, steps: int) -> int | None:
        return next((rung for rung in self.rungs if rung > steps), None)

    def decide(self, trials: Mapping[int, TrialStanding], more: int | None) -> TrialVerdicts:
        """Let the best floor(n / reduction) waiting trials of each rung go on, counted as the module's text says. Once
        nothing runs and nothing can go on, stop those that wait."""
        go: set[int] = set()
        size = len(trials) + (0 if more is None else more)
        for rung in self.rungs:
            count = sum(rung in trial.scores for trial in trials.values())
            places = count // self.config.reduction
            if more is not None:
                places = max(1, size // self.config.reduction) - (size - count)
                size = max(1, size // self.config.reduction)
            # In a large sweep most decisions promote nobody, and need no order.
            best = self._ranked(trials, rung)[:places] if places > 0 else []
            promoted = (trials[number] for number in best)
            go |= {trial.number for trial in promoted if trial.state == "waiting" and trial.at == rung}
        idle = not go and more == 0 and not any(trial.state == "running" for trial in trials.values())
        waiting = (number for number, trial in trials.items() if trial.state == "waiting")
        return TrialVerdicts(frozenset(go), frozenset(waiting if idle else ()))

    def _ranked(self, trials: Mapping[int, TrialStanding], rung: int) -> list[int]:
        """Trials that have reached the rung, best first, the earlier first among equals."""
        scores = [(-trial.scores[rung], number) for number, trial in trials.items() if rung in trial.scores]
        return [number for _, number in sorted(scores)]
