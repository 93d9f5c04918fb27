"""The interface through which a run collects batches, and the settings of its collectors.

For the two families of policies, `rollout.actor_critic.collector.ActorCriticCollector` and
`rollout.text.collector.TextCollector` have it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from marl_ray.json_types import JsonObject
from marl_ray.rollout.group_scores import GroupSums
from marl_ray.trajectories import Trajectories

T = TypeVar("T")


@dataclass(frozen=True)
class CollectPlan:
    """The settings of a collector: the length of a batch, and the number and kind of its episodes."""

    steps: int
    """Number of steps of every copy in a batch; with `has_whole_episodes` the greatest length of an episode."""
    has_whole_episodes: bool = False
    """A batch has one whole episode per copy. Otherwise it has a stretch of each copy's play, which may begin and end
    within an episode."""
    group_size: int = 1
    """Number of copies that share a start, with `has_whole_episodes`."""
    has_greedy_copies: bool = False
    """The first copy of every group takes the most likely actions."""
    refills: int = 0
    """Maximum number of replays of groups whose members all score the same for every policy of `refill_policies`."""
    refill_policies: tuple[str, ...] = ()
    """Policies whose scores decide whether a group is replayed."""
    branch_turns: int = 0
    """In text environments: the greatest number of later turns of a group's first episode at which the other members of
    the group answer the same prompt. Only turns of the policies in `comparing` count."""
    comparing: tuple[str, ...] = ()
    """Policies whose algorithms compare answers to one prompt."""


class BatchEpisode(Protocol):
    """The fields of a finished episode that do not depend on the family.

    `ActorCriticEpisode` and `TextEpisode` explain them.
    """

    @property
    def start(self) -> int:
        """Step at which it began. Every copy counts its steps since the run began."""

    @property
    def copy(self) -> int:
        """Number of the environment copy that played it."""

    @property
    def episode_return(self) -> float:
        """Its return: the sum of rewards, averaged over the agents."""

    @property
    def costs(self) -> tuple[float, ...]:
        """The sum of each cost signal over steps and agents."""

    @property
    def length(self) -> int:
        """Its number of environment steps."""

    @property
    def decisions(self) -> dict[str, int]:
        """Policy -> number of its decisions in the whole episode."""

    @property
    def metrics(self) -> dict[str, float]:
        """The environment's own metrics of the episode, by name."""


class CollectedBatch(Protocol):
    """A gathered batch; `ActorCriticBatch` and `TextBatch` explain the fields."""

    @property
    def trajectories(self) -> dict[str, Trajectories]:
        """Policy -> its rows."""

    @property
    def episodes(self) -> Sequence[BatchEpisode]:
        """The episodes that ended in the batch."""

    @property
    def steps(self) -> int:
        """Environment steps that were played for the batch."""


class Gather(Protocol):
    """Exchanges plain values between all workers."""

    def __call__(self, value: T, /) -> list[T]:
        """Return every worker's value, by rank."""


class BatchCollector(Protocol):
    """Plays this worker's share of the environment copies, batch by batch."""

    @property
    def group_sums(self) -> Mapping[str, GroupSums]:
        """Policy -> how its scores differed among the members of the last batch's groups."""

    @property
    def running_episodes(self) -> list[tuple[int, int]]:
        """(start, steps played) of the episodes that the next batch continues with."""

    def collect(self, players: Mapping[str, Any], iteration: int) -> CollectedBatch:
        """Play one batch.

        `players` (policy -> player) are of type `Player` or `TokenPlayer`, as the collector's family needs them.
        """

    def state(self) -> JsonObject:
        """Return plain data from which other collectors, on any number of workers, continue bit for bit."""

    def snapshot(self) -> Callable[[], JsonObject]:
        """Return the function that makes `state()` of this moment, whatever is collected meanwhile."""

    def close(self) -> None:
        """Close the environment copies."""
