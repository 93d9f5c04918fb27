"""The collector of one worker; and steps, episodes and metrics of a batch, over the parts of all workers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pettingzoo import ParallelEnv

from marl_ray.config import RunConfig
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.policies.agreement import all_gather_values
from marl_ray.rollout.group_scores import GroupSums
from marl_ray.rollout.protocol import BatchCollector, CollectedBatch, CollectPlan
from marl_ray.training.evaluation.whole_episodes import EndedEpisode, gather_episodes
from marl_ray.training.loop.callbacks import Metrics
from marl_ray.training.loop.families.run_family import run_family


def build_collector(
    config: RunConfig,
    env: ParallelEnv,
    agents: dict[str, list[str]],
    rank: int,
    workers: int,
    state: JsonMapping | None = None,
    data: Any = None,
) -> BatchCollector:
    """Make the collector of one worker's share of the environment copies, or of the run's `data`.

    `state` is a snapshot of a collector, whose episodes continue.
    """
    share = config.train.env_copies // workers
    copies = range(rank * share, (rank + 1) * share)
    refills = {
        name: config.hyper_of(name).dynamic_sampling for name, policy in config.team.items() if not policy.frozen
    }
    plan = CollectPlan(
        steps=config.train.horizon,
        has_whole_episodes=config.has_whole_episodes,
        group_size=config.train.group_size,
        has_greedy_copies=config.has_greedy_copies,
        refills=max(refills.values()),
        refill_policies=tuple(name for name, count in refills.items() if count),
        branch_turns=config.branch_turns,
        comparing=tuple(name for name in refills if config.spec_of(name).groups),
    )
    return run_family(config).make_collector(config, env, agents, copies, plan, state, data)


class GatheredBatch(NamedTuple):
    """Steps, episodes and metrics of a batch, over the parts of all workers."""

    steps: int
    """Environment steps of the batch."""
    ended: list[EndedEpisode]
    """The episodes that ended in the batch."""
    running: list[tuple[int, int]]
    """(start, steps played) of the episodes that continue."""
    responses: Metrics
    """Metrics of the responses; empty for actor-critics."""
    transcripts: list[JsonObject]
    """A few episodes as text; empty for actor-critics."""
    groups: Metrics
    """Metrics of the groups that algorithms compare."""

    def speed(self, times: Metrics) -> Metrics:
        """Return the iteration's metrics of time, with tokens per second where the batch has responses.

        An update reads both kinds of tokens. Responses differ in length, so environment steps per second say little.
        """
        if not self.responses:
            return times
        tokens = self.responses["tokens"] + self.responses["prompt_tokens"]
        return times | {"tokens_per_second": tokens * times["steps_per_second"] / max(self.steps, 1)}


def gather_batch(
    config: RunConfig, collector: BatchCollector, batch: CollectedBatch, learner_names: Sequence[str]
) -> GatheredBatch:
    """Gather steps, episodes and metrics of all workers' parts of a batch; every worker takes part."""
    ended, running, steps = gather_episodes(config, batch, collector)
    responses, transcripts = run_family(config).response_metrics(batch)
    groups = group_metrics(config, collector, learner_names)
    return GatheredBatch(steps, ended, running, responses, transcripts, groups)


def group_metrics(config: RunConfig, collector: BatchCollector, names: Sequence[str]) -> dict[str, float]:
    """Compute how the members of groups differed, on all workers, for each policy whose algorithm compares groups."""
    compared = [name for name in names if config.spec_of(name).groups and not config.spec_of(name).greedy]
    if not compared:
        return {}
    sent: dict[str, tuple[Any, ...]] = {name: tuple(collector.group_sums[name]) for name in compared}
    parts = all_gather_values(sent)
    metrics: dict[str, float] = {}
    for name in compared:
        sums = sum((GroupSums(*part[name]) for part in parts), GroupSums())
        prefix = "" if len(names) == 1 else f"{name}/"
        metrics |= {prefix + key: value for key, value in sums.metrics().items()}
    return metrics
