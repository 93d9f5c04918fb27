"""The executor of a code team, which runs all tests of one program.

Tests that are calls of a function share one run of the sandbox.
"""

import ast
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from marl_ray.rewards.code import CallTest, CodeTask, StdioTest, Test, run_tests
from marl_ray.rewards.run_reports import LOADING_VERDICTS, REPORT_MARK, read_report
from marl_ray.sandbox import Judgement, Limits, Pool, Status
from marl_ray.sandbox.in_place import looks_at_arguments

MAX_REPORT_LENGTH = 200
"""Characters of a report: it is a part of prompts, and a program may raise a text of any length."""
NO_CODE, NO_TESTS = "no code", "no tests"
PASSED = "passed"
_MAX_VALUE_LENGTH = 80
"""Characters of a wrong result that a report quotes."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address in the text of a generator, which would change a prompt from run to run."""


@dataclass(frozen=True)
class ProgramScore:
    """The results of a program's tests."""

    public: float
    """Fraction of the public tests that pass; 0 where there are none."""
    hidden: float
    report: str
    """A report on the public tests and the program alone, so that agents may read it."""
    runs: int
    """Number of times that the sandbox ran the program."""
    cpu_s: float


def score_program(pool: Pool, code: str, task: CodeTask, limits: Limits) -> ProgramScore:
    """Test a program. The limits hold for all calls together, for stdio tests each.

    A call that ends, hangs or breaks the program's process fails all hidden tests; the public tests then run alone. After
    a stdio test that runs out of time the others of its kind are not run, and fail too: a program that waits in each of
    many tests would take longer than a step of an environment may.
    """
    if task.entry_point:
        return _check_calls(pool, code, task, limits)
    public, hidden = (_run_stdio(pool, code, tests, task, limits) for tests in (task.public, task.hidden))
    report = "passes" if task.public else NO_TESTS
    for test, verdict in zip(task.public, public.verdicts, strict=True):
        if verdict != PASSED:
            report = f"fails ({verdict}): {prompt_text(test)}"
            break
    share, score = (results.verdicts.count(PASSED) / max(len(results.verdicts), 1) for results in (public, hidden))
    return ProgramScore(
        share, score, report[:MAX_REPORT_LENGTH], public.runs + hidden.runs, public.cpu_s + hidden.cpu_s
    )


class _StdioResults(NamedTuple):
    """Verdicts of stdio tests, of which the first `runs` were run."""

    verdicts: list[str]
    runs: int
    cpu_s: float


def _run_stdio(pool: Pool, code: str, tests: tuple[Test, ...], task: CodeTask, limits: Limits) -> _StdioResults:
    verdicts: list[str] = []
    cpu_s = 0.0
    for test in tests:
        tested = run_tests(pool, code, (test,), task, limits)
        verdicts += tested.verdicts
        cpu_s += tested.cpu_s
        if verdicts[-1] == Status.TIMEOUT:
            break
    return _StdioResults([*verdicts, *[str(Status.TIMEOUT)] * (len(tests) - len(verdicts))], len(verdicts), cpu_s)


def prompt_text(test: Test) -> str:
    """Return a public test, for a prompt."""
    if isinstance(test, CallTest):
        return test.source
    return f"{test.stdin.decode(errors='replace').strip()} -> {test.stdout.decode(errors='replace').strip()}"


def _check_calls(pool: Pool, code: str, task: CodeTask, limits: Limits) -> ProgramScore:
    public, hidden = _call_sources(task.public), _call_sources(task.hidden)
    judgement = _judge(pool, code, task, public, hidden, limits)
    results = _read_report(judgement)
    runs, cpu_s = 1, judgement.cpu_s
    if results is None and judgement.verdict not in LOADING_VERDICTS:
        judgement = _judge(pool, code, task, public, (), limits)
        results = _read_report(judgement)
        runs, cpu_s = 2, cpu_s + judgement.cpu_s
        if results is not None:
            results = results[0], 0, *results[2:]
    if results is None:
        reason = judgement.message if judgement.verdict in LOADING_VERDICTS and judgement.message else judgement.verdict
        return ProgramScore(0.0, 0.0, _shorten(f"fails: {reason.removeprefix('fail:')}"), runs, cpu_s)
    passed_public, passed_hidden, failed, error, value = results
    report = "passes" if public else NO_TESTS
    if failed >= 0:
        report = _explain_failure(public[failed], error, value)
    share = passed_public / len(public) if public else 0.0
    return ProgramScore(share, passed_hidden / len(hidden), report, runs, cpu_s)


