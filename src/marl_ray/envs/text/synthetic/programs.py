"""Functions to write, with their tests."""

import random
import re
from dataclasses import dataclass
from functools import lru_cache

from marl_ray.envs.text.synthetic.draws import draw_distinct
from marl_ray.envs.text.synthetic.families import FAMILIES, NUMBER_FAMILIES, STEP_FAMILIES, fill_template
from marl_ray.envs.text.synthetic.function_tests import code_task
from marl_ray.envs.text.synthetic.functions import ARGUMENT_NUMBERS, result_of, write_function
from marl_ray.envs.text.tasks import ProgramTask
from marl_ray.rewards.code import CodeTask

_MIN_RESULTS = 5
"""Minimum number of results of two operations: after the least of x and 4 it does not matter whether it is above 17."""


@lru_cache(maxsize=8)
def programs(count: int, levels: tuple[int, ...], split: str, seed: int = 0) -> tuple[ProgramTask, ...]:
    """Return at most `count` functions `f` to write, the levels in equal parts; of held-out ones at most 256.

    Levels: 1 one constant; 2 two constants, or an operation on lists; 3 strings and three constants; 4 two operations on
    numbers, one after the other. Raises ValueError for a level that is none of these.
    """
    return tuple(
        SyntheticProgramTask(prompt, kind, body, level)
        for level, (prompt, kind, body) in draw_distinct(count, levels, split, seed, _draw_function, 4)
    )


def _draw_function(source: random.Random, level: int) -> tuple[str, str, str]:
    """Return a prompt, the kind of its argument and the expression."""
    while level == 4:
        first, second = source.choice(NUMBER_FAMILIES), source.choice(STEP_FAMILIES)
        text, inner = fill_template(source, first)
        second_text, outer = fill_template(source, second)
        body = re.sub(r"\bx\b", inner if "(" in second.code else f"({inner})", outer)
        results = {result_of(write_function("n", body), (x,)) for x in ARGUMENT_NUMBERS}
        if len(results) >= _MIN_RESULTS or results == {"True", "False"}:
            return f"n {text}, {second_text}", "n", body
    family = source.choice([family for family in FAMILIES if family.level == level])
    text, body = fill_template(source, family)
    return f"{family.kind} {text}", family.kind, body


@dataclass(frozen=True)
class SyntheticProgramTask:
    """A function to write, whose tests are made when they are needed."""

    prompt: str
    kind: str
    """Type of the arguments, as in `TaskFamily`."""
    body: str
    """The expression that the reference returns."""
    level: float

    @property
    def task_id(self) -> str:
        """The prompt, which no other task has."""
        return self.prompt

    @property
    def code(self) -> CodeTask:
        """The tests, which are made at the first use and kept for the tasks that were used last."""
        return code_task(self.prompt, self.kind, self.body)
