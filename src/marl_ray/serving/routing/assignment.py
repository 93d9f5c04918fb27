"""Assignment of requests to experiments and arms."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from marl_ray.config import BreakerConfig
from marl_ray.errors import did_you_mean
from marl_ray.experiments.assignment.population import Attributes
from marl_ray.experiments.assignment.rendezvous import Assignment, is_held_out_unit
from marl_ray.experiments.database.connections import StoreError
from marl_ray.serving.errors import InvalidRequestError
from marl_ray.serving.logs.metrics import GatewayMetrics
from marl_ray.serving.routing.arm_lookups import Answers, ArmLookups, UnitKey
from marl_ray.serving.routing.breaker import Breaker
from marl_ray.serving.routing.endpoints import current_experiment, draining_experiments, remembering_experiment
from marl_ray.serving.routing.experiment.assignment_rules import UnitArm
from marl_ray.serving.routing.experiment.loaded_arms import LoadedArms
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.routing.unit_reports import UnitReports, counts_cost

LOOKUP_S = 2.0
"""Seconds that a request waits for the database to look up a session's arm."""
LOOKUP_THREADS = 2
"""Threads for lookups alone, so that acts never wait behind outcomes and reports."""
LOOKUP_CIRCUIT = BreakerConfig(failures=1, open_s=1.0, probes=1)
"""After a failed lookup, acts skip the database for a second."""

_log = logging.getLogger(__name__)


class SessionArm(NamedTuple):
    """A session and the arm that it is assigned to; `expose` records that it has met the arm."""

    router: Router
    arms: LoadedArms
    """The arms that answer the request, as they were loaded when it was assigned."""
    session: str
    unit_arm: UnitArm
    is_unit: bool
    """True if the session is a unit of the experiment; other sessions get an arm but do not count."""
    holdout: bool = False
    """True if the session is held out of all experiments of the endpoint."""

    @property
    def assignment(self) -> Assignment:
        """The assignment of the session's unit."""
        return self.unit_arm.assignment

    def head(self, assignment: Assignment, arm: str) -> dict[str, object]:
        """Return the fields about the arm that every answer has.

        If the control answers in place of the arm, they still name the session's own arm.
        """
        fields = {
            "experiment": self.router.config.name,
            "arm": arm,
            "epoch": assignment.epoch,
            "propensity": assignment.propensity,
        }
        if self.holdout:
            fields["holdout"] = True
        return fields | ({"fallback_for": assignment.arm} if arm != assignment.arm else {})

    def count_answer(self, seconds: float) -> None:
        """Count an answer to the session and the seconds that it took."""
        remembered = self.router.remembered.units.get(self.session) if self.is_unit else None
        if remembered is not None:
            remembered.acts += 1
            remembered.seconds += seconds

    def charge(self, usd: float | None, reports: UnitReports) -> None:
        """Queue the cost of a response to the session, in USD; None if the cost is unknown.

        Call it after `count_answer`: the first answer is noted in any case, so a session without priced responses has a
        cost of 0.
        """
        if not self.is_unit or not counts_cost(self.router.config):
            return
        remembered = self.router.remembered.units.get(self.session)
        if usd is None or usd > 0 or (remembered is not None and remembered.acts == 1):
            reports.note_cost(self.router.config.name, self.session, usd)


