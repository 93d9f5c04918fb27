"""The reasons for which small policies on a CPU learn by torch, as lines for people."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from marl_ray.config import RunConfig
from marl_ray.training.learner.policy_update import Learner


class TorchReasons:
    """Says of each small policy on a CPU that learns by torch, once, why it does not learn by compiled code."""

    def __init__(self, config: RunConfig, device: torch.device, say: Callable[[str], None]):
        self.say, self.is_silent = say, config.has_language_models or device.type != "cpu"
        self.last_reasons = dict[str, str]()
        """Policy -> the reason that was said last."""

    def say_new(self, learners: Mapping[str, Learner]) -> None:
        """Say, on rank 0, the reasons that have changed."""
        if self.is_silent or dist.get_rank():
            return
        for name, learner in learners.items():
            if learner.reason_for_torch != self.last_reasons.get(name, ""):
                self.last_reasons[name] = learner.reason_for_torch
                self.say(f"policy {name!r}: torch takes its gradient steps, because {learner.reason_for_torch}")
