"""The gateway: an ASGI application that assigns sessions to arms, acts, and joins outcomes.

Raw ASGI and orjson, because with small policies a web framework would cost more than the forward pass.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import orjson

from marl_ray.config import GatewayConfig
from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment import Assignment
from marl_ray.experiments.states import Action, StaleEpochError
from marl_ray.experiments.store import ExperimentStore, OutcomeConflictError, StoreError, UnknownUnitError
from marl_ray.serving.arms import load_bundles
from marl_ray.serving.exposures import ExposureLog
from marl_ray.serving.follower import Follower
from marl_ray.serving.http import (
    JSON,
    ClientGoneError,
    Receive,
    RequestError,
    Scope,
    Send,
    header,
    parse_object,
    read_body,
    respond,
    route_path,
)
from marl_ray.serving.keys import Keys
from marl_ray.serving.metrics import CONTENT_TYPE, Metrics
from marl_ray.serving.report import describe
from marl_ray.serving.router import LoadedExperiment, Router

T = TypeVar("T")
Handler = Callable[[Scope, Receive, str], Awaitable[bytes]]

SESSION_LENGTH = 256
LARGEST_OUTCOME = 1e100
"""Larger numbers would overflow the database's sums of squares."""
STORE_THREADS = 4
OTHER_REPLICAS_S = (0.1, 0.2, 0.4)
"""Pauses in which another replica's queued exposure has reached the store, before an outcome is refused."""

_ACT_FIELDS = frozenset({"experiment", "session_id", "observations", "action_masks", "mode"})
_OUTCOME_FIELDS = frozenset({"experiment", "session_id", "value", "metrics"})
_CHANGE_FIELDS = frozenset({"reason", "arm", "epoch"})
CHANGES = tuple(action.value for action in Action)
"""Last parts of the paths that change an experiment."""
_log = logging.getLogger(__name__)


def load_experiments(config: GatewayConfig) -> list[LoadedExperiment]:
    """All bundles of a gateway, verified. Raises MarlRayError naming the arm."""
    return [LoadedExperiment(part, load_bundles(part, config.tracking_uri)) for part in config.experiments]


