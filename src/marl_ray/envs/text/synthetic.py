"""Tasks made from seeds, offline: sums, and one-line Python functions described in a tiny language.

A level is a difficulty. Constants vary, so that what is learned from some tasks helps with others. Training and held-out
tasks are told apart by a hash of the prompt (`marl_ray.envs.text.base.is_held_out`): they are disjoint whatever the seeds.
"""

import io
import random
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

from marl_ray.envs.text.base import is_held_out
from marl_ray.envs.text.tasks import MathTask, ProgramTask
from marl_ray.json_types import JsonObject
from marl_ray.rewards.code import CallTest, CodeTask

HELD_OUT_SHARE = 0.125
"""Share of all tasks that are held out."""
MAX_HELD_OUT = 256
ENTRY_POINT = "f"
PUBLIC_TESTS, HIDDEN_TESTS = 3, 8
_MAX_VAIN_DRAWS = 2000
"""Draws without a new task after which a level is held to have no more."""


@lru_cache(maxsize=8)
def arithmetic(count: int, levels: tuple[int, ...], split: str, seed: int = 0) -> tuple[MathTask, ...]:
    """Return at most `count` sums such as `12+7=`, the levels in equal parts; of held-out ones at most 256.

    Levels: 1 one digit, + and -; 2 two digits; 3 products of one digit and of one by two digits; 4 three terms of one or
    two digits; 5 three digits. Fewer tasks where a level has no more. ValueError for a level that is none of these.
    """
    sums = _distinct(count, levels, split, seed, _sum, 5)
    return tuple(MathTask(prompt, prompt, str(answer), level=level) for level, (prompt, answer) in sums)


@lru_cache(maxsize=8)
def programs(count: int, levels: tuple[int, ...], split: str, seed: int = 0) -> tuple[ProgramTask, ...]:
    """Return at most `count` functions `f` to write, the levels in equal parts; of held-out ones at most 256.

    Levels: 1 one constant; 2 two constants, or an operation on lists; 3 strings and three constants; 4 two operations on
    numbers, one after the other. ValueError for a level that is none of these.
    """
    return tuple(
        SyntheticProgramTask(prompt, kind, body, level)
        for level, (prompt, kind, body) in _distinct(count, levels, split, seed, _function, 4)
    )


