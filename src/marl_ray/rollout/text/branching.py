"""Answers to one prompt at later turns, for algorithms that compare the members of a group.

All members of a group read the same prompt at their first turn. From then on each goes its own way, so that nothing says
whether a later answer was a good one. Here the group's first episode is the trunk: before each of its next turns its state
is kept, and every other member continues it from there with an answer of its own, to an end of its own. So a group forms at
every such turn (AT-GRPO, arXiv 2510.11062, algorithm 1), whose scores are what each answer brought until the end of an
episode. AT-GRPO scores an answer by what its own step pays, and goes on with the best one; where rewards come at the end
that tells nothing, and from the best one on the states are no longer those that the policy comes to.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from marl_ray.rollout.text.episode import TextCopy
from marl_ray.rollout.text.responses import ResponseRow

ATTEMPTS = 32
"""Bits of a stream's attempt below the turn that a branch begins with."""


class Branch(NamedTuple):
    """A member of a group that continues the first one's episode."""

    copy: TextCopy
    group: int
    begun: int
    """Turns, of all agents, that are not its own."""

    @property
    def row(self) -> ResponseRow:
        """The branch's answer to the prompt that it shares with the trunk."""
        return ResponseRow(self.copy.turns[self.begun], self.copy.number, self.group, False)


def keep_state(copy: TextCopy, turns: int, agents: Collection[str]) -> None:
    """Keep the state of a trunk if one of its `turns` turns after the first comes next, and one of `agents` acts."""
    if 1 <= len(copy.turns) <= turns and copy.agent in agents:
        copy.keep()


def branches(group: int, members: Sequence[TextCopy]) -> list[Branch]:
    """Make one branch of every kept state of the first member for each other member, not played yet."""
    first, *others = members
    result = []
    for state in first.states:
        begun = len(state.turns)
        if begun == len(first.turns):  # its prompt was too long for the agent that was to act
            continue
        attempt = first.start.stream[2] | begun << ATTEMPTS
        result += [Branch(state.branch(other.number, attempt), group, begun) for other in others]
    return result
