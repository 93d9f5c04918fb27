"""Hold back training episodes from averages until every episode that began no later has ended.

Short episodes are over-represented among those that have ended by some moment. In a gridworld quick successes end
first, so a team that succeeds in one of seven episodes seems to succeed in six of seven. The set of all episodes that
began before some moment has no such bias. So an ended episode is held back until all episodes that began before it, or
with it, have ended too.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from marl_ray.config import RunConfig
from marl_ray.policies.agreement import all_gather_values
from marl_ray.rollout.protocol import BatchCollector, BatchEpisode, CollectedBatch


class EndedEpisode(NamedTuple):
    """An episode that has ended."""

    start: int
    """Step at which it began, counted in every copy since the run began."""
    copy: int
    """Number of its copy among the copies of all workers."""
    episode_return: float
    """Return: sum of rewards, averaged over the agents."""
    costs: tuple[float, ...]
    """The sum of each cost signal over the episode."""
    length: int
    """Environment steps, or turns of all agents."""
    decisions: dict[str, int]
    """Policy -> number of its decisions in the whole episode."""
    metrics: dict[str, float]
    """The numbers that an environment of actor-critics has reported of the episode; those of texts are means of a batch."""

    @classmethod
    def from_episode(cls, episode: BatchEpisode, metrics: dict[str, float]) -> "EndedEpisode":
        """Keep the fields of a collector's episode that both families of policies have."""
        counted = episode.start, episode.copy, episode.episode_return, episode.costs, episode.length
        return cls(*counted, episode.decisions, metrics)


def reported_means(metrics: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of what the environment has reported, as `env/NAME`, over the episodes that have the number."""
    names = dict.fromkeys(name for each in metrics for name in each)
    values = {name: [each[name] for each in metrics if name in each] for name in names}
    return {f"env/{name}": sum(numbers) / len(numbers) for name, numbers in values.items()}


def release_episodes(
    ended: Iterable[EndedEpisode], running: Iterable[int]
) -> tuple[list[EndedEpisode], list[EndedEpisode]]:
    """Divide ended episodes into those that are released and those that are held back.

    Both are ordered by start and copy. `running` are the starts of all episodes that have not ended. Episodes are
    released in the order in which they began, whatever the order in which they end.
    """
    earliest = min(running, default=None)
    in_order = sorted(ended, key=lambda episode: (episode.start, episode.copy))
    count = sum(earliest is None or episode.start < earliest for episode in in_order)
    return in_order[:count], in_order[count:]


def blocking_starts(running: Sequence[tuple[int, int]], max_steps: int) -> list[int]:
    """Return the starts of running episodes that delay the release of episodes that began later.

    The episodes are given as (start, steps played). One that has played `max_steps` delays no others: it
    might never end.
    """
    return [start for start, played in running if played < max_steps]


def gather_episodes(
    config: RunConfig, batch: CollectedBatch, collector: BatchCollector
) -> tuple[list[EndedEpisode], list[tuple[int, int]], int]:
    """Gather the ended episodes of all workers, the starts of those that continue, and the number of steps.

    A start comes as (start, steps played). Greedy episodes, which are the baselines of groups, are left out: they do
    not measure the policy that samples.
    """
    sampled = [e for e in batch.episodes if not (config.has_greedy_copies and e.copy % config.train.group_size == 0)]
    sent: list[tuple[Any, ...]] = [
        tuple(EndedEpisode.from_episode(e, {} if config.has_language_models else e.metrics)) for e in sampled
    ]
    parts = all_gather_values((sent, collector.running_episodes, batch.steps))
    ended = [EndedEpisode(*episode) for part, _, _ in parts for episode in part]
    return ended, [start for _, part, _ in parts for start in part], sum(steps for _, _, steps in parts)
