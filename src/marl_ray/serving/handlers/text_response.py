"""A response while it is written by the session's arm, or by the control if the arm fails before its first token."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from marl_ray.errors import MAX_COMPARED, did_you_mean
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.serving.arms.protocol import (
    NamedToken,
    Reply,
    RequestRejection,
    ResponseChunk,
    ResponseStart,
    TextRequest,
    is_text,
)
from marl_ray.serving.http.protocol import Headers, Request, RequestError, Response, Stream, header_text
from marl_ray.serving.http.text_settings import Settings
from marl_ray.serving.logs.act_log import LoggedText
from marl_ray.serving.logs.lines import log_line
from marl_ray.serving.routing.assignment import SessionArm
from marl_ray.serving.routing.failures import Attempts
from marl_ray.serving.routing.router import Router
from marl_ray.serving.service import Service

CUT_FINISH = "cut"
"""The finish of a response that was given up, or whose arm failed."""


@dataclass(frozen=True, kw_only=True)
class WrittenResponse:
    """A complete response."""

    text: str
    ids: list[int]
    log_probs: list[float]
    finish: str
    prompt_tokens: int
    names: list[NamedToken]
    tops: list[list[tuple[NamedToken, float]]]
    start: ResponseStart | None
    tokens: int
    cost_usd: float | None
    """Cost in USD; None if it is unknown."""

    @property
    def log_prob(self) -> float | None:
        """The text's log-probability; None if its arm computes none, as external arms do."""
        return sum(self.log_probs) if self.ids else None


async def respond_with_text(
    request: Request,
    writer: "TextResponseWriter",
    streamed: bool,
    answer: "Callable[[TextResponseWriter, WrittenResponse], Any]",
    events: "Callable[[TextResponseWriter], AsyncIterator[bytes]]",
) -> Response | Stream:
    """Answer a request with the writer's response: as one JSON answer, or as events from its first token on."""
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
    """Writes one response to a session: by its arm, or by the control if that arm fails before its first token."""

    def __init__(self, service: Service, session_arm: SessionArm, request: TextRequest):
        """Begin a response; this exposes the session to its arm."""
        self._service, self._session_arm, self._request = service, session_arm, request
        self._start = time.perf_counter()
        self._assignment = service.assigner.expose(session_arm)
        self._arm = self._assignment.arm
        self._reply: Reply | None = None
        self._first: ResponseChunk | None = None
        self._digest = ""
        self._ticket = 0
        self._is_under_way = False
        """True after a response has begun and before it has ended."""
        self._first_s = 0.0
        self._tokens = 0
        keeps_chunks = session_arm.takes_part and (service.acts is not None or bool(session_arm.router.state.shadows))
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
        named = {
            "x-experiment": session_arm.router.config.name,
            "x-arm": self._arm,
            "x-session-id": session_arm.session,
        }
        if session_arm.holdout:
            named["x-holdout"] = "true"
        return tuple((name.encode(), header_text(value)) for name, value in named.items())

    async def begin(self) -> None:
        """Wait for the first token. RequestError if the request is refused, or if no arm answers."""
        _, _, self._ticket = await self._attempts().first_answer(self._begin_by, self._compare_with, None)
        self._is_under_way = True
        self._first_s = time.perf_counter() - self._start

    async def _begin_by(self, arm: str) -> None:
        """Let this arm begin the response."""
        text_arm = self._session_arm.router.writer(arm)
        self._arm, self._digest = arm, text_arm.bundle.digest
        self._reply = text_arm.write(self._request)
        try:
            self._first = await _next_chunk(self._reply)
        except Exception:
            self._reply.leave()
            raise

    def _attempts(self) -> Attempts:
        return self._service.failures.attempts(
            self._session_arm.router, self._session_arm.session, self._assignment.arm
        )

    async def _compare_with(self, arm: str) -> None:
        """Let this arm begin a response, and drop it."""
        reply = self._session_arm.router.writer(arm).write(self._request)
        try:
            await _next_chunk(reply)
        finally:
            reply.leave()

    async def next(self) -> ResponseChunk:
        """Wait for the next chunk, until one has a `finish`. Raises RequestError if the arm fails. Call `begin` first."""
        chunk, self._first = self._first, None
        if chunk is None:
            assert self._reply is not None
            try:
                chunk = await _next_chunk(self._reply)
            except RequestError:
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
            request, response = self._request, join_chunks(self._chunks)
            if self._service.acts is not None:
                log_text(self._service, self._session_arm, self._assignment, self._arm, self._digest, request, response)
            if response.finish != CUT_FINISH:
                shadow_text(self._session_arm.router, request, response)
        self._chunks = None

    def _finish(self, chunk: ResponseChunk) -> None:
        self._log()
        self._is_under_way = False
        router, seconds = self._session_arm.router, time.perf_counter() - self._start
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


