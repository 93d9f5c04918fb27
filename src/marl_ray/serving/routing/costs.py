"""What sessions have cost, on its way to the store. Every replica adds what it has spent itself, because the requests of a
session come to any of them."""

import logging
import threading

from marl_ray.config import ExperimentConfig
from marl_ray.errors import MarlRayError
from marl_ray.experiments.store.store import ExperimentStore, Report, StoreError
from marl_ray.serving.logs.exposures import ExposureLog

COST = "cost_usd"
BATCH = 500
"""Sessions of one write."""

_log = logging.getLogger(__name__)


def counts_cost(config: ExperimentConfig) -> bool:
    """Whether a guardrail asks for the cost of units, and some arm has a price."""
    return any(rail.name == COST for rail in config.guardrails) and any(arm.price for arm in config.arms.values())


class Costs:
    """Of all experiments, until `write`."""

    def __init__(self, store: ExperimentStore, exposures: ExposureLog):
        self._store, self._exposures = store, exposures
        self._waiting: dict[tuple[str, str], float] = {}
        self._changing, self._writing = threading.Lock(), threading.Lock()

    def note(self, experiment: str, session: str, usd: float) -> None:
        """Queue what a session has cost on top of what it has; does not wait for the store."""
        with self._changing:
            self._waiting[experiment, session] = self._waiting.get((experiment, session), 0.0) + usd

    def write(self) -> None:
        """Store what is queued. Raises StoreError, and keeps what is not written, if the database fails. Blocks."""
        with self._writing:
            while self._waiting:
                with self._changing:
                    batch = [(key, self._waiting.pop(key)) for key in list(self._waiting)[:BATCH]]
                by_experiment: dict[str, list[Report]] = {}
                for (experiment, session), usd in batch:
                    by_experiment.setdefault(experiment, []).append(Report(session, {}, added={COST: usd}))
                try:
                    self._exposures.flush()  # the sessions' own may be waiting here
                    while by_experiment:
                        experiment = next(iter(by_experiment))
                        self._record(experiment, by_experiment[experiment])
                        del by_experiment[experiment]
                except StoreError:
                    for experiment, reports in by_experiment.items():
                        for report in reports:
                            self.note(experiment, report.unit, report.added[COST])
                    raise

    def _record(self, experiment: str, reports: list[Report]) -> None:
        for found in self._store.record(experiment, reports, "gateway"):
            if isinstance(found, MarlRayError):
                _log.error("experiment %s: a cost of a session is not stored: %s", experiment, found)
