"""Draw distinct tasks of one split."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from marl_ray.envs.text.base import is_held_out

HELD_OUT_SHARE = 0.125
"""Share of all tasks that are held out."""
MAX_HELD_OUT = 256
"""Maximum number of held-out tasks: more would lengthen every evaluation."""
MAX_VAIN_DRAWS = 2000
"""Draws without a new task after which a level is held to have no more."""


def draw_distinct(
    count: int,
    levels: Sequence[int],
    split: str,
    seed: int,
    draw: Callable[[random.Random, int], tuple[Any, ...]],
    hardest: int,
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the levels and draws of at most `count` distinct tasks of one split, the levels in equal parts.

    Where the parts cannot be equal, the first levels have a task more. `draw` returns a task of a level, whose first
    part is the prompt; no prompt comes twice. `hardest` is the greatest level. Raises ValueError for a level that is
    not from 1 to `hardest`, and for a count below 1.
    """
    if count < 1:
        raise ValueError(f"count={count}, expected 1 or more")
    wrong = [level for level in levels if level not in range(1, hardest + 1)]
    if wrong or not levels:
        raise ValueError(f"levels: {wrong[0] if wrong else 'none'}, expected some of 1 to {hardest}")
    held_out = split == "test"
    least, larger = divmod(min(count, MAX_HELD_OUT) if held_out else count, len(levels))
    for place, level in enumerate(levels):
        count_of_level = least + (place < larger)
        source, prompts, vain_draws = random.Random(f"{seed} {split} {level}"), set[str](), 0
        while len(prompts) < count_of_level and vain_draws < MAX_VAIN_DRAWS:
            task, vain_draws = draw(source, level), vain_draws + 1
            if task[0] not in prompts and is_held_out(task[0], HELD_OUT_SHARE) == held_out:
                prompts.add(task[0])
                vain_draws = 0
                yield level, task
