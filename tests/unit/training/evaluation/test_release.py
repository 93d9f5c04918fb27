"""Training episodes are averaged by start, never by end."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from marl_ray.training.evaluation.whole_episodes import EndedEpisode, blocking_starts, release_episodes

LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5)
"""Lengths of the episodes of each copy, one after another; the last one is still running when the play ends."""


def release(lengths: Sequence[Sequence[int]], every: int, held: Sequence[int]) -> list[list[EndedEpisode]]:
    """The episodes released after every `every` steps of all copies, where the copies report in the order `held`."""
    episodes = []
    for copy, copy_lengths in enumerate(lengths):
        at = 0
        for length in copy_lengths:
            episodes.append((at, at + length, copy))
            at += length
    last = min(sum(copy_lengths) for copy_lengths in lengths)
    waiting: list[EndedEpisode] = []
    parts = []
    for now in range(every, last + every, every):
        ended = [(a, b, c) for a, b, c in episodes if now - every < b <= min(now, last)]
        running = [a for a, b, _ in episodes if a < now < b or b > last >= a]
        new = [EndedEpisode(a, c, 1.0, (), b - a, {}, {}) for a, b, c in sorted(ended, key=lambda e: held.index(e[2]))]
        released, waiting = release_episodes([*waiting, *new], running)
        assert all(episode.start < min(running, default=now + 1) for episode in released)
        assert not running or all(episode.start >= min(running) for episode in waiting)
        parts.append(released)
    return parts


@given(lengths=LENGTHS, every=st.integers(1, 7), data=st.data())
def test_what_is_released_is_whole_up_to_some_start_and_depends_on_no_worker(lengths, every, data):
    copies = list(range(len(lengths)))
    parts = release(lengths, every, copies)
    shuffled = release(lengths, every, data.draw(st.permutations(copies)))
    assert parts == shuffled
    episodes = [episode for part in parts for episode in part]
    assert episodes == sorted(episodes, key=lambda episode: (episode.start, episode.copy))
    # Closed under "began no later": none that began before a released one, or with it, is missing.
    if episodes:
        frontier = episodes[-1].start
        begun = [(a, c) for c, copy_lengths in enumerate(lengths) for a in _starts(copy_lengths) if a <= frontier]
        assert sorted(begun) == [(episode.start, episode.copy) for episode in episodes]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:k]) for k in range(len(lengths))]


def test_quick_successes_do_not_count_before_slow_failures():
    quick = [EndedEpisode(0, copy, 1.0, (), 3, {}, {}) for copy in range(3)]
    assert release_episodes(quick, [0, 3, 3, 3]) == ([], quick)
    slow = EndedEpisode(0, 3, 0.0, (), 9, {}, {})
    assert release_episodes([*quick, slow], [9, 9, 9, 9]) == ([*quick, slow], [])
    assert release_episodes(quick, []) == (quick, [])


def test_an_episode_that_never_ends_holds_others_back_for_so_long_only():
    assert blocking_starts([(0, 30), (12, 18), (30, 0)], max_steps=20) == [12, 30]
