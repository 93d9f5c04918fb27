"""Locates a reward or a cost that is not finite in a batch: agent, step and seed of its episode."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marl_ray.config import RunConfig
from marl_ray.config.random_streams import ATTEMPT_BITS
from marl_ray.policies.agreement import all_gather_values
from marl_ray.rollout.actor_critic.collector import ActorCriticBatch
from marl_ray.rollout.protocol import CollectedBatch
from marl_ray.rollout.rng import episode_seed
from marl_ray.training.collectives import rank_and_world_size


class NotFinitePlace(NamedTuple):
    """The place of a number that is not finite; places are ordered by time."""

    step: int
    """Step of the batch, from 0."""
    copy: int
    """Number of the environment copy among those of all workers."""
    text: str
    """A text such as `the reward of scout is nan`."""
    ended: int
    """Number of episodes of this copy that ended before in the batch."""
    begun: int
    """Number of the episode that this copy began the batch with."""
    start: int
    """Step at which the episode began; see `ActorCriticEpisode.start`."""


def describe_not_finite(
    config: RunConfig,
    agents: Mapping[str, Sequence[str]],
    batch: CollectedBatch,
    running: Sequence[tuple[int, int]],
    iteration: int,
) -> str:
    """Return `: the reward of ...` about the first reward or cost that is not finite.

    The text is empty if all are finite. All workers' batches are looked at, and every worker takes part. `running` are
    the starts of this worker's episodes that continue.
    """
    place_here = find_not_finite(config, agents, batch, running) if isinstance(batch, ActorCriticBatch) else None
    sent: tuple[Any, ...] | None = place_here and tuple(place_here)
    places = [NotFinitePlace(*place) for place in all_gather_values(sent) if place is not None]
    if not places:
        return ""
    first = min(places)
    step = iteration * config.train.horizon + first.step - first.start + 1
    if not config.has_whole_episodes:
        seed = episode_seed(config.seed, first.copy, first.begun + first.ended)
    elif not any(config.hyper_of(name).dynamic_sampling for name in batch.trajectories):
        seed = episode_seed(config.seed, first.copy // config.train.group_size, iteration << ATTEMPT_BITS)
    else:  # the group may have been played again, from another start
        return f": {first.text} at step {step} of an episode"
    return f": {first.text} at step {step} of the episode of reset(seed={seed})"


def find_not_finite(
    config: RunConfig, agents: Mapping[str, Sequence[str]], batch: ActorCriticBatch, running: Sequence[tuple[int, int]]
) -> NotFinitePlace | None:
    """Return the first reward or cost of this worker's batch that is not finite.

    Return None if all are finite.
    """
    places: list[NotFinitePlace] = []
    rank, workers = rank_and_world_size()
    for name, rows in batch.trajectories.items():
        members = agents[name]
        for signal, values in (("reward", rows.rewards[..., None]), ("cost", rows.costs)):
            steps = [(t, *divmod(row, len(members)), k) for row, t, k in (~values.isfinite()).nonzero().tolist()]
            if not steps:
                continue
            step, c, agent, k = min(steps)
            subject = f"the reward of {members[agent]}" if signal == "reward" else f"cost {k} of the team"
            copy = rank * (config.train.env_copies // workers) + c
            episodes = sorted((e.step, e.start) for e in batch.episodes if e.copy == copy)
            later = [start for end, start in episodes if end >= step]
            starts = later + [start for start, _ in running[c : c + 1]] + [start for _, start in episodes]
            places.append(
                NotFinitePlace(
                    step,
                    copy,
                    f"{subject} is {float(values[c * len(members) + agent, step, k])}",
                    len(episodes) - len(later),
                    int(rows.episode[c * len(members)]),
                    starts[0],
                )
            )
    return min(places, default=None)
