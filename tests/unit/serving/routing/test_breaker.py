"""The circuit breaker, against a reference that keeps every request and judges from all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from clocks import Clock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from marl_ray.config import BreakerConfig
from marl_ray.serving.routing.breaker import Breaker, CircuitState

CLOSED, OPEN, HALF_OPEN = CircuitState


class WatchedClock(Clock):
    """A clock that calls `meanwhile`, if there is one, whenever somebody looks at it."""

    meanwhile: Callable[[], None] | None = None

    def __call__(self) -> float:
        if self.meanwhile is not None:
            self.meanwhile()
        return super().__call__()


def make(failures: int = 2, open_s: float = 5.0, probes: int = 2) -> tuple[Breaker, WatchedClock]:
    clock = WatchedClock()
    return Breaker(BreakerConfig(failures=failures, open_s=open_s, probes=probes), clock), clock


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.failure(breaker.allow())


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not():
    breaker, _ = make(failures=3)
    fail(breaker, 2)
    breaker.success(breaker.allow())
    fail(breaker, 2)
    assert breaker.state is CLOSED
    fail(breaker, 1)
    assert (breaker.state, breaker.allow(), breaker.opened) == (OPEN, 0, 1)


def test_probes_close_it_after_its_time():
    breaker, clock = make()
    fail(breaker, 2)
    assert breaker.retry_after_s == 5.0
    clock.now += 4.5
    assert (breaker.retry_after_s, breaker.allow()) == (0.5, 0)
    clock.now += 0.5
    assert (breaker.state, breaker.retry_after_s) == (HALF_OPEN, 0.0)
    first, second, third = (breaker.allow() for _ in range(3))
    assert first and second and not third
    breaker.success(first)
    assert breaker.state is HALF_OPEN
    breaker.success(second)
    assert breaker.state is CLOSED


def test_a_thread_that_reads_the_state_at_the_moment_of_a_probe_takes_no_probe_away():
    breaker, clock = make(probes=1)
    fail(breaker, 2)
    clock.now += 5.0
    probes = []

    def probe() -> None:
        clock.meanwhile = None
        probes.append(breaker.allow())

    clock.meanwhile = probe  # between the reader's look at the clock and what it does then
    assert breaker.state is HALF_OPEN
    assert probes != [0] and breaker.allow() == 0
    breaker.success(probes[0])
    assert breaker.state is CLOSED


def test_one_failing_probe_opens_it_anew_for_the_whole_time():
    breaker, clock = make()
    fail(breaker, 2)
    clock.now += 5
    good, bad = breaker.allow(), breaker.allow()
    breaker.success(good)
    breaker.failure(bad)
    assert (breaker.state, breaker.retry_after_s, breaker.opened) == (OPEN, 5.0, 2)


@pytest.mark.parametrize("late", ["success", "failure"])
def test_answers_of_requests_from_before_it_opened_change_nothing(late):
    breaker, clock = make(probes=1)
    old = [breaker.allow() for _ in range(6)]
    fail(breaker, 2)
    getattr(breaker, late)(old[0])
    assert (breaker.state, breaker.retry_after_s) == (OPEN, 5.0)
    clock.now += 5
    getattr(breaker, late)(old[1])
    probe = breaker.allow()
    getattr(breaker, late)(old[2])
    assert (breaker.state, breaker.allow()) == (HALF_OPEN, 0)
    breaker.success(probe)
    getattr(breaker, late)(old[3])
    getattr(breaker, late)(old[4])
    assert (breaker.state, breaker.opened) == (CLOSED, 1)


def test_a_probe_whose_client_left_is_free_again():
    breaker, clock = make(probes=1)
    fail(breaker, 2)
    clock.now += 5
    for _ in range(5):
        probe = breaker.allow()
        assert probe
        assert not breaker.allow()
        breaker.forget(probe)
    breaker.success(probe)  # too late: it was handed in
    assert breaker.state is HALF_OPEN


def test_requests_of_one_pass_count_once():
    breaker, clock = make(failures=2, probes=2)
    for _ in range(40):
        breaker.failure(breaker.allow(), pass_number=7)
    assert breaker.state is CLOSED
    breaker.failure(breaker.allow(), pass_number=8)
    assert breaker.state is OPEN
    clock.now += 5
    probe = breaker.allow()
    breaker.failure(probe, pass_number=8)  # asked before the circuit opened, and late: the probe is free again
    assert breaker.state is HALF_OPEN and breaker.allow() and breaker.allow()


def test_rounds_of_probes_that_fail_are_counted_until_it_closes():
    breaker, clock = make(failures=1, probes=1)
    fail(breaker, 1)
    for rounds in range(3):
        assert breaker.failed_rounds == rounds
        clock.now += 5
        fail(breaker, 1)
    clock.now += 5
    breaker.success(breaker.allow())
    assert (breaker.state, breaker.failed_rounds) == (CLOSED, 0)
    fail(breaker, 1)
    assert (breaker.state, breaker.failed_rounds) == (OPEN, 0)


def test_a_refusal_handed_in_changes_nothing():
    breaker, _ = make(failures=1)
    breaker.failure(0)
    assert breaker.state is CLOSED


@dataclass
class Period:
    """A stretch of time in one state, and what became of the requests that began in it."""

    state: CircuitState
    since: float
    begun: int = 0
    results: list[str] = field(default_factory=list)


class BreakerMachine(RuleBasedStateMachine):
    @initialize(failures=st.integers(1, 4), probes=st.integers(1, 3))
    def start(self, failures: int, probes: int) -> None:
        self.config = BreakerConfig(failures=failures, open_s=4.0, probes=probes)
        self.clock = WatchedClock()
        self.breaker = Breaker(self.config, self.clock)
        self.periods = [Period(CLOSED, self.clock.now)]
        self.out: list[tuple[int, Period]] = []
        self.handed_in: list[int] = []

    def judge(self) -> Period:
        """The present period, by the config's words."""
        period = self.periods[-1]
        results = [result for result in period.results if result != "forget"]
        failures = self.config.failures if period.state is CLOSED else 1
        then = None
        if period.state is not OPEN and results[-failures:] == ["failure"] * failures:
            then = OPEN
        elif period.state is HALF_OPEN and results.count("success") >= self.config.probes:
            then = CLOSED
        elif period.state is OPEN and self.clock.now >= period.since + self.config.open_s:
            then = HALF_OPEN
        if then:
            self.periods.append(Period(then, self.clock.now))
        return self.periods[-1]

    @rule()
    def ask(self) -> None:
        period = self.judge()
        under_way = period.begun - len(period.results)
        allowed = period.state is CLOSED or (period.state is HALF_OPEN and under_way < self.config.probes)
        ticket = self.breaker.allow()
        assert (ticket > 0) is allowed
        if allowed:
            period.begun += 1
            self.out.append((ticket, period))

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 9), result=st.sampled_from(["success", "failure", "failure", "forget"]))
    def answer(self, which: int, result: str) -> None:
        ticket, period = self.out.pop(which % len(self.out))
        if period is self.judge():
            period.results.append(result)
        getattr(self.breaker, result)(ticket)
        self.handed_in.append(ticket)

    @precondition(lambda self: self.handed_in)
    @rule(which=st.integers(0, 9))
    def forget_once_more(self, which: int) -> None:
        self.breaker.forget(self.handed_in[-1 - which % len(self.handed_in)])

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.judge()
        self.clock.now += seconds

    @invariant()
    def agrees(self) -> None:
        period = self.judge()
        assert self.breaker.state is period.state
        assert self.breaker.opened == sum(p.state is OPEN for p in self.periods)
        closed = max(k for k, p in enumerate(self.periods) if p.state is CLOSED)
        openings = sum(p.state is OPEN for p in self.periods[closed:])
        assert self.breaker.failed_rounds == max(0, openings - 1)
        remaining_s = period.since + self.config.open_s - self.clock.now if period.state is OPEN else 0.0
        assert self.breaker.retry_after_s == remaining_s


BreakerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestBreakerAgreesWithTheReference = BreakerMachine.TestCase


def test_failures_of_one_session_in_a_row_count_once():
    breaker, _ = make(failures=2)
    for _ in range(5):
        breaker.failure(breaker.allow(), session="a")
    assert breaker.state is CircuitState.CLOSED
    breaker.success(breaker.allow())
    breaker.failure(breaker.allow(), session="a")
    breaker.failure(breaker.allow())  # lost calls are anybody's
    assert breaker.state is CircuitState.OPEN
