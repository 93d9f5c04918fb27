"""Report on a batch of text episodes: means for each role, and a few episodes in full."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from marl_ray.rollout.text.episode import TextCopy

MAX_CHARACTERS = 4_000
"""Maximum length of a prompt or response in a transcript; the middle of a longer one is left out."""

TRUNCATED_KEY = "truncated"
"""Key, not reported itself, of the count of episodes that were truncated before it was known if they were solved."""

MetricSums = dict[str, tuple[float, int]]
"""Metric -> (sum, count), which may be added over workers."""


class TranscriptLine(NamedTuple):
    """One turn of a transcript."""

    agent: str
    prompt: str
    response: str
    reward: float
    """The sum of the agent's rewards from this turn to the end of the episode."""


class Transcript(NamedTuple):
    """An episode as text."""

    copy: int
    """Number of its copy among the copies of all workers."""
    task: int
    """Index of its task in the environment's order."""
    episode_return: float
    """Return: sum of rewards, averaged over the agents."""
    solved: bool | None
    lines: list[TranscriptLine]


def make_transcript(copy: TextCopy) -> Transcript:
    """Return the episode that `copy` has played."""
    lines = [TranscriptLine(t.agent, _shorten(t.observation), _shorten(t.response), t.reward) for t in copy.turns]
    episode = copy.episode()
    return Transcript(copy.number, episode.task, episode.episode_return, episode.solved, lines)


def sum_metrics(copies: Sequence[TextCopy]) -> MetricSums:
    """Add up the metrics of the episodes that copies have played.

    For each agent they are the tokens of a response, the shares of responses that ended by themselves and that the
    environment refused, the shares of prompts that were shortened and that were too long even so, and the reward of an
    episode. Besides these, there are the environment's own metrics as `env/NAME`.
    """
    sums: MetricSums = {}

    def add(name: str, value: float) -> None:
        total, count = sums.get(name, (0.0, 0))
        sums[name] = total + value, count + 1

    for copy in copies:
        for turn in copy.turns:
            add(f"{turn.agent}/response_tokens", len(turn.completion.ids))
            add(f"{turn.agent}/ended", turn.completion.ended)
            add(f"{turn.agent}/prompt_shortened", turn.shortened)
            add(f"{turn.agent}/prompt_too_long", False)
            add(f"{turn.agent}/refused", copy.refused and turn is copy.turns[-1])
        if copy.unreading_agent is not None:
            add(f"{copy.unreading_agent}/prompt_shortened", False)
            add(f"{copy.unreading_agent}/prompt_too_long", True)
        for agent, reward in copy.rewards.items():
            add(f"{agent}/reward", reward)
        episode = copy.episode()
        for name, value in episode.metrics.items():
            add(f"env/{name}", value)
        if episode.solved is not None:
            add("env/solved", episode.solved)
        elif copy.truncated:
            add(TRUNCATED_KEY, False)
    return sums


def mean_metrics(parts: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Turn the sums of all workers into means.

    If the environment reports solved episodes, an episode that was truncated is not solved.
    """
    sums: MetricSums = {}
    for part in parts:
        for name, (total, count) in part.items():
            before, counted = sums.get(name, (0.0, 0))
            sums[name] = before + total, counted + count
    _, truncated = sums.pop(TRUNCATED_KEY, (0.0, 0))
    if "env/solved" in sums:
        total, count = sums["env/solved"]
        sums["env/solved"] = total, count + truncated
    return {name: total / count for name, (total, count) in sorted(sums.items())}


def _shorten(text: str) -> str:
    half = MAX_CHARACTERS // 2
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