def _call_sources(tests: tuple[Test, ...]) -> tuple[str, ...]:
    return tuple(test.source for test in tests if not isinstance(test, StdioTest))


def _judge(
    pool: Pool, code: str, task: CodeTask, public: tuple[str, ...], hidden: tuple[str, ...], limits: Limits
) -> Judgement:
    calls = tuple(split_equality(source)[0] for source in public)
    reads_arguments = any(looks_at_arguments(source, task.entry_point) for source in (*public, *hidden))
    program = _judge_program(task, public, hidden, calls)
    return pool.judge(
        code, program, entry_point=task.entry_point, limits=limits, in_place="alone" if reads_arguments else False
    )


@lru_cache(maxsize=1024)
def _judge_program(task: CodeTask, public: tuple[str, ...], hidden: tuple[str, ...], calls: tuple[str, ...]) -> str:
    """Return the program of the judge, which runs every test by itself.

    At its end it raises its report as the text of an AssertionError. All that the report shows is known before the
    first hidden test: afterwards the program has seen their inputs, and could return them. Its random numbers depend on
    the tests and not on this process.
    """
    seed = hashlib.blake2b(repr((task.setup, public, hidden)).encode("utf-8", "surrogatepass")).hexdigest()
    return f"""
def _main(public, hidden, calls):
    import json, random
    function, names = globals()[{task.entry_point!r}], dict(globals())
    random.seed({seed!r})
    exec({task.setup!r}, names)
    names[{task.entry_point!r}] = function
    def run(source):
        try:
            exec(source, dict(names))
        except Exception as error:
            return type(error).__name__
    errors = [*map(run, public)]
    failed = next((number for number, error in enumerate(errors) if error), -1)
    error, value = errors[failed] if failed >= 0 else "", ""
    if error == "AssertionError" and calls[failed]:
        try:
            value = repr(eval(calls[failed], dict(names)))[:{_MAX_VALUE_LENGTH}]
        except Exception as raised:
            error = type(raised).__name__
    passed = errors.count(None), [*map(run, hidden)].count(None)
    raise AssertionError({REPORT_MARK!r} + json.dumps([*passed, failed, error, value], ensure_ascii=False))
_main({public!r}, {hidden!r}, {calls!r})
"""


def _read_report(judgement: Judgement) -> tuple[int, int, int, str, str] | None:
    """Return the numbers of public and hidden tests that passed, and the first public failure; None without a report.

    The failure is its test's index or -1, its error, and the value that the test got.
    """
    report = read_report(judgement)
    if report is None:
        return None
    public, hidden, failed, error, value = report
    return public, hidden, failed, error, _ADDRESS.sub("", value)


def _explain_failure(source: str, error: str, value: str) -> str:
    """Explain why a public test failed, such as `f(2)=7 not 8`, `f(2): IndexError` or the test as it stands."""
    call, expected = split_equality(source)
    if call and error == "AssertionError":
        return _shorten(f"{call}={value} not {expected}")
    return _shorten(f"{call or source}: {error}")


@lru_cache(maxsize=4096)
def split_equality(source: str) -> tuple[str, str]:
    """Return both sides of a test that is one `assert A == B`; empty for others."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", ""
    if len(body) == 1 and isinstance(body[0], ast.Assert) and isinstance(body[0].test, ast.Compare):
        test = body[0].test
        if len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            actual = ast.get_source_segment(source, test.left) or ""
            return actual, ast.get_source_segment(source, test.comparators[0]) or ""
    return "", ""


def _shorten(text: str) -> str:
    return " ".join(text.split())[:MAX_REPORT_LENGTH]