Exchanges = list[tuple[TextRequest, WrittenResponse]]
"""Requests to an arm and the texts that it wrote."""


async def act_by_text(
    service: Service, router: Router, arm: str, prompts: Mapping[str, str], greedy: bool
) -> Exchanges:
    """Let one arm write every agent's text. Raises RequestError if the arm refuses one."""
    start = time.perf_counter()
    settings = Settings(None, greedy, {})
    text_arm = router.writer(arm)
    requests = {agent: text_request(service, agent, prompt, settings) for agent, prompt in prompts.items()}
    replies = {agent: text_arm.write(request) for agent, request in requests.items()}
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {agent: group.create_task(_await_response(reply)) for agent, reply in replies.items()}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for reply in replies.values():
            reply.leave()
    counters = service.metrics.counters_of(router.config)[arm]
    responses = {agent: task.result() for agent, task in tasks.items()}
    for response, first_at in responses.values():
        counters.tokens += response.tokens
        counters.count_text(response.prompt_tokens, first_at - start, response.cost_usd)
    return [(requests[agent], response) for agent, (response, _) in responses.items()]


async def _await_response(reply: Reply) -> tuple[WrittenResponse, float]:
    """Wait for a complete response and return it and the moment of its first token."""
    first: ResponseChunk | None = await _next_chunk(reply)
    at = time.perf_counter()

    async def next_chunk() -> ResponseChunk:
        nonlocal first
        chunk, first = first, None
        return await _next_chunk(reply) if chunk is None else chunk

    return await collect_response(next_chunk), at


async def _next_chunk(reply: Reply) -> ResponseChunk:
    """Wait for the next chunk; RequestError where the arm refuses."""
    chunk = await reply.next()
    if isinstance(chunk, RequestRejection):
        raise RequestError(chunk.status, chunk.field, chunk.message, chunk.retry_after_s, chunk.code)
    return chunk


async def collect_response(next_chunk: Callable[[], Awaitable[ResponseChunk]]) -> WrittenResponse:
    """Wait for all chunks that are still to come, and join them."""
    chunks = [await next_chunk()]
    while chunks[-1].finish is None:
        chunks.append(await next_chunk())
    return join_chunks(chunks)


def join_chunks(chunks: Sequence[ResponseChunk]) -> WrittenResponse:
    """Join the chunks to a response; without a `finish` it was cut."""
    return WrittenResponse(
        text="".join(chunk.text for chunk in chunks),
        ids=[number for chunk in chunks for number in chunk.ids],
        log_probs=[log_prob for chunk in chunks for log_prob in chunk.log_probs],
        finish=chunks[-1].finish or CUT_FINISH,
        prompt_tokens=chunks[-1].prompt_tokens,
        names=[name for chunk in chunks for name in chunk.names],
        tops=[top for chunk in chunks for top in chunk.tops],
        start=chunks[0].start,
        tokens=sum(chunk.tokens for chunk in chunks),
        cost_usd=total_cost(chunk.cost_usd for chunk in chunks),
    )


