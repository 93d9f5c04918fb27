"""The policies of a run on one worker, with their learners and engines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pettingzoo import ParallelEnv

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.closing import close_all
from marl_ray.config import RunConfig
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.agreement import run_on_all_workers
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.training.errors import raise_gather_error
from marl_ray.training.learner.policy_update import Learner

if TYPE_CHECKING:  # the imports take seconds, and actor-critics do not need them
    from marl_ray.policies.engines.base import Engine
    from marl_ray.policies.language.token_policy import TokenPolicy
    from marl_ray.rollout.text.responses import TokenPlayer

    PolicyModel = ActorCritic | TokenPolicy
    EngineOf = Callable[[str, TokenPolicy], Engine]

TrainedTensor = Callable[[str, str], torch.Tensor | None]
"""(policy, weight of its language model) -> the trained weight complete on rank 0, with all workers; None on the others."""
WeightsSaver = Callable[[str, TrainedTensor], Path]
"""Writes weights of a team with its lineage into the folder of its first argument; returns the folder."""


@dataclass(frozen=True)
class Team(ABC):
    """The policies of a run by name.

    Each has the agents that it plays, its rollout model, and its learner unless it is frozen.
    """

    agents: dict[str, list[str]]
    models: "Mapping[str, PolicyModel]"
    learners: dict[str, Learner]
    engines: "Mapping[str, Engine]" = field(default_factory=dict)
    """Policy -> the engine that samples from it; empty for actor-critics."""

    @abstractmethod
    def players(self) -> "dict[str, Player] | dict[str, TokenPlayer]":
        """Return the current models, engines and normalisers, in the form that a collector takes.

        All workers call it together.
        """

    @abstractmethod
    def weights_saver(self, config: RunConfig, env: ParallelEnv, lineage: Lineage) -> WeightsSaver:
        """Copy the weights, and return the function that writes them, whatever the team does meanwhile.

        Weights that no worker has whole are read while they are written: see `weights_sender`.
        """

    def weights_sender(self) -> Callable[[TrainedTensor], None]:
        """Return the part that all workers but the first have in a bundle.

        The part calls its argument for each weight that the first one reads, in the same order.
        """
        return lambda trained: None

    def start(self) -> None:
        """Start the engines, all workers together, with their first weights.

        If one cannot start on any worker, all workers raise its error.
        """

        def start_own() -> None:
            for engine in self.engines.values():
                engine.start()

        run_on_all_workers(start_own)
        self.bring_weights()
        self.sleep_engines()

    def bring_weights(self) -> None:
        """Let each engine take the current weights, all workers together.

        Where one fails, all raise its error: while they gather weights they learn of it before they gather more.
        """

        def bring_own() -> None:
            for name, engine in self.engines.items():
                with raise_gather_error(f"policy {name!r}"):
                    engine.update_weights()

        run_on_all_workers(bring_own)

    def norms(self, name: str) -> tuple[ValueNorm, tuple[ValueNorm, ...]]:
        """Return the normalisers of a policy's values and cost values; fresh ones for a frozen policy."""
        if name not in self.learners:
            return ValueNorm(), ()
        state = self.learners[name].state
        return state.value_norm, state.cost_norms

    def sleep_engines(self) -> None:
        """Let the engines release memory, because the learners update now."""
        for engine in self.engines.values():
            engine.sleep()

    def close(self) -> None:
        """End the engines, all of them also where one raises an error."""
        close_all(engine.close for engine in self.engines.values())
