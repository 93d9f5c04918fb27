"""The gateway: an ASGI application that assigns sessions to arms, acts, and joins outcomes.

Each request passes through these packages: `http` reads and admits it, `handlers` handle it, `routing` chooses its arm,
`arms` answer it, and `logs` record it. The gateway uses no web framework: its parsing, routing and answering take 2.6
us, and Starlette's take 7.4 us, which is more than 2 % of an act's CPU time (222 us behind Ray Serve).
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping

from marl_ray.config import GatewayConfig
from marl_ray.deadlines.shared_timer import Deadlines
from marl_ray.errors import MarlRayError
from marl_ray.experiments.database.connections import StoreError
from marl_ray.serving.arm_loading.live_experiments import Host
from marl_ray.serving.errors import ServingError
from marl_ray.serving.handlers.route import Route
from marl_ray.serving.handlers.route_table import find_route
from marl_ray.serving.http.cors import allow_origin_headers, preflight
from marl_ray.serving.http.messages import (
    ClientDisconnectedError,
    Headers,
    Receive,
    Request,
    RequestError,
    Response,
    Scope,
    Send,
    Stream,
    send_response,
    send_stream,
)
from marl_ray.serving.http.statuses import as_request_error
from marl_ray.serving.logs.events import log_line
from marl_ray.serving.service import Service

LOADING_S = 600.0
"""Seconds that a request may take which fetches bundles, some of which have gigabytes."""

_log = logging.getLogger(__name__)


class Gateway:
    """The ASGI application."""

    def __init__(
        self, config: GatewayConfig, seed: int | None = None, host: Host | None = None, replica: str | None = None
    ):
        """Make the services, which blocks.

        `seed` makes sampling repeatable; `host` starts arms with `placement: deployment`; `replica` is this replica's
        name in `/metrics`. Raises MarlRayError if the services cannot be made.
        """
        self.config = config
        self.service = Service(config, seed, host, replica)
        self._deadlines = Deadlines()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection. Raises MarlRayError for one that is not HTTP."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            request = Request(scope, receive, self.config.max_body_bytes)
            try:
                await self._answer(scope, request, send)
            finally:
                request.close()
        else:
            raise MarlRayError(f"the gateway speaks HTTP only, got {scope['type']!r}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.service.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.service.leave_loop()
                await asyncio.to_thread(self.service.close)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _answer(self, scope: Scope, request: Request, send: Send) -> None:
        start = time.perf_counter()
        # Metrics are labelled by route, because clients choose paths and could create any number of labels.
        endpoint = "other"
        error_body: Callable[[RequestError], bytes] = RequestError.body
        response: Response | Stream
        seconds = math.inf
        try:
            preflight_answer = (
                preflight(self.config.cors, request, scope["method"]) if scope["method"] == "OPTIONS" else None
            )
            if preflight_answer is None:
                route, request.path_params = find_route(request.path, scope["method"])
                endpoint = route.template
                error_body = route.error_body
                seconds = self._deadline(route, request)
                response = await self._deadlines.run(route.handler(self.service, request), seconds)
            else:
                response = preflight_answer
        except ClientDisconnectedError:
            return
        except TimeoutError:
            response = Response(error_body(RequestError(504, None, f"no answer within {seconds:g} s")), 504)
        except ServingError as error:
            refusal = as_request_error(error)
            response = Response(error_body(refusal), refusal.status, headers=refusal.headers)
        except StoreError as error:
            _log.error("%s", error)
            response = Response(error_body(RequestError(503, None, str(error))), 503)
        # A defect of ours: the log has the details, the client gets none.
        except Exception:
            _log.exception("request %s to %s failed", request.id, endpoint)
            response = Response(error_body(RequestError(500, None, "internal error")), 500)
        headers: Headers = ((b"x-request-id", request.id.encode()),)
        if self.config.cors:
            headers += allow_origin_headers(self.config.cors, request)
        if isinstance(response, Stream):
            await self._send_stream(send, request, response, headers)
        self.service.metrics.count(endpoint, response.status)
        if response.status >= 400 or self.config.access_log == "all":
            log_line(
                "request",
                request_id=request.id,
                method=scope["method"],
                path=request.path[:200],
                status=response.status,
                ms=round(1000 * (time.perf_counter() - start), 3),
            )
        if isinstance(response, Response):
            try:
                await self._deadlines.run(send_response(send, response, headers), self.config.request_timeout_s)
            except TimeoutError:
                _log.error(
                    "request %s: the answer was not taken within %g s", request.id, self.config.request_timeout_s
                )

    async def _send_stream(self, send: Send, request: Request, response: Stream, headers: Headers) -> None:
        """Send a stream for as long as the client reads it. Arms have deadlines of their own for every token."""

        async def send_within_deadline(message: Mapping[str, object]) -> None:
            await self._deadlines.run(send(message), self.config.request_timeout_s)

        try:
            await request.until_disconnect(send_stream(send_within_deadline, response, headers))
        except (ClientDisconnectedError, TimeoutError):
            pass
        # A defect of ours after the status was sent: the client sees the connection break.
        except Exception:
            _log.exception("request %s failed in mid-response", request.id)
        finally:
            response.close()

    def _deadline(self, route: Route, request: Request) -> float:
        """Return the seconds that a request may take.

        Raises RequestError 400 if its header names no number above 0.
        """
        seconds = LOADING_S if route.is_slow else self.config.request_timeout_s
        requested = request.header(b"x-request-timeout-seconds")
        if requested is not None:
            try:
                requested_s = float(requested)
            except ValueError:
                requested_s = 0.0
            if not requested_s > 0:  # not a number is not above 0 either
                raise RequestError(400, "x-request-timeout-seconds", "expected a number of seconds above 0")
            seconds = min(seconds, requested_s)
        return seconds
