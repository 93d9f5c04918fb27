"""Evaluation of language teams on held-out tasks while they train."""

from collections.abc import Mapping

from marl_ray.config import RunConfig
from marl_ray.evaluation.pass_at_k import pass_at_k, values_of_k
from marl_ray.json_types import JsonObject
from marl_ray.policies.agreement import all_gather_values
from marl_ray.rollout.text.collector import TextCollector
from marl_ray.rollout.text.episode import TextEpisode
from marl_ray.rollout.text.responses import TokenPlayer
from marl_ray.training.collectives import rank_and_world_size
from marl_ray.training.evaluation.fixed_starts import PlayedStarts, StartSet


class HeldOutPlayer:
    """Plays an evaluation's episodes with the collector that training uses; see `StartsPlayer`."""

    def __init__(self, config: RunConfig, collector: TextCollector):
        self.config, self.collector = config, collector

    def play(self, players: Mapping[str, TokenPlayer], start_set: StartSet) -> PlayedStarts:
        """Play the starts: each of the n workers plays every n-th task."""
        sampled, greedy = play_held_out(self.config, self.collector, players, start_set)
        samples = self.config.evaluation.samples
        return PlayedStarts(sampled, greedy, samples, solved_shares(sampled, greedy, samples))

    def close(self) -> None:
        """Do nothing: the collector is closed with the run."""


def play_held_out(
    config: RunConfig, collector: TextCollector, players: Mapping[str, TokenPlayer], start_set: StartSet
) -> tuple[list[TextEpisode], list[TextEpisode]]:
    """Play `evaluation.samples` sampled episodes of each held-out task, and for SELECTION a greedy one.

    Each of the n workers plays every n-th task. All of a run's evaluations of one set draw the same random numbers, so
    that only the policies differ between them. Evaluations of CONFIRMATION share no random numbers with those of
    SELECTION, and play the tasks that come after theirs, if the environment has enough tasks.
    """
    rank, workers = rank_and_world_size()
    env, settings = collector.copies[0].env, config.evaluation
    task_count = getattr(env.unwrapped, "held_out", None)
    count = settings.tasks if task_count is None else min(settings.tasks, task_count)
    first = start_set * count if task_count is None or task_count >= (start_set + 1) * count else 0
    task_numbers = range(first, first + count)[rank::workers]
    selects = start_set is StartSet.SELECTION
    greedy_part = collector.play(players, task_numbers, greedy=True, key=start_set) if selects else []
    sampled_part = collector.play(players, task_numbers, samples=settings.samples, key=start_set)
    parts = all_gather_values((sampled_part, greedy_part))
    sampled, greedy = ([episode for part in parts for episode in part[index]] for index in (0, 1))
    return (
        sorted(sampled, key=lambda episode: (episode.task, episode.sample)),
        sorted(greedy, key=lambda episode: episode.task),
    )


def solved_shares(sampled: list[TextEpisode], greedy: list[TextEpisode], samples: int) -> JsonObject:
    """Compute `greedy`, the share that greedy episodes solve, and `pass_at_k`.

    Both are missing if the environment does not report which tasks are solved, and `greedy` without greedy episodes.

    An episode that was truncated before the environment said so is not solved.
    """
    outcomes = [
        episode.solved for episode in (*greedy, *sampled) if not episode.truncated or episode.solved is not None
    ]
    if not outcomes or None in outcomes:
        return {}
    shares = {"greedy": sum(bool(e.solved) for e in greedy) / len(greedy)} if greedy else {}
    samples_of_tasks = [sampled[i : i + samples] for i in range(0, len(sampled), samples)]
    solved = [sum(bool(episode.solved) for episode in several) for several in samples_of_tasks]
    for k in values_of_k(samples):
        shares[f"pass_at_{k}"] = sum(pass_at_k(samples, count, k) for count in solved) / len(solved)
    return shares
