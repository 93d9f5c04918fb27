"""An arm that is a model behind an OpenAI-compatible URL, where each response is a streamed chat completion.

The arm passes on every option of a request that such an API knows. The API reports only the number of tokens, at the
end of a response, so `ResponseChunk.ids` is empty and a response that is given up has no price.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import httpx
import orjson

from marl_ray.config import ArmConfig
from marl_ray.deadlines.http_client import check_header_secret
from marl_ray.errors import MarlRayError
from marl_ray.serving.arms.errors import ArmError, LostError, new_pass_number
from marl_ray.serving.arms.external.chat_completions import (
    chat_request,
    note_calls,
    response_chunk,
    token_count,
    write_call,
)
from marl_ray.serving.arms.external.events import events_of
from marl_ray.serving.arms.external.model import ExternalModel
from marl_ray.serving.arms.protocol import ResponseChunk, TextRequest
from marl_ray.serving.errors import RETRY_AFTER_S, BusyError, InvalidRequestError

BUSY_STATUSES = (429, 503)
"""Statuses of a server that has no room now; the client may ask again."""
LOST_STATUSES = (500, 502, 504)
"""Statuses of failures that do not depend on the input."""
MAX_SHOWN_CHARACTERS = 200
"""Maximum number of characters of the server's error that our errors and logs show."""
MAX_READ_BYTES = 10_000
"""Maximum number of bytes of the server's error that are read."""
FINISH_REASONS: dict[str, Literal["stop", "length"]] = {"length": "length"}
"""The server's `finish_reason` -> ours; every other one is `stop`."""

_log = logging.getLogger(__name__)


class ExternalArm:
    """An external model, a `TextArm`."""

    def __init__(self, bundle: ExternalModel, config: ArmConfig, patience_s: float):
        """Read the API key from the environment variable that the config names, if it names one.

        The arm waits for a token for `patience_s` seconds at most. Raises MarlRayError if the key is not
        in the environment.
        """
        self.bundle = bundle
        self.config = config
        self.deadline_s = min(config.deadline_s or patience_s, patience_s)
        self._key = ""
        if config.api_key_env is not None:
            self._key = os.environ.get(config.api_key_env, "")
            if not self._key:
                raise MarlRayError(f"api_key_env: expected a key in the environment variable {config.api_key_env}")
            # A key that was read from a file often ends with a line break.
            check_header_secret(self._key, f"api_key_env: {config.api_key_env}")
        self.transport: httpx.AsyncBaseTransport | None = None
        """The way to the server, if it is not HTTP; read when the client is made."""
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._is_uncounted = False
        """True once a response has come without `usage`."""

    @property
    def client(self) -> httpx.AsyncClient:
        """The HTTP client, made on the event loop that asks first, which alone changes it."""
        if self._client is None:
            self._loop = asyncio.get_running_loop()
            self._client = httpx.AsyncClient(
                base_url=f"{str(self.config.url).rstrip('/')}/",
                headers={"authorization": f"Bearer {self._key}"} if self._key else {},
                transport=self.transport,
                timeout=None,  # noqa: S113  the caller enforces `deadline_s`
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
            )
        return self._client

    def write(self, request: TextRequest) -> "_ExternalReply":
        """Begin a response, and return it at once: the server is asked when its first chunk is."""
        return _ExternalReply(self, request)

    def close(self) -> None:
        """See `TextArm.close`. From any thread: the event loop closes its connections itself."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and its connections with it
                self._loop.call_soon_threadsafe(self._close_client)

    def _close_client(self) -> None:
        client = self._client
        self._client = None
        if client is not None:
            self.run_in_background(client.aclose())

    def run_in_background(self, work: Any) -> None:
        """Run `work` to its end in the background."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)

    def cost_of(self, prompt: int | None, completion: int | None) -> float | None:
        """Return the cost in USD of a response of this many tokens.

        The cost is 0 without a `price`, and None where the server names no `usage`. The first such response writes one
        line to the log.
        """
        if self.config.price is None:
            return 0.0
        if prompt is not None and completion is not None:
            return self.config.price.cost(prompt, completion)
        if not self._is_uncounted:
            self._is_uncounted = True
            _log.warning("%s names no usage: what its responses cost is unknown", self.config.url)
        return None

    def without_key(self, text: str) -> str:
        """Return the server's words in one line, for errors and logs, with the API key removed.

        The line has at most `MAX_SHOWN_CHARACTERS`. The key is removed before the text is truncated, because a part of it
        could remain otherwise.
        """
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text.split())[:MAX_SHOWN_CHARACTERS]


