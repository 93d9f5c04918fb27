"""Rewards for code: a program earns by passing tests, by its style and by its speed.

Hidden tests score; public tests only shape, by the difference of a potential (Ng et al. 1999). So over the turns of an
episode shaping adds up to the last answer's public score, and no detour earns more. Style and speed count only for
programs that pass every hidden test, so a program earns neither by doing less than was asked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pydantic import Field

from marl_ray.config.base import Config
from marl_ray.deadlines.seconds import DAY_S, check_seconds
from marl_ray.rewards.call_tests import run_calls
from marl_ray.rewards.extraction import extract
from marl_ray.rewards.option_numbers import check_not_negative
from marl_ray.rewards.outputs import outputs_match
from marl_ray.rewards.style import style
from marl_ray.sandbox import Limits, Pool, Status
from marl_ray.sandbox.client.shared_pool import shared_pool
from marl_ray.sandbox.limits import check_memory

CPU_NOISE_S = 0.01
"""Seconds added to both CPU times: a smaller difference comes from the machine and not from the program."""
_MIN_OUTPUT_BYTES = 1 << 20
"""Room for a program's output, in bytes, whatever is expected: a program may print more than it should."""


class CodeRewardConfig(Config):
    """Weights of the parts of a reward for code, and the limits of its tests."""

    correctness: float = Field(default=1.0, ge=0)
    """Weight of the fraction of hidden tests that pass."""
    style: float = Field(default=0.0, ge=0)
    """Weight of 1 / (1 + ruff violations). Counts only where all hidden tests pass."""
    efficiency: float = Field(default=0.0, ge=0)
    """Weight of the reference's CPU time over the program's, at most 1. Counts only where all hidden tests pass."""
    shaping: float = Field(default=0.0, ge=0)
    """Weight of the change in the fraction of public tests that pass, from one turn to the next."""
    timeout_s: float = Field(default=3.0, gt=0, lt=DAY_S)
    """CPU seconds of one test, less than a day."""
    memory_bytes: int = Field(default=1 << 30, ge=1 << 26, le=1 << 48)
    """Address space of the program that is tested, from 64 MiB to 256 TiB."""


@dataclass(frozen=True)
class CallTest:
    """Python statements that call the entry point and assert."""

    source: str


@dataclass(frozen=True)
class StdioTest:
    """Input for a program and the output that it should print."""

    stdin: bytes
    stdout: bytes


Test = CallTest | StdioTest


@dataclass(frozen=True)
class CodeTask:
    """A programming problem. Call tests need an entry point; stdio tests run the whole program."""

    hidden: tuple[Test, ...]
    public: tuple[Test, ...] = ()
    entry_point: str = ""
    setup: str = ""
    """Trusted code that the tests need, such as imports. The program under test never sees it."""
    reference: str = ""
    """A correct program; needed for efficiency."""


@dataclass(frozen=True)
class CodeTestResults:
    """Results of some tests."""

    passed: int
    total: int
    cpu_s: float
    verdicts: tuple[str, ...]

    def part(self, begin: int, end: int) -> "CodeTestResults":
        """Return the results of the tests at places `begin` to `end`; the CPU time stays that of all tests."""
        verdicts = self.verdicts[begin:end]
        return CodeTestResults(verdicts.count("passed"), len(verdicts), self.cpu_s, verdicts)

    @property
    def fraction(self) -> float:
        """Fraction of the tests that passed; 0 if there are none."""
        return self.passed / self.total if self.total else 0.0


@dataclass(frozen=True)
class CodeReward:
    """A reward and its parts; the parts are unweighted, in [0, 1]."""

    score: float
    """Correctness, style and efficiency, weighted."""
    shaping: float
    """Weighted change of the potential; add it to the score, or use it as the reward of a turn."""
    correctness: float
    style: float
    efficiency: float
    public: float
    """Fraction of the public tests that passed: `public_before` of the next turn."""
    code: str | None
    """The tested code; None if the answer has no complete block."""
    verdicts: tuple[str, ...]
    """Verdicts of the hidden tests, in order, for people and logs, never for the policy."""


def run_tests(pool: Pool, code: str, tests: tuple[Test, ...], task: CodeTask, limits: Limits) -> CodeTestResults:
    """Run tests in hardened mode.

    Stdio tests run one by one, and all calls in one run of the program (see `call_tests`).
    """
    verdicts: list[str] = []
    called: Iterator[str] = iter(())
    cpu_s = 0.0
    calls = [test.source for test in tests if isinstance(test, CallTest)]
    if calls:
        call_verdicts, cpu_s = run_calls(pool, code, calls, task.entry_point, task.setup, limits)
        called = iter(call_verdicts)
    for test in tests:
        if isinstance(test, StdioTest):
            verdict, cpu = _run_stdio(pool, code, test, limits)
            cpu_s += cpu
        else:
            verdict = next(called)
        verdicts.append(verdict)
    return CodeTestResults(verdicts.count("passed"), len(tests), cpu_s, tuple(verdicts))


