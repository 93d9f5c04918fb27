from collections.abc import Iterator

import pytest

from marl_ray.config import CodeRewardConfig
from marl_ray.rewards import CallTest, CodeTask, StdioTest, code_reward, reference_cpu, run_tests, style, violations
from marl_ray.sandbox import Level, Limits, Pool

SQUARE = CodeTask(
    hidden=tuple(CallTest(f"assert square({x}) == {x * x}") for x in (0, 3, -4, 12)),
    public=(CallTest("assert square(0) == 0"), CallTest("assert square(3) == 9")),
    entry_point="square",
    reference="def square(x):\n    return x * x\n",
)
DOUBLE = CodeTask(hidden=(StdioTest(b"2", b"4\n"), StdioTest(b"-3", b"-6\n")), public=(StdioTest(b"1", b"2\n"),))
ALL = CodeRewardConfig(correctness=1.0, style=0.25, efficiency=0.5, shaping=0.1, timeout_s=2.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1, min_level=Level.LIMITS) as pool:
        yield pool


def answer(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


def test_a_right_clean_and_fast_answer_earns_everything(pool):
    found = code_reward(pool, SQUARE, answer("def square(x):\n    return x * x"), ALL)
    assert (found.correctness, found.style, found.public) == (1.0, 1.0, 1.0)
    assert found.score == 1.0 + 0.25 + 0.5 * found.efficiency and 0 < found.efficiency <= 1
    assert found.shaping == 0.1 and found.code == "def square(x):\n    return x * x\n"


def test_correctness_is_the_fraction_of_hidden_tests(pool):
    found = code_reward(pool, SQUARE, answer("def square(x):\n    return abs(x) * x"), CodeRewardConfig())
    assert (found.score, found.correctness) == (0.75, 0.75)
    assert [verdict == "passed" for verdict in found.verdicts] == [True, True, False, True]


def test_what_was_learned_from_the_public_tests_alone_earns_little(pool):
    found = code_reward(pool, SQUARE, answer("def square(x):\n    return {0: 0, 3: 9}[x]"), ALL)
    assert (found.public, found.correctness, found.style, found.efficiency) == (1.0, 0.5, 0.0, 0.0)


def test_style_and_speed_are_not_earned_by_a_wrong_program(pool):
    found = code_reward(pool, SQUARE, answer("def square(x):\n    return 0"), ALL)
    assert (found.style, found.efficiency, found.score) == (0.0, 0.0, 0.25)


def test_shaping_over_turns_adds_up_to_what_the_last_answer_passes(pool):
    turns = [
        "def square(x):\n    return 0",
        "def square(x):\n    return x * x",
        "no code at all",
        "def square(x):\n    return 9",
    ]
    before, total = 0.0, 0.0
    for text in turns:
        found = code_reward(pool, SQUARE, answer(text) if "def" in text else text, ALL, public_before=before)
        before, total = found.public, total + found.shaping
    assert total == pytest.approx(0.1 * 0.5)


def test_an_answer_without_code_earns_nothing(pool):
    found = code_reward(pool, SQUARE, "```python\ndef square(x): return x * x", ALL, public_before=1.0)
    assert (found.score, found.shaping, found.code, found.verdicts) == (0.0, -0.1, None, ("no code",))


@pytest.mark.parametrize(
    "code",
    [
        "class E(int):\n    __eq__ = lambda *_: True\ndef square(x):\n    return E()",
        "import sys\ndef square(x):\n    sys.exit(0)",
        "import os\nos._exit(0)",
        "print('passed')",
    ],
)
def test_hacks_earn_nothing(pool, code):
    assert code_reward(pool, SQUARE, answer(code), ALL).score == 0.0


def test_programs_are_rewarded_by_what_they_print(pool):
    found = code_reward(pool, DOUBLE, answer("print(abs(2 * int(input())))"), CodeRewardConfig(shaping=1.0))
    assert (found.score, found.shaping, found.verdicts) == (0.5, 1.0, ("passed", "wrong"))


def test_a_program_that_prints_the_answer_and_then_fails_is_wrong(pool):
    found = run_tests(pool, "print(4)\nraise SystemExit(3)", DOUBLE.hidden[:1], DOUBLE, Limits())
    assert (found.passed, found.verdicts) == (0, ("exit",))


def test_a_slow_program_is_less_efficient_than_the_reference(pool):
    slow = "def square(x):\n    for _ in range(3_000_000):\n        pass\n    return x * x"
    cpu_s = reference_cpu(pool, SQUARE, ALL)
    assert cpu_s is not None
    fast = code_reward(pool, SQUARE, answer(SQUARE.reference), ALL, reference_cpu_s=cpu_s)
    found = code_reward(pool, SQUARE, answer(slow), ALL, reference_cpu_s=cpu_s)
    assert found.correctness == 1.0 and found.efficiency < fast.efficiency / 2


def test_without_a_working_reference_there_is_no_efficiency(pool):
    broken = CodeTask(SQUARE.hidden, entry_point="square", reference="def square(x):\n    return 1")
    assert reference_cpu(pool, DOUBLE, ALL) is None and reference_cpu(pool, broken, ALL) is None
    assert code_reward(pool, broken, answer(SQUARE.reference), ALL).efficiency == 0.0


def test_style_counts_violations_and_nothing_switches_a_rule_off():
    assert style("def f(x):\n    return x\n") == 1.0
    dirty = "import os\n\n\ndef f(x):\n    if x == None:\n        return 1\n"
    assert violations(dirty) == 2 and style(dirty) == 1 / 3
    assert violations("# ruff: noqa\n" + dirty.replace("import os", "import os  # noqa")) == 2
    assert violations(dirty + "\n" * 100 + "# padding\n" * 1000) == 2


@pytest.mark.parametrize("code", ["def f(:\n", "x = '\ud800'\n", "#" * (2 << 20), "(" * 100_000])
def test_what_cannot_be_checked_has_no_style(code):
    assert style(code) == 0.0
