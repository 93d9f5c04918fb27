"""Schedulers decide which trials continue, which stop, and which take over another trial's weights."""

from marl_ray.config.schedulers import SchedulerSettings
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError
from marl_ray.extensions import SCHEDULER
from marl_ray.tuning.search.schedulers.protocol import (
    Exploit,
    Scheduler,
    SchedulerType,
    TrialStanding,
    TrialStandings,
    TrialVerdicts,
)

__all__ = [
    "Exploit",
    "Scheduler",
    "SchedulerSettings",
    "SchedulerType",
    "TrialStanding",
    "TrialStandings",
    "TrialVerdicts",
    "make_scheduler",
]


def make_scheduler(config: SweepConfig, total_steps: int) -> Scheduler:
    """Return the scheduler of a sweep whose runs have `total_steps` environment steps.

    Raises MarlRayError if it refuses the sweep.
    """
    kind = config.scheduler.kind
    make: SchedulerType = SCHEDULER.load(kind)
    try:
        return make(config.scheduler, config, total_steps)
    except ValueError as error:
        raise MarlRayError(f"scheduler: {kind} refuses the sweep: {error}") from error
