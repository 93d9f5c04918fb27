"""Rewards of programs that run in the sandbox: what earns them, and what no hack earns."""

import tracemalloc
from collections import defaultdict
from collections.abc import Iterator

import pytest

from marl_ray.rewards import (
    CallTest,
    CodeRewardConfig,
    CodeTask,
    StdioTest,
    code_reward,
    count_violations,
    reference_cpu,
    run_tests,
    style,
)
from marl_ray.rewards.style import MAX_DEPTH, MAX_TEXTS
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
    reward = code_reward(pool, SQUARE, answer("def square(x):\n    return x * x"), ALL)
    assert (reward.correctness, reward.style, reward.public) == (1.0, 1.0, 1.0)
    assert reward.score == 1.0 + 0.25 + 0.5 * reward.efficiency and 0 < reward.efficiency <= 1
    assert reward.shaping == 0.1 and reward.code == "def square(x):\n    return x * x\n"


def test_correctness_is_the_fraction_of_hidden_tests(pool):
    reward = code_reward(pool, SQUARE, answer("def square(x):\n    return abs(x) * x"), CodeRewardConfig())
    assert (reward.score, reward.correctness) == (0.75, 0.75)
    assert [verdict == "passed" for verdict in reward.verdicts] == [True, True, False, True]


def test_what_was_learned_from_the_public_tests_alone_earns_little(pool):
    reward = code_reward(pool, SQUARE, answer("def square(x):\n    return {0: 0, 3: 9}[x]"), ALL)
    assert (reward.public, reward.correctness, reward.style, reward.efficiency) == (1.0, 0.5, 0.0, 0.0)


def test_style_and_speed_are_not_earned_by_a_wrong_program(pool):
    reward = code_reward(pool, SQUARE, answer("def square(x):\n    return 0"), ALL)
    assert (reward.style, reward.efficiency, reward.score) == (0.0, 0.0, 0.25)


def test_shaping_over_turns_adds_up_to_what_the_last_answer_passes(pool):
    turns = [
        "def square(x):\n    return 0",
        "def square(x):\n    return x * x",
        "no code at all",
        "def square(x):\n    return 9",
    ]
    before, total = 0.0, 0.0
    for text in turns:
        reward = code_reward(pool, SQUARE, answer(text) if "def" in text else text, ALL, public_before=before)
        before, total = reward.public, total + reward.shaping
    assert total == pytest.approx(0.1 * 0.5)


def test_an_answer_without_code_earns_nothing(pool):
    reward = code_reward(pool, SQUARE, "```python\ndef square(x): return x * x", ALL, public_before=1.0)
    assert (reward.score, reward.shaping, reward.code, reward.verdicts) == (0.0, -0.1, None, ("no code",))


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
    reward = code_reward(pool, DOUBLE, answer("print(abs(2 * int(input())))"), CodeRewardConfig(shaping=1.0))
    assert (reward.score, reward.shaping, reward.verdicts) == (0.5, 1.0, ("passed", "wrong"))


def test_a_program_that_prints_the_answer_and_then_fails_is_wrong(pool):
    results = run_tests(pool, "print(4)\nraise SystemExit(3)", DOUBLE.hidden[:1], DOUBLE, Limits())
    assert (results.passed, results.verdicts) == (0, ("exit",))


def test_a_slow_program_is_less_efficient_than_the_reference(pool):
    slow = "def square(x):\n    for _ in range(3_000_000):\n        pass\n    return x * x"
    cpu_s = reference_cpu(pool, SQUARE, ALL)
    assert cpu_s is not None
    fast = code_reward(pool, SQUARE, answer(SQUARE.reference), ALL, reference_cpu_s=cpu_s)
    reward = code_reward(pool, SQUARE, answer(slow), ALL, reference_cpu_s=cpu_s)
    assert reward.correctness == 1.0 and reward.efficiency < fast.efficiency / 2


def test_without_a_working_reference_there_is_no_efficiency(pool):
    broken = CodeTask(SQUARE.hidden, entry_point="square", reference="def square(x):\n    return 1")
    assert reference_cpu(pool, DOUBLE, ALL) is None and reference_cpu(pool, broken, ALL) is None
    assert code_reward(pool, broken, answer(SQUARE.reference), ALL).efficiency == 0.0


def test_style_counts_violations_and_nothing_switches_a_rule_off():
    assert style("def f(x):\n    return x\n") == 1.0
    dirty = "import os\n\n\ndef f(x):\n    if x == None:\n        return 1\n"
    assert count_violations(dirty) == 2 and style(dirty) == 1 / 3
    assert count_violations("# ruff: noqa\n" + dirty.replace("import os", "import os  # noqa")) == 2
    assert count_violations(dirty + "\n" * 100 + "# padding\n" * 1000) == 2