def total_cost(costs: Iterable[float | None]) -> float | None:
    """Return the sum of costs in USD; None if any of them is unknown."""
    total = 0.0
    for cost in costs:
        if cost is None:
            return None
        total += cost
    return total


def log_text(
    service: Service,
    session_arm: SessionArm,
    assignment: Assignment,
    arm: str,
    digest: str,
    request: TextRequest,
    response: WrittenResponse,
) -> None:
    """Add a response to the act log, which must be configured; `digest` is that of the bundle that wrote it."""
    assert service.acts is not None
    began, prompt = response.start or ResponseStart([], {}), request.prompt if isinstance(request.prompt, str) else None
    messages = [] if prompt is not None else [part for part in request.prompt if isinstance(part, Mapping)]
    guided = ["guide"] if request.json_object or request.must_call else []
    biased = ["bias"] if request.bias is not None else []
    service.acts.put(
        LoggedText(
            experiment=session_arm.router.config.name,
            unit=session_arm.session,
            arm=arm,
            digest=digest,
            epoch=assignment.epoch,
            propensity=assignment.propensity,
            at=time.time(),
            greedy=request.greedy,
            agent=request.agent,
            prompt=prompt,
            messages=messages,
            tools=request.tools,
            prompt_ids=began.prompt_ids,
            text=response.text,
            ids=response.ids,
            log_probs=response.log_probs,
            finish=response.finish,
            seed=request.seed,
            settings=began.settings,
            asked=[*sorted(request.changes), *guided, *biased],
        )
    )


def shadow_text(router: Router, request: TextRequest, response: WrittenResponse) -> None:
    """Send copies of the request to the shadows."""
    arms = router.arms  # read once: a thread may drop a shadow, which must not fail the client's request
    for shadow in router.state.shadows:
        text_arm = arms.get(shadow)
        if text_arm is not None and is_text(text_arm.bundle):
            router.shadows.send_text(shadow, text_arm, request, response.ids, response.log_probs, response.text)


def text_only(router: Router) -> None:
    """Raise RequestError 422 if the experiment's policies write no text."""
    if not router.is_text:
        family = router.bundle_of(router.control).manifest.family
        raise RequestError(
            422, "experiment", f"{router.config.name!r} serves {family} policies, expected token policies"
        )


def text_request(service: Service, agent: str, prompt: Any, settings: Settings, **more: Any) -> TextRequest:
    """Make the request to an arm, with a random seed if the client gave none."""
    seed = service.seed() if settings.seed is None else settings.seed
    logged = service.acts is not None
    return TextRequest(agent, prompt, seed, settings.greedy, settings.changes, logged=logged, **more)


def agent_of(router: Router, agent: object) -> str:
    """Return the agent whose text the request asks for. A request may omit it if one policy plays all agents."""
    agents = router.bundle_of(router.control).agents
    if agent is None and len(set(agents.values())) == 1:
        return next(iter(agents))
    if not isinstance(agent, str):
        raise RequestError(400, "agent", f"expected one of {', '.join(agents)}")
    if agent not in agents:
        raise RequestError(400, "agent", f"{agent[:MAX_COMPARED]!r} is unknown{did_you_mean(agent, agents)}")
    return agent


def text_observations(router: Router, observations: Mapping[str, Any], masks: Mapping[str, object]) -> dict[str, str]:
    """Check that the observations of `/v1/act` are texts, and return them; RequestError naming the agent."""
    agents = router.bundle_of(router.control).agents
    if masks:
        raise RequestError(400, "action_masks", "expected none: texts have no masks")
    for agent, text in observations.items():
        if agent not in agents:
            raise RequestError(400, f"observations.{agent}", f"unknown agent{did_you_mean(agent, agents)}")
        if not isinstance(text, str):
            raise RequestError(400, f"observations.{agent}", "expected a text")
    return dict(observations)
