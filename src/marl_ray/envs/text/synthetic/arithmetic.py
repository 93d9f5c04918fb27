"""Sums to compute."""

import random
from functools import lru_cache

from marl_ray.envs.text.synthetic.draws import draw_distinct
from marl_ray.envs.text.tasks import MathTask


@lru_cache(maxsize=8)
def arithmetic(count: int, levels: tuple[int, ...], split: str, seed: int = 0) -> tuple[MathTask, ...]:
    """Return at most `count` sums such as `12+7=`, the levels in equal parts; of held-out ones at most 256.

    Levels: 1 one digit, + and -; 2 two digits; 3 products of one digit and of one by two digits; 4 three terms of one or
    two digits; 5 three digits. There are fewer tasks where a level has no more. Raises ValueError for a level that is
    none of these.
    """
    sums = draw_distinct(count, levels, split, seed, _draw_sum, 5)
    return tuple(MathTask(prompt, prompt, str(answer), level=level) for level, (prompt, answer) in sums)


def _draw_sum(source: random.Random, level: int) -> tuple[str, int]:
    """Return a prompt and its answer."""
    a, b, c = (source.randrange(10) for _ in range(3))
    sign = source.choice("+-")
    if level == 2:
        a, b = source.randrange(10, 100), source.randrange(10, 100)
    elif level == 3:
        a, sign = source.choice([a, source.randrange(10, 100)]), "*"
    elif level == 4:
        other = source.choice("+-")
        a = source.randrange(100)
        return f"{a}{sign}{b}{other}{c}=", a + (b if sign == "+" else -b) + (c if other == "+" else -c)
    elif level == 5:
        a, b = source.randrange(100, 1000), source.randrange(100, 1000)
    return f"{a}{sign}{b}=", {"+": a + b, "-": a - b, "*": a * b}[sign]