class Assigner:
    """Assigns requests to an experiment and an arm, on one event loop."""

    def __init__(
        self, read: Callable[[Sequence[UnitKey]], Answers], holdouts: Mapping[str, float], metrics: GatewayMetrics
    ):
        """`read` looks up sessions' arms in the database, and blocks; `holdouts` are shares by endpoint."""
        self.lookups = ArmLookups(read, LOOKUP_THREADS)
        self._circuit = Breaker(LOOKUP_CIRCUIT)
        self._holdouts = holdouts
        self._metrics = metrics

    def close(self) -> None:
        """End the threads that look up arms in the database."""
        self.lookups.close()

    async def assign(
        self,
        routers: Sequence[Router],
        session: str,
        cluster_id: str | None,
        attributes: Attributes,
        forced: str | None = None,
    ) -> SessionArm:
        """Assign a session to an arm of one of the experiments behind an endpoint.

        `forced` is the arm that a tester names: such a session is in no experiment. Raises InvalidRequestError if
        there is no such arm.
        """
        router = remembering_experiment(routers, session) if len(routers) > 1 else routers[0]
        if router is None:
            router = current_experiment(routers, session, cluster_id)
            # Experiments in which the session may have met an arm: older ones, and those whose layer share it had in
            # another cluster.
            others = draining_experiments(routers, router)
            others += [r for r in routers if r.rules.has_places_by_cluster and r is not router and r not in others]
            if others:
                has_met = await self._have_met(others, session)
                router = next((candidate for candidate, has in zip(others, has_met, strict=True) if has), router)
        if forced is not None:
            arms = router.arms
            if forced not in arms:
                reason = "not loaded here" if forced in router.config.arms else "unknown"
                raise InvalidRequestError(f"{forced!r} is {reason}{did_you_mean(forced, arms)}", "x-arm")
            unit_arm = UnitArm(Assignment(forced, arms.state.epoch, 1.0))
            return SessionArm(router, arms, session, unit_arm, is_unit=False)
        holdout = self._is_held_out(router, session, cluster_id)
        rules = router.rules
        is_unit = rules.is_in_share(session, cluster_id)
        if is_unit and (holdout or not rules.includes(session, cluster_id, attributes)):
            # A unit keeps its arm even if its attributes, the population or the hold-out have changed since.
            is_unit = rules.may_have_included(session, cluster_id)
            is_unit = is_unit and (await self._have_met([router], session))[0]
        elif not is_unit and rules.has_places_by_cluster:
            is_unit = (await self._have_met([router], session))[0]
        if is_unit:
            unit_arm = router.known_arm(session, cluster_id) or await self._look_up_arm(router, session, cluster_id)
            return SessionArm(router, router.arms, session, unit_arm, is_unit=True)
        rules = router.rules  # again, because they may have changed during a lookup
        outside = rules.control_assignment if holdout else rules.production_assignment
        return SessionArm(router, router.arms, session, UnitArm(outside), is_unit=False, holdout=holdout)

    def expose(self, session_arm: SessionArm) -> Assignment:
        """Record the exposure before the pass, because a session has met its arm even if the arm then fails."""
        if session_arm.holdout:
            self._metrics.count_holdout(session_arm.router.config.served_as)
        if not session_arm.is_unit:
            return session_arm.assignment
        first, assignment = session_arm.router.expose(session_arm.session, session_arm.unit_arm)
        if first:
            self._metrics.counters_of(session_arm.router.config)[assignment.arm].exposures += 1
        return assignment

    async def _look_up_arm(self, router: Router, session: str, cluster_id: str | None) -> UnitArm:
        """Return the arm of a session that this replica does not surely know, from the database if it answers."""
        stored = await self._look_up([router], session)
        return (
            router.provisional_arm(session, cluster_id)
            if stored is None
            else router.stored_arm(session, cluster_id, stored[0])
        )

    async def _have_met(self, routers: Sequence[Router], session: str) -> list[bool]:
        """Return, for each of these experiments, True if the session is known to have met an arm of it.

        This replica or the database knows that. A "no" is cached for as long as replicas may differ.
        """
        unknown = [
            router
            for router in routers
            if session not in router.remembered.units and not router.remembered.is_absent(session)
        ]
        assignments = await self._look_up(unknown, session) if unknown else None
        stored = set[str]()
        for router, assignment in zip(unknown, assignments or (), strict=False):
            if assignment is None:
                router.remembered.note_absent(session)
            else:
                stored.add(router.config.name)
        return [session in router.remembered.units or router.config.name in stored for router in routers]

    def _is_held_out(self, router: Router, session: str, cluster_id: str | None) -> bool:
        endpoint = router.config.served_as
        share = self._holdouts.get(endpoint, 0.0)
        return share > 0 and is_held_out_unit(endpoint, share, router.rules.draw_key(session, cluster_id))

    async def _look_up(self, routers: Sequence[Router], session: str) -> list[Assignment | None] | None:
        """Look up the session's arm in each of these experiments; None if the database does not answer.

        After a failure lookups are skipped for a while, because acts do not need the database.
        """
        ticket = self._circuit.allow()
        if not ticket:
            return None
        try:
            async with asyncio.timeout(LOOKUP_S):
                # All at the same moment, so that they share a statement.
                answers = [self.lookups.look_up(router.config.name, session) for router in routers]
                assignments = [await answers[0]] if len(answers) == 1 else await asyncio.gather(*answers)
        except (StoreError, TimeoutError) as error:
            self._circuit.failure(ticket)
            names = ", ".join(router.config.name for router in routers)
            _log.error("%s: assigning without the store: %s", names, str(error) or f"no answer within {LOOKUP_S:g} s")
            return None
        except BaseException:
            self._circuit.forget(ticket)
            raise
        self._circuit.success(ticket)
        return assignments