def _distinct(
    count: int,
    levels: Sequence[int],
    split: str,
    seed: int,
    draw: Callable[[random.Random, int], tuple[Any, ...]],
    hardest: int,
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the levels and draws of distinct tasks, all of one split.

    The first part of a draw is the prompt; no prompt comes twice.
    """
    if count < 1:
        raise ValueError(f"count={count}, expected 1 or more")
    wrong = [level for level in levels if level not in range(1, hardest + 1)]
    if wrong or not levels:
        raise ValueError(f"levels: {wrong[0] if wrong else 'none'}, expected some of 1 to {hardest}")
    held_out = split == "test"
    share = -(-(min(count, MAX_HELD_OUT) if held_out else count) // len(levels))
    for level in levels:
        source, seen, vain = random.Random(f"{seed} {split} {level}"), set[str](), 0
        while len(seen) < share and vain < _MAX_VAIN_DRAWS:
            drawn, vain = draw(source, level), vain + 1
            if drawn[0] not in seen and is_held_out(drawn[0], HELD_OUT_SHARE) == held_out:
                seen.add(drawn[0])
                vain = 0
                yield level, drawn


def _sum(source: random.Random, level: int) -> tuple[str, int]:
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


class TaskFamily(NamedTuple):
    """Functions of one kind. The capitals A, B and C are constants in the text and in the code."""

    level: int
    kind: str
    """Type of the argument x: `n` number, `l` list of numbers, `s` string, `p` two numbers x and y."""
    text: str
    code: str


FAMILIES = tuple(
    TaskFamily(int(level), kind, text, code)
    for level, kind, text, code in (
        [part.strip() for part in line.split("|")]
        for line in """
        1 | n | x plus A          | x+A
        1 | n | x minus A         | x-A
        1 | n | A minus x         | A-x
        1 | n | x times A         | x*A
        1 | n | x div A           | x//A
        1 | n | x mod A           | x%A
        1 | n | x xor A           | x^A
        1 | n | max of x A        | max(x,A)
        1 | n | min of x A        | min(x,A)
        1 | n | x above A         | x>A
        1 | n | x below A         | x<A
        1 | n | x equals A        | x==A
        1 | n | A divides x       | x%A==0
        1 | n | distance x A      | abs(x-A)
        1 | n | abs x plus A      | abs(x)+A
        1 | n | square plus A     | x*x+A
        1 | n | square minus A    | x*x-A
        2 | n | x times A plus B  | x*A+B
        2 | n | x times A minus B | x*A-B
        2 | n | x plus A times B  | (x+A)*B
        2 | n | x between A B     | A<=x<=B
        2 | n | clip x A B        | max(A,min(x,B))
        2 | n | x mod A plus B    | x%A+B
        2 | n | square times A plus B | x*x*A+B
        2 | n | range A x B       | list(range(A,x,B))
        2 | p | x plus y times A  | x+y*A
        2 | p | x times y plus A  | x*y+A
        2 | p | x minus y plus A  | x-y+A
        2 | p | max x y minus A   | max(x,y)-A
        2 | p | x A plus y B      | x*A+y*B
        2 | l | first A           | x[:A]
        2 | l | last A            | x[-A:]
        2 | l | drop A            | x[A:]
        2 | l | every A           | x[::A]
        2 | l | item A            | x[A]
        2 | l | count A           | x.count(A)
        2 | l | has A             | A in x
        2 | l | append A          | x+[A]
        2 | l | prepend A         | [A]+x
        2 | l | sum plus A        | sum(x)+A
        2 | l | sum times A       | sum(x)*A
        2 | l | length times A    | len(x)*A
        2 | l | max plus A        | max(x)+A
        2 | l | min minus A       | min(x)-A
        2 | l | sum of first A    | sum(x[:A])
        2 | l | rotate A          | x[A:]+x[:A]
        2 | l | smallest A        | sorted(x)[:A]
        2 | l | largest A         | sorted(x)[-A:]
        3 | l | each plus A       | [v+A for v in x]
        3 | l | each times A      | [v*A for v in x]
        3 | l | each mod A        | [v%A for v in x]
        3 | l | keep above A      | [v for v in x if v>A]
        3 | l | keep below A      | [v for v in x if v<A]
        3 | l | remove A          | [v for v in x if v!=A]
        3 | l | count above A     | sum(v>A for v in x)
        3 | l | all below A       | all(v<A for v in x)
        3 | l | any above A       | any(v>A for v in x)
        3 | l | each times A plus B | [v*A+B for v in x]
        3 | l | slice A B         | x[A:B]
        3 | n | square A x B plus C | x*x*A+x*B+C
        3 | s | repeat A          | x*A
        3 | s | first A           | x[:A]
        3 | s | drop A            | x[A:]
        3 | s | every A           | x[::A]
        3 | s | count 'A'         | x.count('A')
        3 | s | remove 'A'        | x.replace('A','')
        3 | s | replace 'A' 'B'   | x.replace('A','B')
        3 | s | split 'A'         | x.split('A')
        3 | s | starts 'A'        | x.startswith('A')
        3 | s | ends 'A'          | x.endswith('A')
        3 | s | find 'A'          | x.find('A')
        3 | s | join 'A'          | 'A'.join(x)
        3 | s | append 'A'        | x+'A'
        3 | s | prepend 'A'       | 'A'+x
        3 | s | pad A 'B'         | x.ljust(A,'B')
        """.strip().splitlines()
    )
)
STEP_FAMILIES = tuple(each for each in FAMILIES if each.level == 1 and each.code.count("x") == 1 and each.kind == "n")
"""The functions that may follow each other in level 4: each makes a number of a number."""
_NUMBER_FAMILIES = tuple(family for family in STEP_FAMILIES if not re.search("[<=>]", family.code))
_LETTERS = "abcde"
_NUMBERS_TRIED = range(-9, 50)
_MIN_RESULTS = 5
"""Results that two operations have at least: after the least of x and 4 it does not matter whether it is above 17."""


def _function(source: random.Random, level: int) -> tuple[str, str, str]:
    """Return a prompt, the kind of its argument and the expression."""
    while level == 4:
        first, second = source.choice(_NUMBER_FAMILIES), source.choice(STEP_FAMILIES)
        text, inner = _fill_template(source, first)
        rest, outer = _fill_template(source, second)
        body = re.sub(r"\bx\b", inner if "(" in second.code else f"({inner})", outer)
        results = {_result(_written("n", body), (x,)) for x in _NUMBERS_TRIED}
        if len(results) >= _MIN_RESULTS or results == {"True", "False"}:
            return f"n {text}, {rest}", "n", body
    family = source.choice([family for family in FAMILIES if family.level == level])
    text, body = _fill_template(source, family)
    return f"{family.kind} {text}", family.kind, body


def _fill_template(source: random.Random, family: TaskFamily) -> tuple[str, str]:
    """Return text and code with constants. Positions in sequences are small, for the sequences are short."""
    most = 20 if family.kind in "np" else 6
    names = [name for name in "ABC" if re.search(rf"\b{name}\b", family.text)]
    values = dict(zip(names, source.sample(range(2, most), len(names)), strict=True))
    if family.text.startswith(("x between", "clip", "slice")):
        values = dict(zip(names, sorted(values.values()), strict=True))
    letters = dict(zip(names, source.sample(_LETTERS, len(names)), strict=True))

    def fill(pattern: str) -> str:
        quoted = re.sub(r"'([ABC])'", lambda match: f"'{letters[match[1]]}'", pattern)
        return re.sub(r"\b[ABC]\b", lambda match: str(values[match[0]]), quoted)

    return fill(family.text), fill(family.code)


@dataclass(frozen=True)
class SyntheticProgramTask:
    """A function to write, whose tests are made when they are needed."""

    prompt: str
    kind: str
    body: str
    level: float

    @property
    def task_id(self) -> str:
        """The prompt, which no other task has."""
        return self.prompt

    @property
    def code(self) -> CodeTask:
        """The tests, which are made at the first use and kept for the tasks that were used last."""
        return _code(self.prompt, self.kind, self.body)


@lru_cache(maxsize=4096)
def _code(prompt: str, kind: str, body: str) -> CodeTask:
    """Return the tests, which depend on nothing but the task.

    Tests are chosen so that as many one-token mutants of the reference as can be fail one: first the hidden tests, then,
    among other inputs, the public ones. The code that runs here is made of the table above.
    """
    reference = _written(kind, body)
    inputs = _inputs(random.Random(prompt), kind, body)
    right = [_result(reference, arguments) for arguments in inputs]
    usable = [number for number, result in enumerate(right) if isinstance(result, str)]
    caught: dict[int, set[int]] = {number: set() for number in usable}
    for mutant, changed in enumerate(mutants(reference)):
        for number in usable:
            if _result(changed.code, inputs[number]) != right[number]:
                caught[number].add(mutant)
    hidden = _cover(caught, HIDDEN_TESTS)
    public = _cover({number: killed for number, killed in caught.items() if number not in hidden}, PUBLIC_TESTS)

    def tests(numbers: list[int]) -> tuple[CallTest, ...]:
        calls = (",".join(map(repr, inputs[number])) for number in numbers)
        written = (
            f"assert {ENTRY_POINT}({call})=={right[number]}" for call, number in zip(calls, numbers, strict=True)
        )
        return tuple(CallTest(source.replace(", ", ",")) for source in written)

    return CodeTask(tests(hidden), tests(public), ENTRY_POINT, "", reference)


def _written(kind: str, body: str) -> str:
    return f"def {ENTRY_POINT}({'x,y' if kind == 'p' else 'x'}):return {body}"


def _cover(caught: dict[int, set[int]], count: int) -> list[int]:
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


def _inputs(source: random.Random, kind: str, body: str) -> list[tuple[object, ...]]:
    """Return distinct arguments for a program in a drawn order, those near its constants among them.

    There are more of them where many have no result, as short lists have no sixth item.
    """
    constants = [int(digits) for digits in re.findall(r"\d+", body)]
    near = [constant + step for constant in constants for step in (0, -1, 1)]

    def integer() -> int:
        return source.choice(near) if near and source.random() < 0.3 else source.choice(_NUMBERS_TRIED)

    def draw() -> tuple[object, ...]:
        if kind == "l":
            return ([integer() for _ in range(source.randrange(2, 8))],)
        if kind == "s":
            return ("".join(source.choices(_LETTERS, k=source.randrange(2, 9))),)
        return integer(), integer()

    if kind == "n":
        return [(number,) for number in source.sample(_NUMBERS_TRIED, len(_NUMBERS_TRIED))]
    code, needed = _written(kind, body), PUBLIC_TESTS + HIDDEN_TESTS
    inputs: dict[str, tuple[object, ...]] = {}
    have_results: set[str] = set()
    for tried in range(_MAX_VAIN_DRAWS):
        if tried >= 3 * needed and len(have_results) >= needed:
            break
        arguments = draw()
        inputs[repr(arguments)] = arguments
        if isinstance(_result(code, arguments), str):
            have_results.add(repr(arguments))
    return list(inputs.values())


def _result(code: str, arguments: tuple[object, ...]) -> str | type[Exception]:
    """Return the function's result as Python source, or the type of the exception that it raises."""
    try:
        return repr(_function_of(code)(*arguments))
    except Exception as error:
        return type(error)


@lru_cache(maxsize=64)
def _function_of(code: str) -> FunctionType:
    namespace: JsonObject = {}
    exec(code, namespace)  # noqa: S102  code that this file has made
    made: FunctionType = namespace[ENTRY_POINT]
    return made


class Mutant(NamedTuple):
    """A program in which one token is another."""

    code: str
    wrong: str
    right: str


_SWAPPED_OPERATORS = {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "%",
    "%": "//",
    "<": ">",
    ">": "<",
    "<=": ">=",
    ">=": "<=",
    "==": "!=",
    "!=": "==",
}


def mutants(code: str) -> list[Mutant]:
    """Return the programs with one whole number, one operator or one string of a letter changed.

    There are none if the code is not Python.
    """
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    result = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            begin, end = starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]
            for other in _others(token):
                result.append(Mutant(code[:begin] + other + code[end:], other, token.string))
    except (tokenize.TokenError, SyntaxError):
        return []
    return result


def _others(token: tokenize.TokenInfo) -> list[str]:
    text = token.string
    if token.type == tokenize.OP:
        return [_SWAPPED_OPERATORS[text]] if text in _SWAPPED_OPERATORS else []
    if token.type == tokenize.NUMBER and text.isdecimal():
        return [str(int(text) + step) for step in (1, -1, 2) if int(text) + step >= 0]
    if token.type == tokenize.STRING and len(text) == 3 and text[1].isalpha():
        return [f"{text[0]}{letter}{text[2]}" for letter in _LETTERS if letter != text[1]][:2]
    return []
