"""Tests of one-line functions, chosen so that they tell a function from its mutants."""

import random
import re
from functools import lru_cache

from marl_ray.envs.text.synthetic.draws import MAX_VAIN_DRAWS
from marl_ray.envs.text.synthetic.functions import ARGUMENT_NUMBERS, ENTRY_POINT, LETTERS, result_of, write_function
from marl_ray.envs.text.synthetic.mutants import mutants
from marl_ray.rewards.code import CallTest, CodeTask

PUBLIC_TESTS, HIDDEN_TESTS = 3, 8
"""Numbers of tests of a function: those that its team may see, and those that score."""


@lru_cache(maxsize=4096)
def code_task(prompt: str, kind: str, body: str) -> CodeTask:
    """Return the tests of a task, which depend on nothing but the task.

    Tests are chosen so that as many one-token mutants of the reference as possible fail one: first the hidden tests, then,
    among other inputs, the public ones. The code that runs here is made of `FAMILIES`.
    """
    reference = write_function(kind, body)
    inputs = _draw_inputs(random.Random(prompt), kind, body)
    results = [result_of(reference, arguments) for arguments in inputs]
    usable = [number for number, result in enumerate(results) if isinstance(result, str)]
    caught: dict[int, set[int]] = {number: set() for number in usable}
    for mutant_number, mutant in enumerate(mutants(reference)):
        for number in usable:
            if result_of(mutant.code, inputs[number]) != results[number]:
                caught[number].add(mutant_number)
    hidden = _choose_covering(caught, HIDDEN_TESTS)
    public = _choose_covering(
        {number: killed for number, killed in caught.items() if number not in hidden}, PUBLIC_TESTS
    )

    def make_tests(numbers: list[int]) -> tuple[CallTest, ...]:
        calls = (",".join(map(repr, inputs[number])) for number in numbers)
        sources = (
            f"assert {ENTRY_POINT}({call})=={results[number]}" for call, number in zip(calls, numbers, strict=True)
        )
        return tuple(CallTest(source.replace(", ", ",")) for source in sources)

    return CodeTask(make_tests(hidden), make_tests(public), ENTRY_POINT, "", reference)


def _choose_covering(caught: dict[int, set[int]], count: int) -> list[int]:
    """Return at most `count` inputs that together catch many mutants; greedy, ties by order."""
    covering: list[int] = []
    uncaught = set[int]().union(*caught.values())
    while len(covering) < min(count, len(caught)):
        best = max(
            (number for number in caught if number not in covering), key=lambda number: len(caught[number] & uncaught)
        )
        covering.append(best)
        uncaught -= caught[best]
    return covering


def _draw_inputs(source: random.Random, kind: str, body: str) -> list[tuple[object, ...]]:
    """Return distinct arguments for a program in a drawn order, those near its constants among them.

    There are more of them where many have no result, as short lists have no sixth item.
    """
    constants = [int(digits) for digits in re.findall(r"\d+", body)]
    near = [constant + step for constant in constants for step in (0, -1, 1)]

    def integer() -> int:
        return source.choice(near) if near and source.random() < 0.3 else source.choice(ARGUMENT_NUMBERS)

    def draw() -> tuple[object, ...]:
        if kind == "l":
            return ([integer() for _ in range(source.randrange(2, 8))],)
        if kind == "s":
            return ("".join(source.choices(LETTERS, k=source.randrange(2, 9))),)
        return integer(), integer()

    if kind == "n":
        return [(number,) for number in source.sample(ARGUMENT_NUMBERS, len(ARGUMENT_NUMBERS))]
    code, needed = write_function(kind, body), PUBLIC_TESTS + HIDDEN_TESTS
    inputs: dict[str, tuple[object, ...]] = {}
    have_results: set[str] = set()
    for tried in range(MAX_VAIN_DRAWS):
        if tried >= 3 * needed and len(have_results) >= needed:
            break
        arguments = draw()
        inputs[repr(arguments)] = arguments
        if isinstance(result_of(code, arguments), str):
            have_results.add(repr(arguments))
    return list(inputs.values())