def test_counting_violations_takes_little_memory():
    tracemalloc.start()
    assert count_violations("import a\n" * 10_000) == 10_000
    assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("code", ["def f(:\n", "x = '\ud800'\n", "#" * (2 << 20), "(" * 100_000])
def test_what_cannot_be_checked_has_no_style(code):
    assert style(code) == 0.0


DIRTY = "import os\nimport sys\ndef f(x):\n    if x == None: return 1\n    l = lambda y: y\n    return l(x)\n"


def test_style_is_not_won_by_hiding_a_program_in_a_text():
    bare = count_violations(DIRTY)
    assert bare is not None and bare >= 4
    assert count_violations(f"exec({DIRTY!r})\n") == bare + 1
    assert count_violations(f"exec({DIRTY[:20]!r} {DIRTY[20:]!r}, {{}})\n") == bare + 1
    assert count_violations(f"exec({f'exec({DIRTY!r})'!r})\n") == bare + 2
    assert count_violations(f"exec(compile({DIRTY!r}, 'a', 'exec'))\n") is None
    assert count_violations("x = 1\nexec('y = 2')\n") == 1


def test_style_reads_16_texts_of_a_program_and_no_more():
    def calls(count: int) -> str:
        return "".join(f"exec('a = {number}')\n" for number in range(count))

    assert MAX_TEXTS == 16 and count_violations(calls(16)) == 16
    assert count_violations(calls(17)) is None
    assert count_violations(f"exec({calls(15)!r})\n") == 16
    assert count_violations(f"exec({calls(16)!r})\n") is None


def test_style_reads_texts_in_texts_to_a_depth_of_3_and_no_further():
    def program(depth: int) -> str:
        return f"exec({program(depth - 1)!r})\n" if depth else "a = 1\n"

    assert MAX_DEPTH == 3 and count_violations(program(3)) == 3
    assert count_violations(program(4)) is None


@pytest.mark.parametrize(
    "code",
    [
        "text = 'import os'\nexec(text)\n",
        "exec('import' + ' os')\n",
        "exec(f'import {1}')\n",
        "exec(b'import os')\n",
        "run = exec\nrun('import os')\n",
        "list(map(exec, ['import os']))\n",
        "import builtins\nbuiltins.exec('import os')\n",
        "getattr(__builtins__, 'ex' + 'ec')('import os')\n",
        "import importlib\nimportlib.import_module('os')\n",
        "eval('(')\n",
        "import timeit\ntimeit.timeit('import os', number=1)\n",
        "import sys\nsys.modules['builtins']\n",
        "import sys\nsys.modules['buil' + 'tins'].eval('1')\n",
        "import sys\nrun = sys.modules['buil' + 'tins'].exec\nrun('import os')\n",
        "import sys\nmodule = sys.modules['buil' + 'tins']\nmodule.compile('import os', 'a', 'exec')\n",
        "import sys\nsys.re.compile('import os', 'a', 'exec')\n",
        "print.__self__.eval('1')\n",
        "globals()['__built' + 'ins__'].exec('import os')\n",
        "globals()['__built' + 'ins__']['ex' + 'ec']('import os')\n",
        "vars(print.__self__)['ex' + 'ec']('import os')\n",
        "x = f\"{vars(print.__self__)['ex' + 'ec']('import os')}\"\n",
        "x = f\"{print.__self__.__dict__.get('ex' + 'ec')('import os')}\"\n",
        "x = f\"{exec('import os')}\"\n",
        "exec(" * 5 + "''" + ")" * 5 + "\n",
        "exec('')\n" * 100,
    ],
)
def test_a_program_that_runs_a_text_unseen_has_no_style(code):
    assert style(code) == 0.0


def test_methods_and_words_of_those_names_are_no_calls_of_them():
    code = "import re\n\n# exec, eval\nPATTERN = re.compile('exec(x)')\n\n\ndef f(model):\n    return model.eval()\n"
    assert style(code) == 1.0
    assert style("def f(n):\n    return f'{n} vars, locals and globals'\n") == 1.0


