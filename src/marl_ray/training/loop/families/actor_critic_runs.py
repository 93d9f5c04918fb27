"""The family of runs of actor-critics; `RunFamily` documents the functions."""

from collections.abc import Mapping, Sequence

from pettingzoo import ParallelEnv

from marl_ray.closing import Unfinished
from marl_ray.config import RunConfig
from marl_ray.envs.copies import make_batch
from marl_ray.rollout.actor_critic.collector import ActorCriticCollector
from marl_ray.rollout.protocol import BatchCollector, CollectedBatch, CollectPlan
from marl_ray.training.evaluation.copies_player import CopiesPlayer
from marl_ray.training.imitation.warm_start import read_logged_units, warm_start
from marl_ray.training.loop.callbacks import Metrics, RunCallbacks
from marl_ray.training.team.families.actor_critic_teams import build_models
from marl_ray.training.team.members import Team

BUILDING = "making the policies"


def check(config: RunConfig, env: ParallelEnv, agents: dict[str, list[str]]) -> None:
    """Build the networks, and read the logged decisions of a warm start."""
    build_models(config, env, agents)
    if config.warm_start is not None:
        read_logged_units(config, env, agents)


def imitate(config: RunConfig, env: ParallelEnv, team: Team, callbacks: RunCallbacks) -> None:
    """Imitate the logged decisions."""
    callbacks.phase("imitating the logged decisions")
    warm_start(config, env, team, callbacks.row)


def read_data(config: RunConfig, team: Team) -> None:
    """Return None, because configs refuse `data` for actor-critics."""
    return


def make_collector(
    config: RunConfig,
    env: ParallelEnv,
    agents: dict[str, list[str]],
    copies: range,
    plan: CollectPlan,
    state: Mapping[str, object] | None,
    data: object,
) -> ActorCriticCollector:
    """Return the collector of compiled or batched environments."""
    with Unfinished() as unfinished:
        envs = unfinished.keep(
            make_batch(config.env, len(copies), list(agents.values()), config.cost_signals, config.constraints)
        )
        collector = ActorCriticCollector(env, envs, agents, copies, plan, config.seed, config.cost_signals, state)
        unfinished.pop_all()
    return collector


def starts_player(
    config: RunConfig, env: ParallelEnv, agents: Mapping[str, Sequence[str]], collector: BatchCollector
) -> CopiesPlayer:
    """Return a player with environments of its own."""
    return CopiesPlayer(config, env, agents)


def response_metrics(batch: CollectedBatch) -> tuple[Metrics, list[dict[str, object]]]:
    """Return both empty: actor-critics write no responses."""
    return {}, []
