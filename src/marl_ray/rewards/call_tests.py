"""Many tests that call one function, in one run of the program; each test has its own verdict.

The program is loaded once and its calls share its process, in the order of the tests; every test has fresh names and a
fresh set-up, as it would have alone. A test that disturbs the process changes no other test's verdict:

- a test that exceeds the limits of one test in time or memory runs again by itself, the tests behind it in another run;
- the tests see changes that a call makes to its arguments only if the call is a statement of its own;
- every test runs by itself if the process ends, hands over a value that may not cross, or is late;
- if the program already fails while it is loaded, all tests have that verdict.

The process is late when it uses up the time of `MAX_SHARED_LIMITS` tests. A test that runs by itself has the verdict of
that run. Where every test does, however slow that is, no report of the process counts. So a program gains nothing by
breaking its process: at worst its tests have the verdicts that they have alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from marl_ray.rewards.run_reports import LOADING_VERDICTS, REPORT_MARK, read_report
from marl_ray.sandbox import Judgement, Limits, Pool
from marl_ray.sandbox.in_place import looks_at_arguments

MAX_SHARED_LIMITS = 3
"""Number of time limits that the tests of one run may take together."""
MAX_TESTS = 256
"""Maximum number of tests in one run: the report has room for this many."""
_VERDICTS = {"p": "passed", "w": "fail:wrong", "e": "fail:error"}
_AGAIN_LETTER = "a"
"""Letter that ends the report, of a test that took too long or found no memory and has to run by itself."""


def run_calls(
    pool: Pool, code: str, tests: Sequence[str], entry_point: str, setup: str, limits: Limits
) -> tuple[list[str], float]:
    """Judge each test and return the verdicts, with the CPU seconds of the runs that gave them.

    The verdicts are those of `Judgement.verdict`.
    """
    verdicts: list[str] = []
    cpu_s = 0.0

    def judge(source: str, setup: str, times: int = 1, in_place: Literal["alone", False] | None = None) -> Judgement:
        shared_limits = replace(limits, cpu_s=times * limits.cpu_s, wall_s=times * limits.max_wall_s)
        return pool.judge(code, source, entry_point=entry_point, setup=setup, limits=shared_limits, in_place=in_place)

    def judge_alone(sources: Sequence[str]) -> None:
        nonlocal cpu_s
        for source in sources:
            judgement = judge(source, setup)
            verdicts.append(judgement.verdict)
            cpu_s += judgement.cpu_s

    while len(verdicts) < len(tests):
        pending = tuple(tests[len(verdicts) : len(verdicts) + MAX_TESTS])
        if len(pending) == 1:
            judge_alone(pending)
            break
        reads_arguments = any(looks_at_arguments(test, entry_point) for test in pending)
        program = _program(pending, entry_point, setup, limits.cpu_s)
        judgement = judge(program, "", min(MAX_SHARED_LIMITS, len(pending)), "alone" if reads_arguments else False)
        if judgement.verdict in LOADING_VERDICTS:
            cpu_s += judgement.cpu_s
            report: str | None = read_report(judgement)
            if report is None:
                return [judgement.verdict] * len(tests), cpu_s
            verdicts += [_VERDICTS[letter] for letter in report if letter != _AGAIN_LETTER]
            if report.endswith(_AGAIN_LETTER):
                judge_alone([tests[len(verdicts)]])
            continue
        loaded = judge("", setup)
        if not loaded.passed:
            return [loaded.verdict] * len(tests), loaded.cpu_s
        judge_alone(tests[len(verdicts) :])
    return verdicts, cpu_s


@lru_cache(maxsize=1024)
def _program(tests: tuple[str, ...], entry_point: str, setup: str, cpu_s: float) -> str:
    """Return the judge's program, which runs every test by itself.

    The program raises an AssertionError whose text is a letter for each test. A test that takes longer than `cpu_s` on the
    clock has to run again, where its CPU time counts.
    """
    return f"""
def _main(function, tests, setup):
    import json, random, signal
    class Late(BaseException):
        pass
    watched = []
    def late(signum, frame):
        if watched:
            raise Late
    def run(source):
        random.seed(source.encode("utf-8", "surrogatepass"))
        names = {{"__name__": "tests"}}
        try:
            exec(setup, names)
            names[{entry_point!r}] = function
            exec(compile(source, "<tests>", "exec", dont_inherit=True), names)
        except AssertionError:
            return "w"
        except MemoryError:
            return {_AGAIN_LETTER!r}
        except Exception:
            return "e"
        return "p"
    def watch(source):
        watched.append(source)
        try:
            return run(source)
        except Late:
            return {_AGAIN_LETTER!r}
        finally:
            watched.clear()
    setup = compile(setup, "<setup>", "exec", dont_inherit=True)
    before, report = signal.signal(signal.SIGALRM, late), ""
    for test in tests:
        left = signal.setitimer(signal.ITIMER_REAL, {cpu_s!r})[0]
        try:
            report += watch(test)
        except Late:
            report += {_AGAIN_LETTER!r}
        signal.setitimer(signal.ITIMER_REAL, left)
        if report[-1] == {_AGAIN_LETTER!r}:
            break
    signal.signal(signal.SIGALRM, before)
    raise AssertionError({REPORT_MARK!r} + json.dumps(report))
_main({entry_point}, {tests!r}, {setup!r})
"""
