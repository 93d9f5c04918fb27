"""The collector of one worker, and what the groups that it played say."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pettingzoo import ParallelEnv

from marl_ray.config import RunConfig
from marl_ray.envs.env_copies import make_batch
from marl_ray.rollout.actor_critic.collector import Collector
from marl_ray.rollout.group_spread import GroupSums
from marl_ray.rollout.protocol import BatchCollector, CollectPlan
from marl_ray.training.collectives import gather

if TYPE_CHECKING:  # the import takes seconds, and actor-critics do not need it
    from marl_ray.rollout.served.collector import ResponseBlock


def build_collector(
    config: RunConfig,
    env: ParallelEnv,
    agents: dict[str, list[str]],
    rank: int,
    workers: int,
    state: Mapping[str, Any] | None = None,
    data: "Mapping[str, Sequence[ResponseBlock]] | None" = None,
) -> BatchCollector:
    """Make the collector of one worker's share of the environment copies, or of the run's `data`. `state` is a snapshot of
    a collector, whose episodes go on."""
    own = config.train.env_copies // workers
    copies = range(rank * own, (rank + 1) * own)
    refills = {
        name: config.hyper_of(name).dynamic_sampling for name, policy in config.team.items() if not policy.frozen
    }
    plan = CollectPlan(
        steps=config.train.horizon,
        episodes=config.whole_episodes,
        group_size=config.train.group_size,
        greedy=config.greedy,
        refills=max(refills.values()),
        refill_policies=tuple(name for name, count in refills.items() if count),
        branch_turns=config.branch_turns,
        comparing=tuple(name for name in refills if config.spec_of(name).groups),
    )
    if config.language:
        from marl_ray.training.team.language import build_text_collector

        return build_text_collector(config, agents, copies, plan, state, data)
    envs = make_batch(config.env, own, list(agents.values()), config.signals, config.constraints)
    return Collector(env, envs, agents, copies, plan, config.seed, config.signals, state)


def group_metrics(config: RunConfig, collector: BatchCollector, names: Sequence[str]) -> dict[str, float]:
    """Compute how the members of groups differed, on all workers, for each policy whose algorithm compares groups."""
    compared = [name for name in names if config.spec_of(name).groups and not config.spec_of(name).greedy]
    if not compared:
        return {}
    parts = gather({name: tuple(collector.group_sums[name]) for name in compared})
    metrics: dict[str, float] = {}
    for name in compared:
        sums = sum((GroupSums(*part[name]) for part in parts), GroupSums())
        prefix = "" if len(names) == 1 else f"{name}/"
        metrics |= {prefix + key: value for key, value in sums.metrics().items()}
    return metrics
