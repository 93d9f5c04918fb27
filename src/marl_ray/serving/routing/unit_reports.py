"""The queue of a replica's own reports about units: failures of their arms, and costs of responses.

Requests add to the queue and never wait for the database. Requests of one session may reach any replica, so each
replica reports its own spending, and the failures it has seen: a session whose arm failed may never report an outcome.
"""

import logging
import threading
from dataclasses import dataclass
from itertools import islice

from marl_ray.config import ExperimentConfig
from marl_ray.errors import MarlRayError
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.store.reports import Report
from marl_ray.experiments.store.units import UnitStore
from marl_ray.serving.logs.exposures import ExposureLog
from marl_ray.serving.routing.experiment.remembered_units import MAX_REMEMBERED

ACTOR = "gateway"
"""The actor of the changes that a gateway makes by itself, as the audit log and corrections name it."""
COST = "cost_usd"
"""Name of the metric that the cost of a unit's responses is stored under."""
BATCH = 500
"""Sessions per write."""

_log = logging.getLogger(__name__)


def counts_cost(config: ExperimentConfig) -> bool:
    """Return True if a guardrail needs the cost of units, and some arm has a price."""
    return any(rail.name == COST for rail in config.guardrails) and any(arm.price for arm in config.arms.values())


@dataclass(slots=True)
class _QueuedReports:
    """The queued reports of one session."""

    failed: bool = False
    usd: float | None = None
    """USD that the session has cost beyond what is stored; None if no cost was noted."""
    cost_unknown: bool = False

    def add(self, more: "_QueuedReports") -> None:
        self.failed |= more.failed
        self.cost_unknown |= more.cost_unknown
        if more.usd is not None:
            self.usd = (self.usd or 0.0) + more.usd

    def report(self, session: str) -> Report:
        return Report(
            session,
            {"error": 1.0} if self.failed else {},
            added={} if self.usd is None else {COST: self.usd},
            incomplete=(COST,) if self.cost_unknown else (),
        )


class UnitReports:
    """The queue of one replica, over all experiments. Safe to use from several threads."""

    def __init__(self, store: UnitStore, exposures: ExposureLog):
        self._store = store
        self._exposures = exposures
        self._waiting: dict[tuple[str, str], _QueuedReports] = {}
        """(Experiment, session) -> its reports, the oldest first."""
        self._is_dropping = False
        """True if the queue was full since it was last written; one line of the log says so."""
        self._changing = threading.Lock()
        self._writing = threading.Lock()

    def note_failure(self, experiment: str, session: str) -> None:
        """Queue that the session's arm failed: its `error` becomes 1. Never blocks."""
        self._note(experiment, session, _QueuedReports(failed=True))

    def note_cost(self, experiment: str, session: str, usd: float | None) -> None:
        """Queue that a response cost the session this much more, in USD; never blocks.

        None means that the cost is unknown, and then the session's `cost_usd` gives no evidence.
        """
        self._note(experiment, session, _QueuedReports(usd=usd, cost_unknown=usd is None))

    def _note(self, experiment: str, session: str, news: _QueuedReports) -> None:
        with self._changing:
            if len(self._waiting) >= MAX_REMEMBERED and (experiment, session) not in self._waiting:
                del self._waiting[next(iter(self._waiting))]
                if not self._is_dropping:
                    self._is_dropping = True
                    _log.error("%d sessions wait for the database: reports of the oldest are dropped", MAX_REMEMBERED)
            self._waiting.setdefault((experiment, session), _QueuedReports()).add(news)

    def write(self) -> None:
        """Store the queue. Blocks. If the database fails, raises StoreError and keeps what is not written."""
        with self._writing:
            while self._waiting:
                unwritten = self._next_batch()
                try:
                    self._exposures.flush()  # the exposures of these sessions may still be queued here
                    while unwritten:
                        experiment = next(iter(unwritten))
                        self._record(experiment, unwritten[experiment])
                        del unwritten[experiment]  # what was written must not be added again
                except StoreError:
                    for experiment, sessions in unwritten.items():
                        for session, news in sessions.items():
                            self._note(experiment, session, news)
                    raise
            self._is_dropping = False

    def _next_batch(self) -> dict[str, dict[str, _QueuedReports]]:
        """Take the oldest sessions from the queue: experiment -> session -> its reports."""
        batch: dict[str, dict[str, _QueuedReports]] = {}
        with self._changing:
            for experiment, session in list(islice(self._waiting, BATCH)):
                batch.setdefault(experiment, {})[session] = self._waiting.pop((experiment, session))
        return batch

    def _record(self, experiment: str, sessions: dict[str, _QueuedReports]) -> None:
        reports = [news.report(session) for session, news in sessions.items()]
        for result in self._store.record(experiment, reports, ACTOR):
            if isinstance(result, MarlRayError):
                _log.error("experiment %s: a failure or a cost of a session is not stored: %s", experiment, result)
