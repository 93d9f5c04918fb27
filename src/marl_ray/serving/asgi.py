"""The gateway: an ASGI application that assigns sessions to arms, acts, and joins outcomes.

Raw ASGI and orjson, because with small policies a web framework would cost more than the forward pass. What the routes
do is in `acting`, `outcomes` and `administration`; here is what they share.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import orjson
from prometheus_client.core import Metric

from marl_ray.config import ArmConfig, BreakerConfig, ExperimentConfig, GatewayConfig
from marl_ray.errors import MarlRayError
from marl_ray.experiments.notices import Notices
from marl_ray.experiments.states import Action
from marl_ray.experiments.store import AssignmentState, ExperimentStore, StoreError
from marl_ray.serving.arms.actor_critic import AnyBundle, ArmBatcher, is_text
from marl_ray.serving.arms.passes import Passes
from marl_ray.serving.arms.protocol import TextArm
from marl_ray.serving.arms.response_cache import make_cache
from marl_ray.serving.evidence.webhook import Webhook
from marl_ray.serving.handlers.routes import Route, find
from marl_ray.serving.http.cors import preflight, told
from marl_ray.serving.http.deadlines import Deadlines
from marl_ray.serving.http.keys import Keys, Permission
from marl_ray.serving.http.protocol import (
    ClientGoneError,
    Headers,
    Receive,
    Request,
    RequestError,
    Response,
    Scope,
    Send,
    Stream,
    respond,
    stream,
)
from marl_ray.serving.http.rate_limits import RateLimiter
from marl_ray.serving.loading import Bundles, LoadedExperiment, check_log, load_configured
from marl_ray.serving.logs.act_log import DecisionLog
from marl_ray.serving.logs.exposures import ExposureLog
from marl_ray.serving.logs.metrics import ArmMeters, Metrics
from marl_ray.serving.logs.spool import Spool, spool_folder
from marl_ray.serving.readings import Readings
from marl_ray.serving.routing.breaker import Breaker, CircuitState
from marl_ray.serving.routing.endpoints import Endpoints
from marl_ray.serving.routing.failures import FailedSessions
from marl_ray.serving.routing.look_ups import LookUps
from marl_ray.serving.routing.router import Arm, Router
from marl_ray.serving.store_follower import Follower

T = TypeVar("T")
Host = Callable[[AnyBundle, str, ArmConfig], Arm | TextArm]
"""Makes an arm in a deployment of its own, from its bundle, the bundle's reference and how large it shall be."""

STORE_THREADS, LOOK_UP_THREADS = 4, 2
LOADING_S = 600.0
"""Deadline of requests that fetch bundles."""
LOOK_UPS = BreakerConfig(failures=1, open_s=1.0, probes=1)
"""After a look-up that failed acts do without the database for a second."""
CIRCUITS = {CircuitState.CLOSED: 0.0, CircuitState.HALF_OPEN: 0.5, CircuitState.OPEN: 1.0}
"""Their metric."""
REFUSAL_S = 1.0
"""How long a reader who has used up the rate waits for being told so."""
ACTOR = "gateway"

_log = logging.getLogger(__name__)
_access = logging.getLogger("marl_ray.access")


