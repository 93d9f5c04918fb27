"""The interface of a family of runs, and the choice of one.

The modules `actor_critic_runs` and `language_runs` have it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pettingzoo import ParallelEnv

from marl_ray.config import RunConfig
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.rollout.protocol import BatchCollector, CollectedBatch, CollectPlan
from marl_ray.training.evaluation.fixed_starts import StartsPlayer
from marl_ray.training.loop.callbacks import Metrics, RunCallbacks
from marl_ray.training.team.members import Team


class RunFamily(Protocol):
    """The functions of a family's module."""

    BUILDING: str
    """The part of a run that makes its policies, as people are told of it."""

    def check(self, config: RunConfig, env: ParallelEnv, agents: dict[str, list[str]]) -> None:
        """Build and read what the run needs, policies without their weights.

        Raises MarlRayError that names the key, the file or the argument that does not fit.
        """

    def imitate(self, config: RunConfig, env: ParallelEnv, team: Team, callbacks: RunCallbacks) -> None:
        """Move the team's first weights by the config's `warm_start`; every worker takes part."""

    def read_data(self, config: RunConfig, team: Team) -> Any:
        """Return the run's `data` as the collector takes it."""

    def make_collector(
        self,
        config: RunConfig,
        env: ParallelEnv,
        agents: dict[str, list[str]],
        copies: range,
        plan: CollectPlan,
        state: JsonMapping | None,
        data: Any,
    ) -> BatchCollector:
        """Return the collector of these copies of the environment, or of the run's `data`.

        `state` is the snapshot of another collector, whose episodes continue.
        """

    def starts_player(
        self,
        config: RunConfig,
        env: ParallelEnv,
        agents: Mapping[str, Sequence[str]],
        collector: BatchCollector,
    ) -> StartsPlayer:
        """Return the part that plays the run's evaluations; `collector` is the one that training uses."""

    def response_metrics(self, batch: CollectedBatch) -> tuple[Metrics, list[JsonObject]]:
        """Return the metrics of all workers' responses, and a few episodes as text.

        Both are empty for actor-critics. Every worker calls it.
        """


def run_family(config: RunConfig) -> RunFamily:
    """Return the functions of the family that the run's policies belong to."""
    if config.has_language_models:
        from marl_ray.training.loop.families import language_runs  # loads transformers

        return language_runs
    from marl_ray.training.loop.families import actor_critic_runs

    return actor_critic_runs
