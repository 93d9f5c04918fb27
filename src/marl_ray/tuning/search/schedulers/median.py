"""Median stopping (Golovin et al. 2017, Google Vizier, section 3.2.1).

At a decision point a trial is stopped when the best score it ever had is below the median of the other trials' running
averages up to the same point.
"""

from collections.abc import Mapping
from statistics import fmean, median

from typing_extensions import override

from marl_ray.config.schedulers import MedianSettings
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.search.schedulers.protocol import Scheduler, TrialStanding, TrialVerdicts


class MedianScheduler(Scheduler):
    """Stops trials that are worse than the median of the others."""

    Settings = MedianSettings

    def __init__(self, settings: MedianSettings, sweep: SweepConfig, total_steps: int):
        self.config, self.total_steps = settings, total_steps

    @override
    def next_stop(self, steps: int) -> int | None:
        passed = (steps - self.config.grace) // self.config.interval + 1 if steps >= self.config.grace else 0
        stop = self.config.grace + passed * self.config.interval
        return stop if stop < self.total_steps else None

    def decide(self, trials: Mapping[int, TrialStanding], more: int | None) -> TrialVerdicts:
        """Stop each waiting trial whose best score is below the median of the others' running averages.

        At least `min_trials` others must have come as far; all other waiting trials continue.
        """
        waiting = [trial for trial in trials.values() if trial.state == "waiting"]
        stop = frozenset(trial.number for trial in waiting if self._hopeless(trial, trials))
        return TrialVerdicts(frozenset(trial.number for trial in waiting) - stop, stop)

    def _hopeless(self, trial: TrialStanding, trials: Mapping[int, TrialStanding]) -> bool:
        others = [
            fmean(score for at, score in other.scores.items() if at <= trial.at)
            for other in trials.values()
            if other.number != trial.number and trial.at in other.scores
        ]
        return len(others) >= self.config.min_trials and max(trial.scores.values()) < median(others)