class Gateway:
    """The ASGI application. Everything that outlives a process is in the store."""

    def __init__(
        self, config: GatewayConfig, seed: int | None = None, host: Host | None = None, replica: str | None = None
    ):
        """Open the store and load what serves, also of experiments that were created over HTTP; MarlRayError if the store
        cannot be used, or a new experiment's bundle cannot be had. Blocks. `seed` makes sampling repeatable; `host` serves
        `placement: deployment`; `replica` names this one among several in `/metrics`."""
        self.config = config
        self.metrics = Metrics(replica)
        self.keys = Keys(config.api_keys)
        self.cache = make_cache(config.cache)
        self.decisions = DecisionLog(config.decision_log, f"{config.spool}/decisions") if config.decision_log else None
        self.store = ExperimentStore(config.database)
        self.notices = Notices(self.store)
        self.webhook = Webhook(config.webhook, self.notices, self.endpoints_of) if config.webhook else None
        self.bundles = Bundles(config.tracking_uri)
        loaded = load_configured(config, self.store, self.bundles)
        self.exposures = ExposureLog(self.store, Spool(spool_folder(config.spool, config.database), config.spool_bytes))
        self.endpoints = Endpoints()
        self.failed_sessions = FailedSessions(self)
        self._deadlines = Deadlines()
        self._passes: dict[str, Passes] = {}
        """Experiment -> its arms' forward passes."""
        self.models: dict[str, AnyBundle] = {}
        """Bundles loaded ahead of any experiment, by reference into the registry, where versions never change."""
        self.plots: dict[str, tuple[float, dict[str, list[list[float | None]]]]] = {}
        """Experiment -> until when its curves are not read again, and they."""
        self.readings = Readings()
        self.started: float | None = None
        """When this replica began to serve, in seconds since 1970."""
        self._host, self._noise = host, np.random.default_rng(seed)
        self._limiter = RateLimiter(config.rate_limit) if config.rate_limit else None
        self._read_limiter = RateLimiter(config.read_limit) if config.read_limit else None
        self._threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="experiment-store")
        # Of their own, because acts must not wait behind outcomes and reports.
        self.look_ups = LookUps(self.store.assignments, LOOK_UP_THREADS)
        self.look_up_circuit = Breaker(LOOK_UPS)
        for part in loaded:
            self.open(part)
        self.follower = Follower(self)
        self.follower.look(waits=True)
        for name in config.holdouts.keys() - {router.config.served_as for router in self.endpoints.routers.values()}:
            _log.warning("holdouts.%s: no experiment serves this endpoint yet", name)

    def start(self) -> None:
        """Start writing exposures and following the store; the ASGI lifespan calls it."""
        self.exposures.start()
        if self.decisions is not None:
            self.decisions.start()
        self.follower.start()
        if self.webhook is not None:
            self.webhook.start()
        self.started = time.time()

    def close(self) -> None:
        """Write what is queued and let go of the store; blocks for some seconds at most."""
        self.follower.close()
        if self.webhook is not None:
            self.webhook.close()
        self._write_failed_sessions()
        self.exposures.close()
        if self.decisions is not None:
            self.decisions.close()
        for router in self.endpoints.routers.values():
            router.close()
        self.readings.close()
        self.look_ups.close()
        self._threads.shutdown(cancel_futures=True)
        self.store.close()

    def _write_failed_sessions(self) -> None:
        try:
            self.failed_sessions.write()
        except StoreError as error:
            _log.error("failures of sessions are lost: %s", error)

    def open(self, part: LoadedExperiment, actor: str = "config", reason: str = "opened", **more: Any) -> Router:
        """Register an experiment with the store and route to it; `more` is stored beside its config. Blocks. Raises
        MarlRayError if the stored experiment forbids it, or if an arm cannot be hosted."""
        check_log(self.config, part.config.name, part.bundles.values())
        arms = {arm: self.arm(part.config, arm, bundle) for arm, bundle in part.bundles.items()}
        self.store.open_experiment(part.config.name, part.stored_config() | more, actor=actor, reason=reason)
        return self.take_in(part.config, self.store.table(part.config.name), arms)

    def take_in(
        self, config: ExperimentConfig, state: AssignmentState, arms: Mapping[str, Arm | TextArm] = MappingProxyType({})
    ) -> Router:
        """Route to a stored experiment, of which these arms are loaded."""
        return self.endpoints.add(Router(config, arms, state, self.exposures, state.created))

    def arm(self, experiment: ExperimentConfig, arm: str, bundle: AnyBundle) -> Arm | TextArm:
        """An arm of an experiment, from its bundle. Blocks where it is started elsewhere. Raises MarlRayError."""
        config = experiment.arms[arm]
        if experiment.placement == "replica":
            if is_text(bundle):
                from marl_ray.serving.arms.text import TextBatcher  # transformers takes seconds to import

                # An arm that hangs must leave time for the control to answer in its stead.
                return TextBatcher(bundle, self.config.max_batch, self.config.request_timeout_s / 2)
            passes = self._passes.setdefault(experiment.name, Passes(self.config.max_batch, self._noise))
            return ArmBatcher(bundle, passes)
        if self._host is None:
            raise MarlRayError(
                f"experiments.{experiment.name}.placement: deployment needs Ray Serve; expected replica here"
            )
        return self._host(bundle, config.bundle, config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise MarlRayError(f"the gateway speaks HTTP only, got {scope['type']!r}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                for router in self.endpoints.routers.values():
                    await router.shadows.close()
                if self.cache is not None:
                    await self.cache.close()
                await asyncio.to_thread(self.close)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, self.config.max_body_bytes)
        try:
            await self._answer(scope, request, send)
        finally:
            request.close()

    async def _answer(self, scope: Scope, request: Request, send: Send) -> None:
        start = time.perf_counter()
        # Metrics are labelled by route: paths are the caller's choice and would be labels without end.
        endpoint = "other"
        problem: Callable[[RequestError], bytes] = RequestError.body
        response: Response | Stream
        try:
            early = preflight(self.config.cors, request, scope["method"]) if scope["method"] == "OPTIONS" else None
            if early is None:
                route = find(request.path, scope["method"])
                endpoint, problem = route.template, route.problem
                response = await self._handled(route, request)
            else:
                response = early
        except ClientGoneError:
            return
        except RequestError as error:
            response = Response(problem(error), error.status, headers=error.headers)
        except StoreError as error:
            _log.error("%s", error)
            response = Response(problem(RequestError(503, None, str(error))), 503)
        except Exception:  # a defect of ours: the log has it, the caller learns no internals
            _log.exception("request %s to %s failed", request.id, endpoint)
            response = Response(problem(RequestError(500, None, "internal error")), 500)
        named: Headers = ((b"x-request-id", request.id.encode()),)
        if self.config.cors:
            named += told(self.config.cors, request)
        if isinstance(response, Stream):
            await self._streamed(send, request, response, named)
        self.metrics.count(endpoint, response.status)
        if response.status >= 400 or self.config.access_log == "all":
            self.log_line(
                "request",
                request_id=request.id,
                method=scope["method"],
                path=request.path[:200],
                status=response.status,
                ms=round(1000 * (time.perf_counter() - start), 3),
            )
        if isinstance(response, Response):
            await respond(send, response, named)

    async def _streamed(self, send: Send, request: Request, response: Stream, headers: Headers) -> None:
        """Send a stream for as long as the client reads it. Arms have deadlines of their own for every token."""

        async def patiently(message: Mapping[str, Any]) -> None:
            await self._deadlines.run(send(message), self.config.request_timeout_s)

        try:
            await request.while_there(stream(patiently, response, headers))
        except (ClientGoneError, TimeoutError):
            pass
        except Exception:  # a defect of ours, and too late for a status: the client sees the connection break
            _log.exception("request %s failed in mid-response", request.id)
        finally:
            response.close()

    async def _handled(self, route: Route, request: Request) -> Response | Stream:
        seconds = LOADING_S if route.loads else self.config.request_timeout_s
        wish = request.header(b"x-request-timeout-seconds")
        if wish is not None:
            try:
                seconds = min(seconds, float(wish))
            except ValueError:
                seconds = 0.0
            if not seconds > 0:
                raise RequestError(400, "x-request-timeout-seconds", "expected a number of seconds above 0")
        try:
            return await self._deadlines.run(route.handler(self, request), seconds)
        except TimeoutError:
            raise RequestError(504, None, f"no answer within {seconds:g} s") from None

    def admit(self, request: Request, permission: Permission) -> str:
        """The name of the request's key; RequestError 401, 403, or 429 if it has used up its rate."""
        key = self.keys.check(request, permission)
        self.limit(key, 1)
        return key

    async def admit_reader(self, request: Request, *also: Permission) -> str:
        """Likewise for reading, with the scope `read` or one of these. A refusal for the rate comes late, because readers
        without pause would otherwise be refused thousands of times a second, which takes as much as answering."""
        key = self.keys.check(request, "read", *also)
        if self._read_limiter is not None and (wait := self._read_limiter.take(key)) > 0:
            await asyncio.sleep(REFUSAL_S)
            raise RequestError(429, None, f"more readings of {key!r} than read_limit allows", retry_after_s=wait)
        return key

    def limit(self, key: str, cost: int) -> None:
        """Count `cost` requests of a key, or RequestError 429."""
        if self._limiter is not None and (wait := self._limiter.take(key, cost)) > 0:
            raise RequestError(429, None, f"more requests of {key!r} than its rate_limit allows", retry_after_s=wait)

    def meters(self, router: Router) -> dict[str, ArmMeters]:
        """The metrics of an experiment's arms."""
        return self.metrics.arms(router.config.name, router.config.arms)

    def endpoints_of(self) -> dict[str, str]:
        """Experiment -> its endpoint."""
        return {name: router.config.served_as for name, router in self.endpoints.routers.items()}

    def measure(self) -> None:
        """Bring the metrics up to date that nothing else writes."""
        shown = self.metrics
        shown.dropped.set(self.exposures.dropped)
        shown.waiting.set(self.exposures.waiting)
        shown.decisions_dropped.set(self.decisions.dropped if self.decisions is not None else 0)
        for name, router in self.endpoints.routers.items():
            for arm in router.arms:
                shown.circuit.labels(name, arm).set(CIRCUITS[router.circuits[arm].state])
            for arm, totals in list(router.shadows.totals.items()):
                for count in ("acts", "errors", "dropped", "decisions", "agreed"):
                    shown.shadows.labels(name, arm, count).set(getattr(totals, count))

    def samples(self) -> list[Metric]:
        """All metrics of now; from any thread."""
        self.measure()
        return list(self.metrics.registry.collect())

    def seed(self) -> int:
        """Of a text that came without one."""
        return int(self._noise.integers(1 << 63))

    def roll_back(self, router: Router, arm: str, reason: str) -> None:
        """Roll an arm back for good, in a thread. If the database is away the arm's open circuit keeps it from traffic, and
        the next time it opens this is tried again."""
        name = router.config.name

        def change() -> None:
            try:
                self.store.change(name, Action.ROLLBACK, epoch=None, actor=ACTOR, reason=reason, arm=arm)
                self.follower.look()
            except MarlRayError as error:
                _log.error("experiment %s: arm %s is not rolled back: %s", name, arm, error)

        self._threads.submit(change)

    def log_line(self, event: str, **fields: Any) -> None:
        """One line of JSON in the log."""
        _access.warning("%s", orjson.dumps({"at": time.time(), "event": event, **fields}).decode())

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what blocks on the database elsewhere."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
