"""The consequences of an arm's failure for its circuit, for the session, and for the experiment.

A failure is judged once the request is over, by one rule: it counts against an arm only if another arm has answered the
same request. If a treatment fails, the control answers in its place anyway. If the control fails, a treatment is asked
for comparison, and its answer is dropped. So an input on which every arm fails counts against none.

- A session whose arm failed has `error` 1 if another arm answered. The same holds for a session whose arm was not asked
because its circuit is open, but only after a round of probes has failed: before that, a few failed requests would count
for all sessions of that time. The test of the guardrail `error` compares these sessions' share with the control's.

- A treatment's failure counts in its circuit. Failures of one session in a row count once, unless the call was lost. Of
the control only lost calls count: no arm could answer in its place, so its open circuit merely saves waiting. A lost
call always counts, because its cause is not the input.

- A treatment is rolled back for its circuit alone if the config says `on_open: rollback`, and only once `rounds` rounds
of probes have failed in a row.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from marl_ray.serving.arms.errors import ArmError, LostError, NotFiniteError
from marl_ray.serving.errors import RETRY_AFTER_S, InvalidRequestError, ServingError, UnavailableError
from marl_ray.serving.logs.events import log_line
from marl_ray.serving.logs.metrics import GatewayMetrics
from marl_ray.serving.routing.assignment import SessionArm
from marl_ray.serving.routing.breaker import CircuitState
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.routing.unit_reports import UnitReports

ArmAnswer = TypeVar("ArmAnswer")
Ask = Callable[[str], Awaitable[ArmAnswer]]
"""Asks an arm of this name. Raises ServingError if the arm refuses the request, and any other error if the arm fails."""


class Failures:
    """Counts the failures of arms."""

    def __init__(self, reports: UnitReports, metrics: GatewayMetrics, roll_back: Callable[[Router, str, str], None]):
        """`roll_back` is given the experiment, the arm and a reason."""
        self.reports = reports
        self.metrics = metrics
        self.roll_back = roll_back

    def attempts(self, session_arm: SessionArm, arm: str) -> "Attempts":
        """Return the attempts to answer one request of a session, whose own arm is `arm` since its exposure."""
        return Attempts(self, session_arm, arm)


class Attempts:
    """The arms that one request has tried."""

    __slots__ = ("_answered_by", "_arm", "_arms", "_errors", "_failed", "_failures", "_router", "_session")

    def __init__(self, failures: Failures, session_arm: SessionArm, arm: str):
        """`arm` is the session's own arm."""
        self._answered_by: str | None = None
        """The arm that answered, or that answered only for comparison."""
        self._failures = failures
        self._router = session_arm.router
        self._arms = session_arm.arms
        self._session = session_arm.session
        self._arm = arm
        self._failed: tuple[tuple[str, int, Exception], ...] = ()
        self._errors: tuple[Exception, ...] = ()

    async def first_answer(
        self, ask: Ask[ArmAnswer], compare: Ask[object], field: str | None
    ) -> tuple[ArmAnswer, str, int]:
        """Ask the session's arm, then those that may answer in its place, until one does.

        Arms with an open circuit are skipped. Returns the answer, its arm, and a ticket that the caller hands in to
        the arm's circuit. Raises the error of `ask` if the arm refuses the request or the client leaves, and
        ServingError if no arm answers: `field` is the field of the request that the error names. `compare` asks a
        treatment for comparison.
        """
        router = self._router
        try:
            for arm in self._arms.answering_arms(self._arm):
                circuit = router.circuits[arm]
                ticket = circuit.allow()
                if not ticket:
                    continue
                try:
                    answer = await ask(arm)
                except (asyncio.CancelledError, ServingError):
                    circuit.forget(ticket)  # the client left, the request is impossible, or the arm is busy
                    raise
                except Exception as error:
                    self._failed += ((arm, ticket, error),)
                    self._errors += (error,)
                    continue
                self._answered_by = arm
                return answer, arm, ticket
            await self._compare(compare)
            raise self._refusal(field)
        finally:
            # This is skipped if the session's arm answered at once, as it mostly does.
            if self._failed or self._answered_by != self._arm:
                self._count_failures()

    async def _compare(self, ask: Ask[object]) -> None:
        """Ask a treatment the same request if only the control was tried and it failed, and drop the answer."""
        arm = self._comparison_arm()
        if arm is None:
            return
        try:
            await ask(arm)
            self._answered_by = arm
        except ServingError:
            pass  # the treatment is busy
        except Exception as error:
            self._errors += (error,)

    def _comparison_arm(self) -> str | None:
        """Return the first treatment that gets traffic and whose circuit is closed; None if there is none."""
        state = self._arms.state
        if [arm for arm, _, _ in self._failed] != [state.control]:
            return None
        treatments = (arm for arm in self._arms if arm != state.control and arm not in state.rolled_back)
        circuits = self._router.circuits
        return next((arm for arm in treatments if circuits[arm].state is CircuitState.CLOSED), None)

    def _refusal(self, field: str | None) -> ServingError:
        """Return the error for a client whose request no arm has answered.

        `field` is the field that the error names.
        """
        if len(self._errors) > 1 and all(isinstance(error, NotFiniteError) for error in self._errors):
            return InvalidRequestError("every arm's log-probabilities of this input are not finite", field)
        router = self._router
        wait = router.circuits[self._arms.state.control].retry_after_s or RETRY_AFTER_S
        return UnavailableError(f"no arm of experiment {router.config.name!r} answers", wait)

    def _count_failures(self) -> None:
        """Count the failures; called when it is known whether an arm has answered."""
        another_answered = self._answered_by is not None
        for arm, ticket, error in self._failed:
            self._count_failure(arm, ticket, error, another_answered)
        # An arm that is not loaded here (its bundle is gone, or the experiment has ended) has not failed.
        if another_answered and self._answered_by != self._arm and self._arm in self._arms:
            was_tried = any(arm == self._arm for arm, _, _ in self._failed)
            if was_tried or self._router.circuits[self._arm].failed_rounds:
                self._note_session_failed()

    def count_break_off(self, arm: str, ticket: int, error: Exception) -> None:
        """Count a failure after the answer had begun.

        Such a failure counts without comparison, because the arm had accepted the input.
        """
        self._count_failure(arm, ticket, error, True)
        if arm == self._arm:
            self._note_session_failed()

    def _count_failure(self, arm: str, ticket: int, error: Exception, another_answered: bool) -> None:
        router = self._router
        failures = self._failures
        circuit = router.circuits[arm]
        is_arms_fault = another_answered and arm != self._arms.state.control
        if not is_arms_fault and not isinstance(error, LostError):
            circuit.forget(ticket)
            return
        opened = circuit.opened
        session = None if isinstance(error, LostError) else self._session
        circuit.failure(ticket, error.pass_number if isinstance(error, ArmError) else None, session)
        failures.metrics.failures.labels(router.config.name, arm).inc()
        if circuit.opened == opened:
            return
        log_line("circuit_open", experiment=router.config.name, arm=arm, error=repr(error))
        breaker = router.config.breaker
        if is_arms_fault and breaker.on_open == "rollback" and circuit.failed_rounds >= breaker.rounds:
            rounds = "a round" if circuit.failed_rounds == 1 else f"{circuit.failed_rounds} rounds"
            failures.roll_back(router, arm, f"circuit open through {rounds} of probes: {error!r}")

    def _note_session_failed(self) -> None:
        remembered = self._router.remembered.units.get(self._session)
        if remembered is not None and remembered.assignment.arm == self._arm and not remembered.failed:
            remembered.failed = True
            self._failures.reports.note_failure(self._router.config.name, self._session)