class Gateway:
    """The ASGI application. Everything that outlives a process is in the store."""

    def __init__(self, config: GatewayConfig, seed: int | None = None):
        """Load bundles and open the store; MarlRayError if either is impossible. `seed` makes sampling repeatable."""
        self.config = config
        self.metrics = Metrics()
        loaded = load_experiments(config)
        self._store = ExperimentStore(config.database)
        self._log = ExposureLog(self._store)
        noise = np.random.default_rng(seed)
        self.routers: dict[str, Router] = {
            part.config.name: part.open(self._store, self._log, config.max_batch, noise) for part in loaded
        }
        self._follower = Follower(self._store, self.routers)
        self._keys = Keys(config.api_keys)
        self._threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="experiment-store")
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/act": ("POST", self._act),
            "/v1/outcomes": ("POST", self._outcome),
            "/v1/experiments": ("GET", self._list),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    def start(self) -> None:
        """Start writing exposures and following the store; the ASGI lifespan calls it."""
        self._log.start()
        self._follower.start()

    def close(self) -> None:
        """Write what is queued and let go of the store; blocks for some seconds at most."""
        self._follower.close()
        self._log.close()
        self._threads.shutdown(cancel_futures=True)
        self._store.close()

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
                await asyncio.to_thread(self.close)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        # Metrics are labelled by route: paths are the caller's choice and would be labels without end.
        endpoint = path if path in self._routes else "other"
        content_type = JSON
        extra: tuple[tuple[bytes, bytes], ...] = ()
        try:
            method, handler = self._find(path)
            if path.startswith("/v1/experiments/"):
                endpoint = "/v1/experiments/{name}" + (f"/{path.rpartition('/')[2]}" if path.count("/") == 4 else "")
            if scope["method"] != method:
                extra = ((b"allow", method.encode()),)
                raise RequestError(405, None, f"method {scope['method']} is not allowed on {path}, expected {method}")
            status, body = 200, await handler(scope, receive, path)
            content_type = CONTENT_TYPE if path == "/metrics" else JSON
        except ClientGoneError:
            return
        except RequestError as error:
            status, body = error.status, error.body()
        except StoreError as error:
            _log.error("%s", error)
            status, body = 503, RequestError(503, None, str(error)).body()
        except Exception:  # a defect of ours: the log has it, the caller learns no internals
            _log.exception("request to %s failed", endpoint)
            status, body = 500, RequestError(500, None, "internal error").body()
        self.metrics.requests.labels(endpoint, status).inc()
        if status >= 400:
            self.metrics.errors.labels(endpoint, status).inc()
        await respond(send, status, body, content_type, extra)

    def _find(self, path: str) -> tuple[str, Handler]:
        if path in self._routes:
            return self._routes[path]
        if path.startswith("/v1/experiments/"):
            _, _, last = path.removeprefix("/v1/experiments/").partition("/")
            if not last:
                return "GET", self._experiment
            if last == "audit":
                return "GET", self._audit
            if last in CHANGES:
                return "POST", self._change
        raise RequestError(404, None, f"no such path {path!r}, expected one of {', '.join(self._routes)}")

    async def _act(self, scope: Scope, receive: Receive, path: str) -> bytes:
        start = time.perf_counter()
        self._keys.check(scope, "inference")
        data = parse_object(await read_body(scope, receive, self.config.max_body_bytes), _ACT_FIELDS)
        router = self._router(data.get("experiment"))
        session = _session(data.get("session_id"), scope)
        mode = data.get("mode", "sample")
        if mode not in ("sample", "greedy"):
            raise RequestError(400, "mode", 'expected "sample" or "greedy"')
        given = data.get("observations")
        if not isinstance(given, dict) or not given:
            raise RequestError(400, "observations", "expected an object with at least one agent's observation")
        given_masks = _masks(data, given)
        forced = self._override(scope, router)
        takes_part = forced is None and router.takes_part(session)
        assignment = forced or (router.recall(session) if takes_part else router.with_control())
        if assignment is None:
            assignment = await self._in_thread(router.look_up, session)
        bundle = router.arms[assignment.arm].bundle
        try:
            observations = {agent: bundle.check(agent, observation) for agent, observation in given.items()}
            masks = {agent: bundle.check_mask(agent, mask) for agent, mask in given_masks.items()}
        except MarlRayError as error:
            field, _, message = str(error).partition(": ")
            raise RequestError(400, field, message) from None
        # Exposed before the pass: a session whose arm then fails has met that arm all the same.
        first, assignment = router.expose(session, assignment) if takes_part else (False, assignment)
        arm = assignment.arm
        if first:
            self.metrics.exposures.labels(router.config.name, arm).inc()
        answer = await router.arms[arm].act(observations, mode == "greedy", masks)
        self.metrics.acts.labels(router.config.name, arm).inc()
        body = orjson.dumps(
            {
                "experiment": router.config.name,
                "arm": arm,
                "epoch": assignment.epoch,
                "propensity": assignment.propensity,
                "actions": {agent: action.tolist() for agent, (action, _) in answer.items()},
                "log_probs": {agent: log_prob for agent, (_, log_prob) in answer.items()},
            }
        )
        self.metrics.latency.observe(time.perf_counter() - start)
        return body

    async def _outcome(self, scope: Scope, receive: Receive, path: str) -> bytes:
        self._keys.check(scope, "outcomes")
        data = parse_object(await read_body(scope, receive, self.config.max_body_bytes), _OUTCOME_FIELDS)
        router = self._router(data.get("experiment"))
        session = _session(data.get("session_id"), scope)
        value: Any = data.get("value")
        if not _is_number(value):
            raise RequestError(400, "value", f"expected a number of size {LARGEST_OUTCOME:g} at most")
        metrics = data.get("metrics", {})
        if not isinstance(metrics, dict) or not all(_is_number(number) for number in metrics.values()):
            raise RequestError(400, "metrics", "expected an object of numbers by name")
        name = router.config.name
        try:
            arm = await self._record_outcome(name, session, float(value), metrics)
        except UnknownUnitError:
            raise RequestError(404, "session_id", f"no session {session!r} has acted in experiment {name!r}") from None
        except OutcomeConflictError as error:
            raise RequestError(409, "value", str(error).removeprefix("value: ")) from None
        return orjson.dumps({"experiment": name, "arm": arm, "value": float(value)})

    async def _record_outcome(self, experiment: str, session: str, value: float, metrics: dict[str, float]) -> str:
        def record() -> str:
            self._log.flush()  # the session's exposure may be waiting here
            arm = self._store.record_outcome(experiment, session, value).arm
            if metrics:
                self._store.record_metrics(experiment, session, {k: float(v) for k, v in metrics.items()})
            return arm

        # ... or in another replica, which writes it within moments.
        for pause in OTHER_REPLICAS_S if self.config.replicas > 1 else ():
            try:
                return await self._in_thread(record)
            except UnknownUnitError:
                await asyncio.sleep(pause)
        return await self._in_thread(record)

    async def _experiment(self, scope: Scope, receive: Receive, path: str) -> bytes:
        router = self._router(path.removeprefix("/v1/experiments/"))

        def report() -> bytes:
            self._log.flush()
            return orjson.dumps(describe(router, self._store.summary(router.config.name)))

        return await self._in_thread(report)

    async def _audit(self, scope: Scope, receive: Receive, path: str) -> bytes:
        name = self._router(path.removeprefix("/v1/experiments/").partition("/")[0]).config.name
        entries = await self._in_thread(self._store.audit, name)
        return orjson.dumps({"experiment": name, "audit": entries})

    async def _change(self, scope: Scope, receive: Receive, path: str) -> bytes:
        actor = self._keys.check(scope, "admin")
        name, _, action = path.removeprefix("/v1/experiments/").partition("/")
        router = self._router(name)
        data = parse_object(await read_body(scope, receive, self.config.max_body_bytes) or b"{}", _CHANGE_FIELDS)
        reason, arm, epoch = data.get("reason"), data.get("arm"), data.get("epoch", router.state.epoch)
        if not isinstance(reason, str) or not reason.strip():
            raise RequestError(400, "reason", "expected why, for the audit log")
        if arm is not None and arm not in router.arms:
            raise RequestError(400, "arm", f"expected one of {', '.join(router.arms)}")
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise RequestError(400, "epoch", "expected the epoch that the change was decided on")

        def change() -> bytes:
            self._store.change(router.config.name, Action(action), epoch=epoch, actor=actor, reason=reason, arm=arm)
            self._follower.look(decide_too=False)  # this replica answers by the new state from now on
            state = router.state
            return orjson.dumps({"experiment": name, "status": state.status.value, "epoch": state.epoch})

        try:
            return await self._in_thread(change)
        except StaleEpochError as error:
            raise RequestError(409, "epoch", str(error).removeprefix("epoch: ")) from None
        except StoreError:
            raise
        except MarlRayError as error:
            raise RequestError(409, action, str(error)) from None

    def _override(self, scope: Scope, router: Router) -> Assignment | None:
        """The arm that a tester asks for by the header `x-arm`; such a session is in no experiment."""
        arm = header(scope, b"x-arm")
        if arm is None:
            return None
        self._keys.check(scope, "admin")
        if arm not in router.arms:
            raise RequestError(400, "x-arm", f"expected one of {', '.join(router.arms)}")
        return Assignment(arm, router.state.epoch, 1.0)

    async def _list(self, scope: Scope, receive: Receive, path: str) -> bytes:
        rows = [
            {
                "name": name,
                "status": router.state.status.value,
                "epoch": router.table.epoch,
                "control": router.control,
                "arms": router.table.propensities,
            }
            for name, router in self.routers.items()
        ]
        return orjson.dumps({"experiments": rows})

    async def _health(self, scope: Scope, receive: Receive, path: str) -> bytes:
        return orjson.dumps({"status": "ok", "experiments": list(self.routers)})

    async def _metrics(self, scope: Scope, receive: Receive, path: str) -> bytes:
        self.metrics.dropped.set(self._log.dropped)
        self.metrics.waiting.set(self._log.waiting)
        return self.metrics.text()

    def _router(self, name: Any) -> Router:
        if name is None and len(self.routers) == 1:
            return next(iter(self.routers.values()))
        if not isinstance(name, str):
            raise RequestError(400, "experiment", f"expected one of {', '.join(self.routers)}")
        router = self.routers.get(name)
        if router is None:
            known = ", ".join(self.routers)
            raise RequestError(404, "experiment", f"unknown experiment {name!r}, expected one of {known}")
        return router

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= LARGEST_OUTCOME


def _masks(data: Mapping[str, Any], observed: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request's action masks by agent; every one belongs to an observation."""
    masks = data.get("action_masks", {})
    if not isinstance(masks, dict) or not set(masks) <= set(observed):
        raise RequestError(400, "action_masks", "expected an object whose agents are among those of observations")
    return masks


def _session(given: Any, scope: Scope) -> str:
    """The session id, from the body or else from the header `x-session-id`."""
    session = header(scope, b"x-session-id") if given is None else given
    if not isinstance(session, str) or not 0 < len(session) <= SESSION_LENGTH or not session.isprintable():
        raise RequestError(
            400,
            "session_id",
            f"expected 1 to {SESSION_LENGTH} printable characters, here or in the header x-session-id",
        )
    return session
