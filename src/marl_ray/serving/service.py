"""The services that the gateway's handlers share, in one record that every handler gets with its request.

Everything that outlives a process is in the store.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from prometheus_client.core import Metric

from marl_ray.closing import Unfinished, close_all
from marl_ray.config import GatewayConfig
from marl_ray.deadlines.side_by_side import CallTimeoutError, run_side_by_side, shut_down
from marl_ray.errors import MarlRayError
from marl_ray.experiments.database.connections import Database, StoreError
from marl_ray.experiments.lifecycle import Action
from marl_ray.experiments.store.experiments import ExperimentStore
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.notices import Notices
from marl_ray.serving.arm_loading.live_experiments import Host, LiveExperiments
from marl_ray.serving.arm_loading.loaded_bundles import BundleCache, check_configured, load_configured
from marl_ray.serving.arms.response_cache import make_cache
from marl_ray.serving.http.admission import Admission
from marl_ray.serving.http.keys import Keys
from marl_ray.serving.logs.acts import ActLog
from marl_ray.serving.logs.exposures import ExposureLog
from marl_ray.serving.logs.metrics import GatewayMetrics
from marl_ray.serving.logs.spool import Spool, spool_folder
from marl_ray.serving.ramp_decisions.curve_cache import CurveCache
from marl_ray.serving.ramp_decisions.webhook import Webhook
from marl_ray.serving.routing.assignment import Assigner
from marl_ray.serving.routing.breaker import CircuitState
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.routing.failures import Failures
from marl_ray.serving.routing.unit_reports import ACTOR, UnitReports
from marl_ray.serving.shared_reads import SharedReads
from marl_ray.serving.store_poll.store_follower import StoreFollower

T = TypeVar("T")

STORE_THREADS = 4
"""Number of threads, and so of requests that wait for the database at once."""
CLOSE_S = 20.0
"""Seconds that closing waits for changes under way, and for its own write, which may wait for one of exposures first."""
CIRCUIT_VALUES = {CircuitState.CLOSED: 0.0, CircuitState.HALF_OPEN: 0.5, CircuitState.OPEN: 1.0}
"""Value of the circuit metric for each state."""
SHADOW_METRICS = ("acts", "errors", "dropped", "decisions", "agreed", "tokens", "log_prob", "served_log_prob")
"""Fields of `ShadowTotals` that are metrics."""

_log = logging.getLogger(__name__)


def check_gateway(config: GatewayConfig) -> None:
    """Raise MarlRayError if a gateway of this config could not begin to serve.

    The error names a bundle, a database or a file of keys that cannot be read. The bundles are read in this process.
    """
    Keys(config.api_keys)
    database = Database(config.database)
    try:
        check_configured(config, ExperimentStore(database))
    finally:
        database.close()


class Service:
    """The services of one replica."""

    def __init__(self, config: GatewayConfig, seed: int | None, host: Host | None, replica: str | None):
        """Open the store and load the experiments that serve, also those that were created over HTTP.

        Blocks. `Gateway` describes the arguments. Raises MarlRayError if the store cannot be used or a new experiment's
        bundle cannot be loaded.
        """
        self.config = config
        self._noise = np.random.default_rng(seed)
        with Unfinished() as unfinished:
            # What requests are admitted and counted by.
            self.admission = Admission(config)
            self.metrics = GatewayMetrics(replica)

            # What outlives this process.
            self.stores = unfinished.keep(open_stores(config.database))
            self.notices = Notices(self.stores.database)
            """Changes that are still to reach other replicas, or the receiver of the webhook."""
            spool = unfinished.keep(Spool(spool_folder(config.spool, config.database), config.spool_bytes))
            self.exposures = ExposureLog(self.stores.units, spool)
            self.acts = ActLog(config.decision_log, f"{config.spool}/decisions") if config.decision_log else None
            """The log of acts and texts; None if the config keeps none."""
            self.unit_reports = UnitReports(self.stores.units, self.exposures)

            # What answers requests.
            self.bundles = BundleCache(config.tracking_uri)
            loaded_experiments = load_configured(config, self.stores.experiments, self.bundles)
            self.live_experiments = LiveExperiments(
                config, self.stores.experiments, self.exposures, self.bundles, self._noise, host
            )
            self.endpoints = self.live_experiments.endpoints
            unfinished.callback(self._close_arms)
            self.assigner = Assigner(self.stores.units.assignments, config.holdouts, self.metrics)
            self.failures = Failures(self.unit_reports, self.metrics, self.roll_back)
            self.cache = make_cache(config.cache)
            """Answers to greedy acts; None if the config keeps none."""

            # What people read.
            self.curves = CurveCache()
            self.shared_reads = SharedReads()

            # What runs in threads, of which none runs before `start`.
            self.webhook = (
                Webhook(config.webhook, self.notices, self.endpoints.by_experiment) if config.webhook else None
            )
            """None if the config names no receiver of notices."""
            self._threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="experiment-store")
            for experiment in loaded_experiments:
                self.live_experiments.open(experiment)
            self.follower = StoreFollower(
                self.stores, self.live_experiments, self.notices, self.unit_reports, self.webhook
            )
            self.follower.poll(waits=True)
            unfinished.pop_all()

        self.started: float | None = None
        """Moment at which this replica began to serve, in seconds since 1970; None before."""
        for name in config.holdouts.keys() - set(self.endpoints.by_experiment().values()):
            _log.warning("holdouts.%s: no experiment serves this endpoint yet", name)

    def start(self) -> None:
        """Start writing exposures and following the store; the ASGI lifespan calls it."""
        self.exposures.start()
        if self.acts is not None:
            self.acts.start()
        self.follower.start()
        if self.webhook is not None:
            self.webhook.start()
        self.started = time.time()

    def close(self) -> None:
        """Write what is queued and close the store.

        For each part that hangs, this waits the CLOSE_S seconds of that part's module, for each of its threads, and then
        goes on; the last write of exposures waits WRITING_S of theirs. Whatever a part raises, those after it are closed
        before it is raised here.
        """
        close_all(
            [
                self.follower.close,
                *([] if self.webhook is None else [self.webhook.close]),
                self._write_unit_reports,
                self.exposures.close,
                *([] if self.acts is None else [self.acts.close]),
                self._close_arms,
                self.shared_reads.close,
                self.assigner.close,
                self._end_changes,
                self.stores.close,
            ]
        )

    def _write_unit_reports(self) -> None:
        """Write the failures and costs of sessions that are still in memory; log it if they are lost."""
        try:
            run_side_by_side([self.unit_reports.write], 1, CLOSE_S)
        except StoreError as error:
            _log.error("failures or costs of sessions are lost: %s", error)
        except CallTimeoutError:
            _log.error("failures or costs of sessions are lost: their write has not ended within %g s", CLOSE_S)

    def _close_arms(self) -> None:
        """Close the arms of all experiments."""
        close_all(router.arms.close for router in self.endpoints.routers.values())

    def _end_changes(self) -> None:
        """Wait for the changes of experiments that are under way; log it if one hangs."""
        if not shut_down(self._threads, CLOSE_S):
            _log.error("a change of an experiment has not ended within %g s", CLOSE_S)

    async def leave_loop(self) -> None:
        """Close the connections and tasks that belong to the event loop; called before `close`."""
        for router in self.endpoints.routers.values():
            await router.shadows.close()
        if self.cache is not None:
            await self.cache.close()

    def update_gauges(self) -> None:
        """Update the metrics that are read from counters instead of being written as events happen."""
        metrics = self.metrics
        metrics.dropped.set(self.exposures.dropped)
        metrics.waiting.set(self.exposures.waiting)
        metrics.acts_dropped.set(self.acts.dropped if self.acts is not None else 0)
        for name, router in self.endpoints.routers.items():
            for arm in router.arms:
                metrics.circuit.labels(name, arm).set(CIRCUIT_VALUES[router.circuits[arm].state])
            for arm, totals in list(router.shadows.totals.items()):
                for count in SHADOW_METRICS:
                    metrics.shadows.labels(name, arm, count).set(getattr(totals, count))

    def read_metrics(self) -> list[Metric]:
        """Read the current value of all metrics; from any thread."""
        self.update_gauges()
        return list(self.metrics.registry.collect())

    def draw_seed(self) -> int:
        """Draw a seed for a request for text that names none."""
        return int(self._noise.integers(1 << 63))

    def roll_back(self, router: Router, arm: str, reason: str) -> None:
        """Roll an arm back for good, in a thread.

        If the database does not answer, the arm's open circuit keeps traffic away, and the next opening of the
        circuit tries again.
        """
        name = router.config.name

        def change() -> None:
            try:
                self.stores.experiments.change(name, Action.ROLLBACK, epoch=None, actor=ACTOR, reason=reason, arm=arm)
                self.follower.poll()
            except MarlRayError as error:
                _log.error("experiment %s: arm %s is not rolled back: %s", name, arm, error)
            except Exception:  # nobody reads the future
                _log.exception("experiment %s: arm %s is not rolled back", name, arm)

        self._threads.submit(change)

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function that blocks on the database in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
