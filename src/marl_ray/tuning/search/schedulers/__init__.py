"""Schedulers: each decides which trials go on, which stop, and which take over another trial's weights."""

from marl_ray.config.sweep import Asha, Median, Pb2, Pbt, SweepConfig
from marl_ray.tuning.search.schedulers.asha import AshaScheduler
from marl_ray.tuning.search.schedulers.base import Exploit, Scheduler, TrialStanding, TrialVerdicts
from marl_ray.tuning.search.schedulers.fifo import FifoScheduler
from marl_ray.tuning.search.schedulers.median import MedianScheduler
from marl_ray.tuning.search.schedulers.pb2 import Pb2Scheduler
from marl_ray.tuning.search.schedulers.pbt import PbtScheduler

__all__ = ["Exploit", "Scheduler", "TrialStanding", "TrialVerdicts", "make_scheduler"]


def make_scheduler(config: SweepConfig, total_steps: int) -> Scheduler:
    """The scheduler of a sweep whose runs have `total_steps` environment steps."""
    scheduler, seed = config.scheduler, config.search.seed
    if isinstance(scheduler, Asha):
        return AshaScheduler(scheduler, total_steps)
    if isinstance(scheduler, Median):
        return MedianScheduler(scheduler, total_steps)
    if isinstance(scheduler, Pbt):
        return PbtScheduler(scheduler, config.space, total_steps, seed)
    if isinstance(scheduler, Pb2):
        return Pb2Scheduler(scheduler, config.space, total_steps, seed)
    return FifoScheduler()
