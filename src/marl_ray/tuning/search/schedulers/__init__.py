"""Schedulers: each decides which trials go on, which stop, and which take over another trial's weights."""

from marl_ray.config.sweep import Asha, Median, Pb2, Pbt, SweepConfig
from marl_ray.tuning.search.schedulers.asha import AshaRule
from marl_ray.tuning.search.schedulers.base import Exploit, Rule, Standing, Verdicts
from marl_ray.tuning.search.schedulers.fifo import FifoRule
from marl_ray.tuning.search.schedulers.median import MedianRule
from marl_ray.tuning.search.schedulers.pb2 import Pb2Rule
from marl_ray.tuning.search.schedulers.pbt import PbtRule

__all__ = ["Exploit", "Rule", "Standing", "Verdicts", "make_rule"]


def make_rule(config: SweepConfig, total_steps: int) -> Rule:
    """The scheduler of a sweep whose runs have `total_steps` environment steps."""
    scheduler, seed = config.scheduler, config.search.seed
    if isinstance(scheduler, Asha):
        return AshaRule(scheduler, total_steps)
    if isinstance(scheduler, Median):
        return MedianRule(scheduler, total_steps)
    if isinstance(scheduler, Pbt):
        return PbtRule(scheduler, config.space, total_steps, seed)
    if isinstance(scheduler, Pb2):
        return Pb2Rule(scheduler, config.space, total_steps, seed)
    return FifoRule()
