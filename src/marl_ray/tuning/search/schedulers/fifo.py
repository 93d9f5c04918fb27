"""No scheduler: every configuration runs to its end, in the order in which it was suggested."""

from collections.abc import Mapping

from typing_extensions import override

from marl_ray.config.schedulers import FifoSettings
from marl_ray.config.sweep import SweepConfig
from marl_ray.tuning.search.schedulers.protocol import Scheduler, TrialStanding, TrialVerdicts


class FifoScheduler(Scheduler):
    """Lets every trial run to its end."""

    Settings = FifoSettings

    def __init__(self, settings: FifoSettings, sweep: SweepConfig, total_steps: int):
        pass

    @override
    def next_stop(self, steps: int) -> int | None:
        return None

    def decide(self, trials: Mapping[int, TrialStanding], more: int | None) -> TrialVerdicts:
        """Decide nothing: no trial waits."""
        return TrialVerdicts()