class _ExternalReply:
    """One response of an external model, a `Reply`."""

    def __init__(self, arm: ExternalArm, request: TextRequest):
        self._arm = arm
        self._request = request
        self._stream_chunks = _stream_chunks(arm, request)

    async def next(self) -> ResponseChunk:
        """See `Reply.next`; LostError after the deadline."""
        _check_supported(self._request)
        deadline_s = self._arm.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await anext(self._stream_chunks)
        except TimeoutError:
            raise LostError(f"no token within {deadline_s:g} s", new_pass_number()) from None
        except httpx.HTTPError as error:
            raise LostError(f"the call was lost: {self._arm.without_key(repr(error))}", new_pass_number()) from None
        except StopAsyncIteration:
            raise ArmError("the response ended without a finish_reason", new_pass_number()) from None

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):  # no event loop runs any more
            self._arm.run_in_background(self._stream_chunks.aclose())


def _check_supported(request: TextRequest) -> None:
    """Raise InvalidRequestError if the request asks for what no OpenAI-compatible API can do."""
    if request.raw or (not isinstance(request.prompt, str) and isinstance(request.prompt[0], int)):
        raise InvalidRequestError("the session's arm is an external model, which answers chats only", "prompt")
    if request.changes.get("top_k"):
        raise InvalidRequestError("the session's arm is an external model, which has no top_k", "top_k")


async def _stream_chunks(arm: ExternalArm, request: TextRequest) -> AsyncGenerator[ResponseChunk, None]:
    """Yield the parts of a response as they come.

    Raises ArmError for what is no chat completion, and the error of `_status_error` for a status other than 200.
    """
    async with arm.client.stream("POST", "chat/completions", json=chat_request(arm.bundle.model, request)) as answer:
        if answer.status_code != 200:
            raise _status_error(arm, answer, await _read_beginning(answer))
        finish: object = None
        usage: Mapping[str, object] = {}
        calls: dict[int, list[str]] = {}
        lines = events_of(answer.aiter_bytes())
        try:
            async for line in lines:
                part = orjson.loads(line)
                if part.get("error"):
                    raise ArmError(f"it broke off: {arm.without_key(json.dumps(part['error']))}", new_pass_number())
                usage = part.get("usage") or usage
                for choice in part.get("choices") or ():
                    delta = choice.get("delta") or {}
                    note_calls(calls, delta.get("tool_calls") or ())
                    finish = choice.get("finish_reason") or finish
                    chunk = response_chunk(
                        delta.get("content") or "", (choice.get("logprobs") or {}).get("content") or ()
                    )
                    if chunk.text or chunk.names:
                        yield chunk
            prompt_tokens = token_count(usage.get("prompt_tokens"))
            completion_tokens = token_count(usage.get("completion_tokens"))
            text = "\n".join(write_call(*call) for _, call in sorted(calls.items()))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise ArmError(
                f"it sent what no chat completion is: {arm.without_key(repr(error))}", new_pass_number()
            ) from None
        finally:
            await lines.aclose()
        if finish is None:
            return
        ended = FINISH_REASONS.get(str(finish), "stop")
        yield ResponseChunk(
            text,
            [],
            [],
            ended,
            prompt_tokens or 0,
            [],
            tokens_without_ids=completion_tokens or 0,
            cost_usd=arm.cost_of(prompt_tokens, completion_tokens),
        )


async def _read_beginning(answer: httpx.Response) -> str:
    """Read the first bytes of an error, which may be of any length."""
    body = b""
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > MAX_READ_BYTES:
            break
    return body[:MAX_READ_BYTES].decode("utf-8", "replace")


def _status_error(arm: ExternalArm, answer: httpx.Response, body: str) -> BusyError | ArmError:
    """Return the error of an answer whose status is not 200.

    That is BusyError if the arm is busy. Otherwise the arm has failed: it is LostError for a status that does not depend
    on the input, ArmError for others.
    """
    reason = f"{answer.status_code} {arm.without_key(body)}"
    if answer.status_code in BUSY_STATUSES:
        wait = answer.headers.get("retry-after", "")
        return BusyError(f"the arm is busy: {reason}", float(wait) if wait.isdecimal() else RETRY_AFTER_S)
    return (LostError if answer.status_code in LOST_STATUSES else ArmError)(f"it answered {reason}", new_pass_number())