def calls(pool: Pool, code: str, *tests: str, setup: str = "", cpu_s: float = 5.0) -> tuple[str, ...]:
    """Verdicts. A test may wait long for a core: what runs beside decides nothing."""
    task = CodeTask(tuple(map(CallTest, tests)), entry_point="f", setup=setup)
    limits = Limits(cpu_s=cpu_s, wall_s=60.0)
    together = run_tests(pool, code, task.hidden, task, limits).verdicts
    alone = tuple(run_tests(pool, code, (test,), task, limits).verdicts[0] for test in task.hidden)
    assert together == alone
    return together


def test_no_test_shares_what_it_does_to_arguments_or_memory_with_another(pool):
    shown, other = "x = [2, 1]\nf(x)\nassert len(x) < 3", "x = [2, 1]\nassert f(x) == sorted(x)"
    emptied = "def f(x):\n    x.clear()\n    return []"
    assert calls(pool, emptied, shown, other, shown) == ("passed", "fail:wrong", "passed")
    keeps = "kept = []\ndef f(n):\n    kept.append(bytes(n))\n    return len(kept[-1])"
    size = 400 << 20
    assert calls(pool, keeps, *[f"assert f({size}) == {size}"] * 4, "f(1 << 31)") == ("passed",) * 4 + ("oom",)


SOON: dict[str, dict[str, float]] = defaultdict(dict, timeout={"cpu_s": 0.2})
"""Only what continues for ever has a limit that is soon reached."""


class Counted:
    """A pool that counts its runs."""

    def __init__(self, pool: Pool):
        self.pool, self.runs = pool, 0

    def judge(self, *args, **kwargs):
        self.runs += 1
        return self.pool.judge(*args, **kwargs)


def test_all_calls_of_a_program_are_one_run(pool):
    counted = Counted(pool)
    tests = tuple(CallTest(f"assert square({x}) == {x * x}") for x in range(50))
    task = CodeTask(tests, SQUARE.public, "square")
    reward = code_reward(
        counted, task, answer("def square(x):\n    return x * x if x != 7 else 0 / 0"), CodeRewardConfig()
    )
    assert counted.runs == 1
    assert reward.correctness == 49 / 50 and reward.public == 1.0
    assert reward.verdicts == ("passed",) * 7 + ("fail:error",) + ("passed",) * 42


@pytest.mark.parametrize(
    ("bad", "verdict"),
    [
        ("import os; os._exit(0)", "fail:crash"),
        ("raise SystemExit", "fail:exit"),
        ("return lambda: 0", "fail:nonbuiltin"),
        ("while True: pass", "timeout"),
        ("return 0", "fail:wrong"),
        ("return 0 / 0", "fail:error"),
        ("return [0] * 10**12", "oom"),
        ("return 'x' * (50 << 20)", "fail:encode"),
        ("raise AssertionError('p')", "fail:wrong"),
    ],
)
def test_one_test_that_goes_wrong_decides_about_no_other(pool, bad, verdict):
    code = f"def f(x):\n    if x == 2:\n        {bad}\n    return x\n"
    tests = [f"assert f({x}) == {x}" for x in (1, 2, 3)]
    assert calls(pool, code, *tests, **SOON[verdict]) == ("passed", verdict, "passed")


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("import os; os._exit(0)", "fail:crash"),
        ("while True: pass", "timeout"),
        ("def g(): pass", "fail:error"),
        ("assert False, 'ppp'\ndef f(x): return x", "fail:wrong"),
        ("raise SystemExit", "fail:exit"),
        ("def f(", "fail:error"),
    ],
)
def test_a_program_that_cannot_be_loaded_fails_every_test(pool, code, verdict):
    assert calls(pool, code, "assert f(1) == 1", "pass", "assert f(2) == 2", **SOON[verdict]) == (verdict,) * 3


def test_tests_share_no_names_and_no_set_up(pool):
    setup = "data = [3, 1, 2]\nimport random"
    tests = ["data.append(0); x = 1; assert f(1) == 1", "assert 'x' not in globals()", "assert data == [3, 1, 2]"]
    tests.append("assert f(random.random()) < 1")
    assert calls(pool, "def f(x): return x", *tests, setup=setup) == ("passed",) * 4
    assert calls(pool, "def f(x): return x", "pass", "pass", setup="def (") == ("fail:error",) * 2


def test_programs_forge_no_report_of_their_tests(pool):
    code = """
import sys
def f(x):
    error = AssertionError('"ppp"')
    try:
        frame = sys._getframe()
        while frame:
            for name in ('report', 'verdicts', 'watched'):
                frame.f_locals[name] = 'ppp'
            frame = frame.f_back
    finally:
        raise error
"""
    assert calls(pool, code, *[f"assert f({x}) == {x}" for x in range(3)]) == ("fail:wrong",) * 3
