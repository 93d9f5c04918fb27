"""Minibatches and micro-batches divide a batch: every copy of every worker is in one of them, for any sizes and workers."""

from collections.abc import Iterable
from itertools import accumulate, chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.training.learner.minibatches import BatchShare, Selection, micro_batches, minibatches, whole_batch

COPIES = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)
"""Copies of each worker."""


def shares(copies: list[int], steps: int = 5, joint: int = 1) -> list[BatchShare]:
    """The share of each worker."""
    bounds = tuple(accumulate(copies, initial=0))
    return [BatchShare(2, steps, rank, bounds, joint) for rank in range(len(copies))]


def copies_of(selection: Selection, share: BatchShare) -> list[int]:
    """The numbers of a selection's copies among those of all workers."""
    numbers = range(share.copies) if selection.copies is None else selection.copies.tolist()
    return [share.first_copy + copy for copy in numbers]


def join(parts: Iterable[list[int]]) -> list[int]:
    """All numbers of the parts, sorted."""
    return sorted(chain.from_iterable(parts))


@settings(max_examples=60)
@given(copies=COPIES, count=st.integers(1, 6), epoch=st.integers(0, 2))
def test_each_copy_is_in_one_minibatch_which_is_the_same_set_for_any_number_of_workers(copies, count, epoch):
    count = min(count, sum(copies))
    (alone,) = shares([sum(copies)])
    expected = [
        sorted(copies_of(part, alone)) for part in minibatches(1, 2, epoch, count, alone, has_whole_episodes=True)
    ]
    assert join(expected) == list(range(sum(copies)))
    workers = shares(copies)
    divided = [minibatches(1, 2, epoch, count, share, has_whole_episodes=True) for share in workers]
    for number, parts in enumerate(zip(*divided, strict=True)):
        held = [copies_of(part, share) for part, share in zip(parts, workers, strict=True)]
        assert join(held) == expected[number]
        assert {part.max_copies for part in parts} == {max(map(len, held))}


@settings(max_examples=30)
@given(copies=COPIES, steps=st.integers(1, 9), count=st.integers(1, 9))
def test_each_time_is_in_one_minibatch_which_all_workers_share(copies, steps, count):
    count = min(count, steps)
    divided = [minibatches(1, 2, 0, count, share, has_whole_episodes=False) for share in shares(copies, steps)]
    if count == 1:
        assert divided == [[whole_batch(share)] for share in shares(copies, steps)]
        return
    times = [[part.times.tolist() for part in parts] for parts in divided]
    assert all(each == times[0] for each in times)
    assert join(times[0]) == list(range(steps))


@settings(max_examples=60)
@given(copies=COPIES, size=st.none() | st.integers(1, 8), data=st.data())
def test_each_copy_of_a_minibatch_is_in_one_micro_batch_and_workers_take_equally_many(copies, size, data):
    joint = data.draw(st.sampled_from([number for number in (1, 2) if len(copies) % number == 0]))
    workers = shares(copies, joint=joint)
    selections = [minibatches(1, 2, 0, min(2, sum(copies)), share, has_whole_episodes=True)[0] for share in workers]
    lengths = [torch.tensor(data.draw(st.permutations(range(share.copies))), dtype=torch.long) for share in workers]
    passes = [
        list(micro_batches(selection, share, size, order))
        for selection, share, order in zip(selections, workers, lengths, strict=True)
    ]
    assert len({len(parts) for parts in passes}) == 1
    for parts, selection, share, order in zip(passes, selections, workers, lengths, strict=True):
        assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
        taken = [copies_of(part, share) for part, _ in parts]
        assert join(taken) == sorted(copies_of(selection, share))
        if len(parts) > 1:
            assert max(map(len, taken)) <= size
            longest_first = [int(order[copy - share.first_copy]) for part in taken for copy in part]
            assert longest_first == sorted(longest_first, reverse=True)
    for number in range(len(passes[0]) if len(passes[0]) > 1 else 0):  # of workers that compute together one has copies
        for first in range(0, len(workers), joint):
            pair = zip(passes[first : first + joint], workers[first : first + joint], strict=True)
            assert sum(bool(copies_of(parts[number][0], share)) for parts, share in pair) <= 1


def test_a_selection_takes_the_rows_of_all_agents_of_its_copies():
    rows = torch.arange(4 * 2 * 3).reshape(8, 3)  # 4 copies of 2 agents, 3 steps
    selection = Selection(torch.tensor([3, 1]), torch.tensor([2]), 2)
    assert selection.take(rows, agents=2).tolist() == [[20], [23], [8], [11]]
    mask = torch.ones(8, 3, dtype=torch.bool)
    assert selection.decisions(mask, agents=2).all()
    assert not Selection(torch.tensor([0]), None, 2, is_stand_in=True).decisions(mask, agents=2).any()