def code_reward(
    pool: Pool,
    task: CodeTask,
    answer: str,
    config: CodeRewardConfig,
    *,
    public_before: float = 0.0,
    reference_cpu_s: float | None = None,
) -> CodeReward:
    """Return the reward of a model's answer (its code is extracted) to a task.

    `public_before` is the fraction of public tests that the previous turn's answer passed. `reference_cpu_s` is the
    result of `reference_cpu`, if known; otherwise the reference is run again.
    """
    code = extract(answer, task.entry_point)
    limits = Limits(cpu_s=config.timeout_s, memory_bytes=config.memory_bytes)
    if code is None:
        return CodeReward(0.0, -config.shaping * public_before, 0.0, 0.0, 0.0, 0.0, None, ("no code",))
    results = run_tests(pool, code, (*task.public, *task.hidden), task, limits)
    public, hidden = results.part(0, len(task.public)).fraction, results.part(len(task.public), results.total)
    style_score = efficiency = 0.0
    if hidden.passed == hidden.total > 0:
        style_score = style(code) if config.style else 0.0
        if config.efficiency:
            reference = reference_cpu(pool, task, config) if reference_cpu_s is None else reference_cpu_s
            if reference is not None:
                efficiency = min(1.0, (reference + CPU_NOISE_S) / (hidden.cpu_s + CPU_NOISE_S))
    score = config.correctness * hidden.fraction + config.style * style_score + config.efficiency * efficiency
    shaping = config.shaping * (public - public_before)
    return CodeReward(score, shaping, hidden.fraction, style_score, efficiency, public, code, hidden.verdicts)


def reference_cpu(pool: Pool, task: CodeTask, config: CodeRewardConfig) -> float | None:
    """Return the CPU seconds of the reference for all tests; None if there is no reference or it fails.

    Without them there is no efficiency.
    """
    if not task.reference:
        return None
    limits = Limits(cpu_s=config.timeout_s, memory_bytes=config.memory_bytes)
    results = run_tests(pool, task.reference, (*task.public, *task.hidden), task, limits)
    return results.cpu_s if results.passed == results.total else None


def limits_of_tests(timeout_s: float, memory_bytes: int) -> Limits:
    """Return the limits of tests. Raises ValueError naming the one that is out of its range."""
    check_seconds("timeout_s", timeout_s)
    check_memory("memory_bytes", memory_bytes)
    return Limits(cpu_s=timeout_s, memory_bytes=memory_bytes)


class CodeTests:
    """Pays for a program as `code_reward` scores one.

    The environment's metric `hidden` is taken where there is one; otherwise the hidden tests of `task.code` run here.

    correctness: weight of the fraction of hidden tests that pass, 1; every weight is finite, 0 or more.
    style: weight of the style, which counts where all tests pass, 0.
    efficiency: weight of the speed, which counts where all tests pass, 0.
    timeout_s: CPU seconds of the tests that run here, 3; less than a day.
    memory_bytes: memory of the tests that run here, 1 GiB; from 64 MiB to 256 TiB.
    """

    needs = ("code",)

    def __init__(
        self,
        correctness: float = 1.0,
        style: float = 0.0,
        efficiency: float = 0.0,
        timeout_s: float = 3.0,
        memory_bytes: int = 1 << 30,
    ):
        """Raise ValueError naming the weight or the limit that is out of its range."""
        for name, weight in {"correctness": correctness, "style": style, "efficiency": efficiency}.items():
            check_not_negative(name, weight)
        self.correctness, self.style, self.efficiency = correctness, style, efficiency
        self.limits = limits_of_tests(timeout_s, memory_bytes)

    def __call__(self, prompt: str, answer: str, task: Any, metrics: Mapping[str, float]) -> float:
        """Return the score of the program for `task.code`; style and efficiency count only if all hidden tests pass."""
        code: CodeTask = task.code
        hidden = metrics.get("hidden")
        if hidden is None:
            hidden = run_tests(shared_pool(), answer, code.hidden, code, self.limits).fraction
        score = self.correctness * hidden
        if hidden == 1 and self.style:
            score += self.style * style(answer)
        if hidden == 1 and self.efficiency:
            score += self.efficiency * self._speed(answer, code)
        return score

    def _speed(self, program: str, code: CodeTask) -> float:
        """Return the CPU time of the reference over the program's, at most 1; 0 without a reference that passes."""
        reference = _reference_cpu(code, self.limits)
        if reference is None:
            return 0.0
        results = run_tests(shared_pool(), program, (*code.public, *code.hidden), code, self.limits)
        return min(1.0, (reference + CPU_NOISE_S) / (results.cpu_s + CPU_NOISE_S))


@lru_cache(maxsize=4096)
def _reference_cpu(code: CodeTask, limits: Limits) -> float | None:
    """Return the CPU seconds of a task's reference, measured once in a process; None if it has none that passes."""
    config = CodeRewardConfig(timeout_s=limits.cpu_s, memory_bytes=limits.memory_bytes)
    return reference_cpu(shared_pool(), code, config)


def _run_stdio(pool: Pool, code: str, test: StdioTest, limits: Limits) -> tuple[str, float]:
    room = max(limits.output_bytes, _MIN_OUTPUT_BYTES, 2 * len(test.stdout))
    result = pool.run(code, stdin=test.stdin, limits=replace(limits, output_bytes=room))
    if result.status is not Status.OK:
        return str(result.status), result.cpu_s
    return "passed" if outputs_match(result.stdout, test.stdout) else "wrong", result.cpu_s
