"""A response while it is written to a session."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

from marl_ray.serving.arms.protocol import Reply, ResponseChunk, TextRequest
from marl_ray.serving.errors import ServingError
from marl_ray.serving.handlers.texts.records import log_text, shadow_text
from marl_ray.serving.handlers.texts.written_response import (
    BROKEN_OFF_FINISH,
    WrittenResponse,
    collect_response,
    join_chunks,
)
from marl_ray.serving.http.messages import Headers, Request, RequestError, Response, Stream, header_text
from marl_ray.serving.logs.events import log_line
from marl_ray.serving.routing.assignment import SessionArm
from marl_ray.serving.routing.failures import Attempts
from marl_ray.serving.service import Service


async def respond_with_text(
    request: Request,
    writer: "TextResponseWriter",
    streamed: bool,
    answer: "Callable[[TextResponseWriter, WrittenResponse], Any]",
    events: "Callable[[TextResponseWriter], AsyncIterator[bytes]]",
) -> Response | Stream:
    """Answer a request with the writer's response.

    The response is one JSON answer, made by `answer`, or with `streamed` the `events` from the first token on.
    """
    try:
        await request.until_disconnect(writer.begin())
        if streamed:
            return Stream(events(writer), writer.close, writer.headers)
        response = await request.until_disconnect(collect_response(writer.next))
    except BaseException:
        writer.close()
        raise
    writer.close()
    return Response(orjson.dumps(answer(writer, response)), headers=writer.headers)


class TextResponseWriter:
    """Writes one response to a session.

    The session's arm writes it, or the control if that arm fails before its first token.
    """

    def __init__(self, service: Service, session_arm: SessionArm, request: TextRequest):
        """Begin a response; this exposes the session to its arm."""
        self._service = service
        self._session_arm = session_arm
        self._request = request
        self._start = time.perf_counter()
        self._assignment = service.assigner.expose(session_arm)
        self._arm = self._assignment.arm
        self._reply: Reply | None = None
        self._first_chunk: ResponseChunk | None = None
        self._digest = ""
        self._ticket = 0
        self._is_under_way = False
        """True after a response has begun and before it has ended."""
        self._first_s = 0.0
        self._tokens = 0
        keeps_chunks = session_arm.is_unit and (service.acts is not None or bool(session_arm.arms.state.shadows))
        self._chunks: list[ResponseChunk] | None = [] if keeps_chunks else None
        """All chunks so far, kept for the log and for shadows; None if neither needs them."""

    @property
    def digest(self) -> str:
        """The digest of the bundle that writes the response."""
        return self._digest

    @property
    def head(self) -> dict[str, object]:
        """The fields of the answer that say which experiment and which arm wrote it."""
        return self._session_arm.head(self._assignment, self._arm)

    @property
    def headers(self) -> Headers:
        """The same facts as HTTP headers, complete once the response has begun."""
        session_arm = self._session_arm
        values = {
            "x-experiment": session_arm.router.config.name,
            "x-arm": self._arm,
            "x-session-id": session_arm.session,
        }
        if session_arm.holdout:
            values["x-holdout"] = "true"
        return tuple((name.encode(), header_text(value)) for name, value in values.items())

    async def begin(self) -> None:
        """Wait for the first token. Raises ServingError if the request is refused, or if no arm answers."""
        _, _, self._ticket = await self._attempts().first_answer(self._begin_with_arm, self._try_arm, None)
        self._is_under_way = True
        self._first_s = time.perf_counter() - self._start

    async def _begin_with_arm(self, arm: str) -> None:
        """Let this arm begin the response."""
        text_arm = self._session_arm.arms.writer(arm)
        self._arm = arm
        self._digest = text_arm.bundle.digest
        self._reply = text_arm.write(self._request)
        try:
            self._first_chunk = await self._reply.next()
        except Exception:
            self._reply.leave()
            raise

    def _attempts(self) -> Attempts:
        return self._service.failures.attempts(self._session_arm, self._assignment.arm)

    async def _try_arm(self, arm: str) -> None:
        """Let this arm begin a response, and drop it."""
        reply = self._session_arm.arms.writer(arm).write(self._request)
        try:
            await reply.next()
        finally:
            reply.leave()

    async def next(self) -> ResponseChunk:
        """Wait for the next chunk, until one has a `finish`; call `begin` first.

        Raises RequestError 503 if the arm fails, and the arm's ServingError if it refuses to go on.
        """
        chunk = self._first_chunk
        self._first_chunk = None
        if chunk is None:
            assert self._reply is not None
            try:
                chunk = await self._reply.next()
            except ServingError:
                raise
            except Exception as error:
                self._reply.leave()
                self._attempts().count_break_off(self._arm, self._ticket, error)
                self._ticket = 0
                raise RequestError(503, None, f"arm {self._arm!r} failed in mid-response") from None
        self._tokens += chunk.tokens
        if self._chunks is not None:
            self._chunks.append(chunk)
        if chunk.finish is not None:
            self._finish(chunk)
        return chunk

    def close(self) -> None:
        """End the response, whether or not it is complete; the owner must call this once it is done."""
        if self._reply is not None:
            self._reply.leave()
        if self._ticket:
            self._session_arm.router.circuits[self._arm].forget(self._ticket)
            self._ticket = 0
        config = self._session_arm.router.config
        counters = self._service.metrics.counters_of(config)[self._arm]
        if self._is_under_way and config.arms[self._arm].price is not None:
            # An external arm reports the number of tokens only at the end.
            self._session_arm.charge(None, self._service.unit_reports)
            counters.cost_unknown += 1
        self._is_under_way = False
        counters.tokens += self._tokens
        self._tokens = 0
        if self._request.streamed:  # otherwise the client has received nothing of the response
            self._log()

    def _log(self) -> None:
        """Log the chunks sent so far, once. If the response is complete, send copies of the request to the shadows."""
        if self._chunks:
            request = self._request
            response = join_chunks(self._chunks)
            if self._service.acts is not None:
                log_text(self._service, self._session_arm, self._assignment, self._arm, self._digest, request, response)
            if response.finish != BROKEN_OFF_FINISH:
                shadow_text(self._session_arm.router, request, response)
        self._chunks = None

    def _finish(self, chunk: ResponseChunk) -> None:
        """Log and count the complete response, of which `chunk` is the last one."""
        self._log()
        self._is_under_way = False
        router = self._session_arm.router
        seconds = time.perf_counter() - self._start
        router.circuits[self._arm].success(self._ticket)
        self._ticket = 0
        self._session_arm.count_answer(seconds)
        self._session_arm.charge(chunk.cost_usd, self._service.unit_reports)
        counters = self._service.metrics.counters_of(router.config)[self._arm]
        counters.observe(seconds)
        counters.count_text(chunk.prompt_tokens, self._first_s, chunk.cost_usd)
        if self._service.config.access_log == "all":
            log_line(
                "text",
                experiment=router.config.name,
                arm=self._arm,
                prompt_tokens=chunk.prompt_tokens,
                tokens=self._tokens,
                finish=chunk.finish,
                first_token_ms=round(1000 * self._first_s, 3),
                ms=round(1000 * seconds, 3),
            )
