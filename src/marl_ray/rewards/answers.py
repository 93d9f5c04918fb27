"""Rewards by the right answer of a task."""

import re
import string
from collections.abc import Mapping
from typing import Any

from marl_ray.rewards.math_answers import TOLERANCE, answers_match, number
from marl_ray.rewards.math_reward import math_reward
from marl_ray.rewards.option_numbers import check_not_negative

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_INSIDE_A_NUMBER = re.compile(r"(?<=\d)[^\w\s](?=\d)")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_FORMULA = re.compile(r"[\\^=+*/<>{}\[\]|#]|(?<!\w)-|-(?!\w)|^\(|\d[!(]")
"""Signs that carry meaning in an answer, unlike the punctuation of words."""


class Solved:
    """Pays 1 where the environment says that the task is solved, by its metric `pass`."""

    def __call__(self, prompt: str, answer: str, task: Any, metrics: Mapping[str, float]) -> float:
        """Return the environment's metric `pass` of the episode."""
        return metrics["pass"]


class MathAnswer:
    """Pays 1 where the final answer in a text is the right one, by the rules of `marl_ray.rewards.math_reward`."""

    needs = ("answer",)

    def __init__(self, tolerance: float = TOLERANCE):
        """Take the relative tolerance of answers that are no whole numbers.

        Raises ValueError if it is negative or not finite.
        """
        check_not_negative("tolerance", tolerance)
        self.tolerance = tolerance

    def __call__(self, prompt: str, answer: str, task: Any) -> float:
        """Return 1 if the final answer in a text is the one of `task.answer`, else 0."""
        return math_reward(answer, task.answer, self.tolerance)


class ShortAnswer:
    """Pays 1 where a short answer is the right one, by `same_answer`."""

    needs = ("answer",)

    def __call__(self, prompt: str, answer: str, task: Any) -> float:
        """Return 1 if the answer is the one of `task.answer`, else 0."""
        return float(same_answer(answer, task.answer))


class ExactMatch:
    """Pays 1 where the answer is the right one to the letter, but for spaces around it."""

    needs = ("answer",)

    def __init__(self, ignore_case: bool = False):
        self.ignore_case = ignore_case

    def __call__(self, prompt: str, answer: str, task: Any) -> float:
        """Return 1 if the answer is `task.answer`, but for spaces around it and, with `ignore_case`, for case; else 0."""
        pair = answer.strip(), str(task.answer).strip()
        return float(pair[0] == pair[1] or (self.ignore_case and pair[0].casefold() == pair[1].casefold()))


def same_answer(answer: str, expected: str) -> bool:
    """Return True if two answers are equal as mathematics, or as words without punctuation and articles.

    The mathematics are those of `marl_ray.rewards.math_reward`.
    """
    answer = answer.strip().strip("*")
    if answers_match(answer, expected):
        return True
    if number(expected) is not None or _FORMULA.search(answer) or _FORMULA.search(expected):
        return False
    return bool(_bare_words(expected)) and _bare_words(answer) == _bare_words(expected)


def _bare_words(text: str) -> str:
    """Return the words of a text without case, punctuation and articles."""
    words = _INSIDE_A_NUMBER.sub(" ", text.casefold()).translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split())
