"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846), synchronous.

At every decision point all living trials wait for the last. Then each of the worst `quantile` takes over weights, optimiser
state and progress of one of the best `quantile` (truncation selection), and continues with that donor's hyper-parameters,
each multiplied by one of `factors`, or with probability `resample` drawn anew. Random numbers belong to (seed, decision
point, recipient), so the same scores give the same exploits.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from marl_ray.config.schedulers import Pb2Settings, PbtSettings
from marl_ray.config.sweep import SweepConfig
from marl_ray.json_types import JsonObject
from marl_ray.tuning.search.schedulers.protocol import Exploit, Scheduler, TrialStanding, TrialVerdicts
from marl_ray.tuning.search.spaces import clip_value, draw_value


class PopulationScheduler(Scheduler):
    """The base of PBT and PB2: it chooses the times of exploits, their recipients and their donors."""

    def __init__(self, settings: PbtSettings | Pb2Settings, sweep: SweepConfig, total_steps: int):
        self.interval, self.quantile = settings.interval, settings.quantile
        self.space, self.total_steps, self.seed = sweep.space, total_steps, sweep.search.seed

    @override
    def next_stop(self, steps: int) -> int | None:
        stop = (steps // self.interval + 1) * self.interval
        return stop if stop < self.total_steps else None

    @override
    def decide(self, trials: Mapping[int, TrialStanding], more: int | None) -> TrialVerdicts:
        waiting = {number: trial for number, trial in trials.items() if trial.state == "waiting"}
        if more != 0 or not waiting or any(trial.state == "running" for trial in trials.values()):
            return TrialVerdicts()
        # Trials that are behind, because they were continued later, catch up first.
        at = min(trial.at for trial in waiting.values())
        if any(trial.at > at for trial in waiting.values()):
            return TrialVerdicts(frozenset(number for number, trial in waiting.items() if trial.at == at))
        ranked = sorted(waiting, key=lambda number: (-waiting[number].scores[at], number))
        count = min(max(1, int(len(ranked) * self.quantile)), len(ranked) // 2)
        exploits = {}
        for number in ranked[len(ranked) - count :]:
            rng = np.random.default_rng((self.seed, at, number))
            donor = ranked[int(rng.integers(count))]
            exploits[number] = Exploit(donor, self.explore(trials, donor, at, rng))
        return TrialVerdicts(frozenset(waiting), exploits=exploits)

    def explore(self, trials: Mapping[int, TrialStanding], donor: int, at: int, rng: np.random.Generator) -> JsonObject:
        """Return the recipient's new hyper-parameters."""
        raise NotImplementedError


class PbtScheduler(PopulationScheduler):
    """Lets the worst trials continue with the weights of the best and perturbed hyper-parameters."""

    Settings = PbtSettings

    def __init__(self, settings: PbtSettings, sweep: SweepConfig, total_steps: int):
        super().__init__(settings, sweep, total_steps)
        self.config = settings

    @override
    def explore(self, trials: Mapping[int, TrialStanding], donor: int, at: int, rng: np.random.Generator) -> JsonObject:
        return {key: self._perturb(key, value, rng) for key, value in trials[donor].values.items()}

    def _perturb(self, key: str, value: Any, rng: np.random.Generator) -> Any:
        dimension = self.space[key]
        if rng.random() < self.config.resample:
            return draw_value(dimension, rng)
        if dimension.values is not None:
            # A neighbour in the list.
            place = dimension.values.index(value) + (1 if rng.random() < 0.5 else -1)
            return dimension.values[min(max(place, 0), len(dimension.values) - 1)]
        factor = self.config.factors[int(rng.integers(2))]
        changed = value * factor
        if dimension.int is not None and factor != 1 and round(changed) == value:
            # By the factor alone, because no factor moves 0.
            changed = value + (1 if (factor > 1) == (value >= 0) else -1)
        return clip_value(dimension, changed)
