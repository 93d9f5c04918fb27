"""The family of runs of language models; `RunFamily` documents the functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from pettingzoo import ParallelEnv

from marl_ray.config import RunConfig
from marl_ray.rollout.protocol import BatchCollector, CollectedBatch, CollectPlan
from marl_ray.rollout.served.collector import ResponseBlock
from marl_ray.rollout.text.collector import TextBatch, TextCollector
from marl_ray.training.evaluation.held_out import HeldOutPlayer
from marl_ray.training.imitation.fine_tuning import fine_tune
from marl_ray.training.loop.listeners import Listeners, Metrics
from marl_ray.training.team import language
from marl_ray.training.team.assembly import Team
from marl_ray.training.team.language_checks import check_language

BUILDING = "loading the models"


def check(config: RunConfig, env: ParallelEnv, agents: dict[str, list[str]]) -> None:
    """Build the models without memory for their weights, and read demonstrations, data and benchmarks."""
    policies = check_language(config, env, agents)
    if config.evaluation.benchmarks:
        from marl_ray.training.evaluation.benchmarks import read_benchmarks

        read_benchmarks(config, agents, policies)


def imitate(config: RunConfig, env: ParallelEnv, team: Team, listeners: Listeners) -> None:
    """Fit the demonstrations."""
    listeners.phase("fitting the demonstrations")
    fine_tune(config, env, team, listeners.row)


def read_data(config: RunConfig, team: Team) -> dict[str, list[ResponseBlock]] | None:
    """The run's `data` as token ids of its policies; None without `data`."""
    return None if config.data is None else language.build_data(config, team.agents, team.models)


def make_collector(
    config: RunConfig,
    env: ParallelEnv,
    agents: dict[str, list[str]],
    copies: range,
    plan: CollectPlan,
    state: Mapping[str, Any] | None,
    data: Mapping[str, Sequence[ResponseBlock]] | None,
) -> TextCollector:
    """The collector of texts, or of texts that were served."""
    return language.build_text_collector(config, agents, copies, plan, state, data)


def starts_player(
    config: RunConfig, env: ParallelEnv, agents: Mapping[str, Sequence[str]], collector: BatchCollector
) -> HeldOutPlayer:
    """Evaluations play held-out tasks with the collector that training uses."""
    assert isinstance(collector, TextCollector)
    return HeldOutPlayer(config, collector)


def response_metrics(batch: CollectedBatch) -> tuple[Metrics, list[dict[str, Any]]]:
    """The tokens of responses and prompts, means of roles and environment, and the drawn episodes as text."""
    assert isinstance(batch, TextBatch)
    return language.response_metrics(batch)
