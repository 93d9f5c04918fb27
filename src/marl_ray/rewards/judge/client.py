"""Replies of a judge over HTTP: each request once, within its deadline and the limit on spending.

OpenAI's chat completions: POST URL/chat/completions, https://platform.openai.com/docs/api-reference/chat/create.
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import httpx
from pydantic import BaseModel, Field, ValidationError

from marl_ray.deadlines.http_client import DeadlineClient
from marl_ray.deadlines.json_posts import post_json
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping
from marl_ray.rewards.judge.ledger import JudgeLedger

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 3
"""Tokens are counted by this where a server does not report them; most texts have more bytes a token."""
_MAX_RESPONSE_BYTES = 1 << 20
"""Maximum size of a response; one of 512 tokens has a few kilobytes."""
_SLACK_S = 30.0
"""Seconds that the cache's file may take in addition to a request's deadline."""
_RETRIED_STATUSES = {408, 409, 425, 429, 500, 502, 503, 504}
_TEXT_STATUSES = {400, 413, 422}
"""Statuses that refuse one request for what it says or for its length, which agents may cause."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 10.0
"""Seconds before the first repeated request, and at most; each pause is twice as long as the one before."""
_LOCAL_HOSTS = {"127.0.0.1", "::1", "localhost"}
_VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY_PATTERN = re.compile(r"[\x21-\x7e]{1,1000}")


class ReplyMessage(BaseModel):
    """The message of a choice."""

    content: str | None = None


class ReplyChoice(BaseModel):
    """One of the completions of a request."""

    message: ReplyMessage


class ReplyUsage(BaseModel):
    """Tokens that the server counted."""

    prompt_tokens: int = Field(0, ge=0)
    completion_tokens: int = Field(0, ge=0)


class ChatReply(BaseModel):
    """The part of a response that is read."""

    choices: list[ReplyChoice]
    usage: ReplyUsage | None = None


@dataclass(frozen=True)
class JudgeReply:
    """A judge's reply to one request."""

    text: str
    cost: float = 0.0
    """Tokens, or the price, that this request cost."""
    cached: bool = False
    failure: str = ""
    """The reason if there is no reply, else empty."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """The address of a judge, and how long, how often and at what cost it may be asked (see `judge.reward.LLMJudge`)."""

    url: str
    """Address of the API, such as https://HOST/v1; requests go to URL/chat/completions."""
    key_variable: str
    """Environment variable that holds the key; empty without one."""
    cache: str | None
    """Path of the SQLite file for replies and spending; None to keep neither beyond the process."""
    deadline_s: float
    """Seconds of a judgement, with its wait for a slot and its retries."""
    retries: int
    """Maximum number of further requests of a judgement."""
    concurrency: int
    """Maximum number of requests of the process at once."""
    limit: float | None
    """Maximum spending of all runs with this cache, in tokens, or in money if there are prices; None for no limit."""
    input_price: float | None
    """Price of a million tokens read; None if tokens are counted."""
    output_price: float | None
    """Price of a million tokens written; None if tokens are counted."""
    when_spent: str
    """`error` to end the run at the limit, `fallback` to continue without replies."""
    max_failures: int
    """Number of requests in a row without a reply that ends the run."""

    def cost(self, read: float, written: float) -> float:
        """Return the price of tokens read and written; without prices their number."""
        if self.input_price is None or self.output_price is None:
            return read + written
        return (read * self.input_price + written * self.output_price) / 1e6


