"""A replica's round over the evidence, in which it decides on the experiments that may have news."""

import logging
import secrets
import time
from dataclasses import asdict

from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.lifecycle import ExperimentStatus
from marl_ray.experiments.store.facade import Stores
from marl_ray.serving.arm_loading.arm_loader import ArmLoader
from marl_ray.serving.arm_loading.live_experiments import LiveExperiments
from marl_ray.serving.ramp_decisions.ramp_control import decide
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.routing.unit_reports import UnitReports
from marl_ray.serving.store_poll.ended_experiments import EndedExperiments

WINNER_S = 30.0
"""Seconds between looks at the evidence of a promoted experiment that serves its endpoint and still gets units. Any
other ended experiment is looked at when the outcome window of a unit ends."""

_log = logging.getLogger(__name__)


class EvidenceRound:
    """Decides on the experiments of one replica.

    One thread at a time may call `decide`; what it shares with other threads is in `ended`, and in mappings that are
    replaced and never changed.
    """

    def __init__(
        self,
        stores: Stores,
        live_experiments: LiveExperiments,
        unit_reports: UnitReports,
        arm_loader: ArmLoader,
        ended: EndedExperiments,
    ):
        """Judge `live_experiments`, but of those that have ended only the ones that `ended` has as due.

        `arm_loader` knows which experiments still serve.
        """
        self._stores = stores
        self._live_experiments = live_experiments
        self._unit_reports = unit_reports
        self._arm_loader = arm_loader
        self._ended = ended
        self.winners_at = 0.0
        """Moment of the next look at promoted experiments, in monotonic seconds."""
        self._replica = secrets.token_hex(8)
        self._recorded_shadows: dict[str, object] = {}
        """Experiment -> the totals of its shadow arms that the store has of this replica."""

    def decide(self) -> None:
        """Store which sessions failed here and what they cost, then look once at the evidence.

        The evidence is that of open experiments, and of ended ones that may have new outcomes.
        """
        failure: StoreError | None = None
        try:
            self._unit_reports.write()
        except StoreError as error:  # such as a full disk, which must not prevent rollbacks
            failure = error
        for router in self._experiments_to_judge(time.monotonic()):
            self._judge(router)
        for name in self._ended.names():
            self._record_shadows(name)
        if failure is not None:
            raise failure

    def _experiments_to_judge(self, now: float) -> list[Router]:
        """Return the open experiments, and those of the ended ones that are due at `now`, in monotonic seconds."""
        routers = self._live_experiments.endpoints.routers
        names = {name for name, router in routers.items() if not router.rules.state.is_over}
        if due := self._ended.due_looks():
            moment = self._stores.database.settled_at()
            names |= {name for name, at in due.items() if at <= moment}
        if now >= self.winners_at:
            self.winners_at = now + WINNER_S
            serving_routers = (routers[name] for name, arms in self._arm_loader.needed.items() if arms)
            names |= {
                router.config.name
                for router in serving_routers
                if router.rules.state.status is ExperimentStatus.PROMOTED
            }
        return [routers[name] for name in routers if name in names]

    def _judge(self, router: Router) -> None:
        name = router.config.name
        try:
            self._ended.note_read(name)
            if (
                decide(self._stores.experiments, self._stores.evidence, router.config) is not None
                and router.rules.state.is_over
            ):
                self._note_due(name)
            self._record_shadows(name)
        except StoreError:
            self._ended.note_due(name)
            raise  # the database failed, so all other experiments would fail too
        except Exception:  # a defect in one experiment's numbers must not prevent rollbacks in the others
            _log.exception("experiment %s: its evidence cannot be judged", name)

    def _note_due(self, name: str) -> None:
        """Note when the next outcome window of this ended experiment ends, which is the moment of its next look."""
        record = self._stores.experiments.read(name)
        at = None if record is None else self._stores.evidence.next_judged(record)
        if at is not None:
            self._ended.note_due(name, at)

    def _record_shadows(self, name: str) -> None:
        # Copied at once, because the first copy of a request for another arm adds to the totals in the event loop.
        totals_by_arm = list(self._live_experiments.endpoints.routers[name].shadows.totals.items())
        totals = {arm: asdict(counts) for arm, counts in totals_by_arm}
        if totals and totals != self._recorded_shadows.get(name):
            self._stores.units.record_shadows(name, self._replica, totals)
            self._recorded_shadows[name] = totals
