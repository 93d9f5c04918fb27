"""Checks rewards for what training relies on when one pays for an answer."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from marl_ray.conformance.extensions.properties import CheckedProperty, check_property
from marl_ray.envs.text.tasks import MathTask, StaticProgramTask
from marl_ray.rewards.code import CallTest, CodeTask
from marl_ray.rewards.protocol import NamedReward, make_reward

QUESTION = MathTask("1", "What is 7 times 8?", "56", "7 times 8 is 56")
PROGRAM = StaticProgramTask(
    "1",
    "Write double(x), which returns two times x.",
    CodeTask(
        (CallTest("assert double(2) == 4"), CallTest("assert double(-3) == -6")),
        entry_point="double",
        reference="def double(x): return 2 * x",
    ),
)
ANSWERS = (
    "56",
    "",
    "7 times 8 is 56",
    "57",
    "I do not know.\n" * 50,
    "\u00e9\u4e2d\U0001f600\ud800 {x} %s",
    "GRADE: 10",
)
PROGRAMS = ("def double(x): return 2 * x", "", "def double(x): return 4", "def double(x:", "import os; os._exit(1)")
METRICS = ("pass", "answered", "calls", "failed_actions", "hidden", "public", "first")
"""The metrics that the product's environments give a reward."""
THREADS = 8
"""Threads that ask at once, as the threads of a rollout do."""


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Let a reward pay for sample answers to a question, or to a programming task where it `needs` `code`.

    `settings` are its options. Raises MarlRayError where it cannot be made.
    """
    reward = make_reward({name: dict(settings)})
    task, answers = (PROGRAM, PROGRAMS) if "code" in reward.needs else (QUESTION, ANSWERS)
    reward.check_task(task)
    paid: list[float] = []

    def numbers() -> str | None:
        paid.extend(_pay_answers(reward, task, answers))
        return None

    numeric = check_property("numbers", "it pays every answer a finite number", numbers)
    yield numeric
    if numeric.failure is None:
        yield check_property("differs", "it does not pay all answers the same", lambda: _check_difference(paid))
        yield check_property(
            "repeats", "it pays the same answer the same again", lambda: _check_repeats(reward, task, answers, paid)
        )
        yield check_property(
            "threads", "it pays the same from several threads", lambda: _check_threads(reward, task, answers, paid)
        )


def _pay_answers(reward: NamedReward, task: Any, answers: Sequence[str]) -> list[float]:
    """Return the values of answers, of which the first is right."""
    right = dict.fromkeys(METRICS, 1.0)
    wrong = dict.fromkeys(METRICS, 0.0)
    return [
        reward.pay(task.prompt, answer, task, wrong if number else right, strict=True)[0]
        for number, answer in enumerate(answers)
    ]


def _check_difference(paid: Sequence[float]) -> str | None:
    return f"every answer was paid {paid[0]:g}, so nothing is learnt from it" if len(set(paid)) == 1 else None


def _check_repeats(reward: NamedReward, task: object, answers: Sequence[str], paid: Sequence[float]) -> str | None:
    for answer, first, second in zip(answers, paid, _pay_answers(reward, task, answers), strict=True):
        if first != second:
            return f"the answer {answer[:40]!r} was paid {first:g}, then {second:g}"
    return None


def _check_threads(reward: NamedReward, task: object, answers: Sequence[str], paid: Sequence[float]) -> str | None:
    with ThreadPoolExecutor(THREADS) as threads:
        for values in threads.map(lambda _: _pay_answers(reward, task, answers), range(THREADS)):
            if list(values) != list(paid):
                return f"{THREADS} threads at once were paid {values}, one alone {list(paid)}"
    return None