class JudgeClient:
    """A judge, shared by the environments of a process; safe to use from several threads."""

    def __init__(self, settings: JudgeSettings, key: str):
        """Raise MarlRayError for a URL that is none, or that would send the key over an open network, and for the cache."""
        self.settings, self._key = settings, key
        try:
            url = httpx.URL(settings.url)
        except (httpx.InvalidURL, TypeError) as error:
            raise MarlRayError(f"url: {settings.url!r} is no URL") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise MarlRayError(f"url: {settings.url!r}, expected such as https://HOST/v1")
        if key and url.scheme != "https" and url.host not in _LOCAL_HOSTS:
            raise MarlRayError(f"url: {settings.url!r}; expected https, for the key travels with every request")
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._client = DeadlineClient(headers={"Authorization": f"Bearer {key}"} if key else {})
        self._ledger = JudgeLedger(settings.cache)
        self._slots = threading.BoundedSemaphore(settings.concurrency)
        self._lock = threading.Lock()
        self._running: dict[str, Future[JudgeReply]] = {}
        self._failures = 0
        """Requests in a row that had no reply."""

    def ask(self, request: JsonMapping, readable: Callable[[str], bool]) -> JudgeReply:
        """Return the reply to a request, from the cache or else over HTTP.

        The cache keeps only replies that are `readable`.

        Of threads that make the same request at once one asks, and the others wait for it. Raises MarlRayError when the
        limit is spent, if the settings say so, and after `max_failures` requests in a row without a reply.
        """
        content = json.dumps([self._url, request], sort_keys=True).encode()
        key = hashlib.sha256(content).hexdigest()
        deadline = time.monotonic() + self.settings.deadline_s
        with self._lock:
            running = self._running.get(key)
            if running is None:
                answer = self._running[key] = Future()
        if running is not None:
            return _await_other(running, self.settings.deadline_s + _SLACK_S)
        try:
            stored = self._ledger.get(key)
            if stored is not None:
                reply = JudgeReply(stored, cached=True)
            else:
                reply = self._reply(request, len(content), deadline)
                if not reply.failure and readable(reply.text):
                    self._ledger.put(key, reply.text)
            answer.set_result(reply)
            return reply
        except BaseException as error:
            answer.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._running[key]

    def _reply(self, request: JsonMapping, size: int, deadline: float) -> JudgeReply:
        if self.settings.limit is not None and self._ledger.spent() >= self.settings.limit:
            failure = f"the limit of {self.settings.limit:g} is spent"
            if self.settings.when_spent == "error":
                raise MarlRayError(f"llm_judge: {failure}; raise `limit`, or say `when_spent: fallback`")
            return JudgeReply("", failure=failure)
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return self._count_failure("no slot became free in time; raise concurrency or deadline_s", 0.0)
        try:
            return self._fetch(request, size, deadline)
        finally:
            self._slots.release()

    def _fetch(self, request: JsonMapping, size: int, deadline: float) -> JudgeReply:
        """Make the request, again after what may pass, with growing pauses."""
        cost = 0.0
        for attempt in itertools.count():
            pause = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                status, body, wait_s = post_json(self._client, self._url, request, deadline, _MAX_RESPONSE_BYTES)
            except httpx.RequestError as error:
                failure = type(error).__name__  # its text may name hosts and proxies
                if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                    cost += self._spend(size / BYTES_PER_TOKEN, 0)  # the server may have read it
            else:
                if status == 200:
                    return self._read(body, size, cost)
                failure = f"HTTP {status}"
                if status in _TEXT_STATUSES:
                    return JudgeReply("", cost, failure=failure)
                if status not in _RETRIED_STATUSES:
                    return self._count_failure(failure, cost)
                pause = max(pause, wait_s)
            if attempt >= self.settings.retries or time.monotonic() + pause >= deadline:
                return self._count_failure(failure, cost)
            time.sleep(pause)
        raise AssertionError("itertools.count ends")

    def _read(self, body: bytes, size: int, cost: float) -> JudgeReply:
        """Return the text and cost of a response with status 200.

        Another schema means that the URL is no judge's.
        """
        try:
            reply = ChatReply.model_validate_json(body)
        except ValidationError:  # its text could quote a key that stands in the body
            cost += self._spend(size / BYTES_PER_TOKEN, len(body) / BYTES_PER_TOKEN)
            return self._count_failure("the response is no chat completion", cost)
        with self._lock:
            self._failures = 0
        text = (reply.choices[0].message.content or "") if reply.choices else ""
        usage = reply.usage or ReplyUsage(
            prompt_tokens=size // BYTES_PER_TOKEN,
            completion_tokens=len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN,
        )
        cost += self._spend(usage.prompt_tokens, usage.completion_tokens)
        # A service that echoes the key must not put it into the cache.
        return JudgeReply(text.replace(self._key, "[key]") if self._key else text, cost)

    def _spend(self, read: float, written: float) -> float:
        """Add the cost of tokens read and written to the ledger, and return it."""
        cost = self.settings.cost(read, written)
        self._ledger.spend(cost)
        return cost

    def _count_failure(self, failure: str, cost: float) -> JudgeReply:
        """Count a request without a reply. Raises MarlRayError if it is one too many in a row."""
        with self._lock:
            self._failures += 1
            failures = self._failures
        if failures == 1:
            log.warning("llm_judge: no reply from %s (%s)", self._url, failure)
        if failures >= self.settings.max_failures:
            raise MarlRayError(
                f"llm_judge: {self._url} gave no reply {failures} times in a row; the last time: {failure}"
            )
        return JudgeReply("", cost, failure=failure)


def _await_other(running: Future[JudgeReply], timeout: float) -> JudgeReply:
    """Return the reply that another thread is asking for; one with a `failure` if it does not come in time."""
    try:
        return replace(running.result(timeout), cost=0.0, cached=True)
    except TimeoutError:
        return JudgeReply("", failure="no reply in time", cached=True)


@functools.lru_cache(maxsize=32)
def _client_of(settings: JudgeSettings, key: str) -> JudgeClient:
    return JudgeClient(settings, key)


def judge_client(settings: JudgeSettings) -> JudgeClient:
    """Return the client of a process for these settings. Raises MarlRayError naming the option."""
    return _client_of(settings, _read_key(settings.key_variable))


def _read_key(variable: str) -> str:
    """Return the key that an environment variable holds; empty if no variable is named.

    Errors show neither the key nor what may be one.
    """
    if not variable:
        return ""
    if not _VARIABLE_PATTERN.fullmatch(variable):
        raise MarlRayError("key_variable: expected the name of an environment variable that holds the key")
    key = os.environ.get(variable, "").strip()
    if not key:
        raise MarlRayError(f"key_variable: the environment variable {variable} is not set")
    if not _KEY_PATTERN.fullmatch(key):
        raise MarlRayError(f"key_variable: the environment variable {variable} holds no key, but spaces or line breaks")
    return key
