"""Answers to one prompt at later turns, for algorithms that compare the members of a group.

All members of a group read the same prompt at their first turn only. Their later prompts differ, so later answers have
nothing to be compared with. Branching makes the group's first episode the trunk. The collector keeps the trunk's state
before each of its next turns, and every other member continues from that state with its own answer to its own end. So
each of these turns has a group of answers to one prompt (AT-GRPO, arXiv 2510.11062, algorithm 1). The score of an
answer is the sum of the rewards from it to the end of its episode. AT-GRPO itself scores an answer by the reward of its
own step and continues with the best answer. That score says nothing if rewards come at the end, and after the best
answer the states are no longer those that the policy reaches.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from marl_ray.rollout.text.episode import TextCopy
from marl_ray.rollout.text.responses import ResponseRow

ATTEMPT_BITS = 32
"""Number of bits for the attempt in a stream's number; the turn that a branch begins with has the bits above."""


class Branch(NamedTuple):
    """A member of a group that continues the episode of the group's first member."""

    copy: TextCopy
    group: int
    shared_turns: int
    """Number of turns, of all agents, that it shares with the first member's episode."""

    @property
    def row(self) -> ResponseRow:
        """The branch's answer to the prompt that it shares with the trunk."""
        return ResponseRow(self.copy.turns[self.shared_turns], self.copy.number, self.group, False)


def keep_state(copy: TextCopy, turns: int, agents: Collection[str]) -> None:
    """Keep the state of a trunk if one of its `turns` turns after the first comes next, and one of `agents` acts."""
    if 1 <= len(copy.turns) <= turns and copy.agent in agents:
        copy.keep_state()


def make_branches(group: int, members: Sequence[TextCopy]) -> list[Branch]:
    """Make one branch from every kept state of the first member for each other member.

    The branches are not played yet.
    """
    first, *others = members
    result = []
    for state in first.states:
        shared_turns = len(state.turns)
        if shared_turns == len(first.turns):  # the agent's prompt was too long, so the turn was not played
            continue
        attempt = first.start.stream[2] | shared_turns << ATTEMPT_BITS
        result += [Branch(state.branch(other.number, attempt), group, shared_turns) for other in others]
    return result
