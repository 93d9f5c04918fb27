"""The OpenAI-compatible path `/v1/completions`: texts that continue a prompt without a chat template."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from marl_ray.closing import close_all
from marl_ray.json_types import JsonObject
from marl_ray.serving.errors import ServingError
from marl_ray.serving.handlers.openai.fields import (
    COMMON_FIELDS,
    NEUTRAL_VALUES,
    CompletionOptions,
    answer_fields,
    assign_request,
    error_body,
    read_options,
    top_of,
    usage_of,
)
from marl_ray.serving.handlers.texts.arm_request import make_text_request
from marl_ray.serving.handlers.texts.response_writer import TextResponseWriter
from marl_ray.serving.handlers.texts.written_response import WrittenResponse, collect_response
from marl_ray.serving.http.messages import Request, RequestError, Response, Stream, server_sent_event
from marl_ray.serving.http.statuses import as_request_error
from marl_ray.serving.service import Service

COMPLETION_NEUTRAL_VALUES: dict[str, Any] = NEUTRAL_VALUES | {"best_of": 1, "echo": False, "suffix": None}
COMPLETION_FIELDS = COMMON_FIELDS | COMPLETION_NEUTRAL_VALUES.keys() | {"prompt", "logprobs"}
MAX_LOGPROBS = 5
"""The limit of OpenAI's API for text completions."""
TOKEN_ID_LIMIT = 1 << 31
"""Token ids are below this: they fit 32 bits."""


async def text_completions(service: Service, request: Request) -> Response | Stream:
    """Answer `POST /v1/completions`: one choice for each prompt, all by the session's arm."""
    key = service.admission.keys.check(request, "inference")
    data = await request.read_object(COMPLETION_FIELDS)
    prompts = _read_prompts(data.get("prompt"), service.config.max_batch_requests)
    service.admission.limit(key, len(prompts))
    has_log_probs = data.get("logprobs") is not None
    top = top_of(data, "logprobs", MAX_LOGPROBS)
    options = read_options(data, COMPLETION_NEUTRAL_VALUES)
    completion_id = f"cmpl-{secrets.token_hex(12)}"
    session_arm, agent = await assign_request(service, request, data, options.model, completion_id)
    extra_settings: JsonObject = {"has_names": has_log_probs, "top": top, "raw": True, "bias": options.bias}
    extra_settings["is_stop_hidden"] = "stop" in options.settings.changes
    writers = [
        TextResponseWriter(
            service,
            session_arm,
            make_text_request(service, agent, prompt, options.settings, streamed=options.streamed, **extra_settings),
        )
        for prompt in prompts
    ]
    completions = _Completions(completion_id, options, has_log_probs)

    def close() -> None:
        close_all(writer.close for writer in writers)

    try:
        await request.until_disconnect(_gather([writer.begin() for writer in writers]))
        if options.streamed:
            return Stream(completions.chunks(writers), close, writers[0].headers)
        responses = await request.until_disconnect(_gather([collect_response(writer.next) for writer in writers]))
    except BaseException:
        close()
        raise
    close()
    return Response(orjson.dumps(completions.answer(writers[0], responses)), headers=writers[0].headers)


async def _gather(parts: Sequence[Any]) -> list[Any]:
    """Wait for all and return their results; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in parts]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _read_prompts(prompt: Any, max_prompts: int) -> list[str | tuple[int, ...]]:
    """Return the texts and lists of token ids. Raises RequestError 400 or 413."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [tuple(prompt)]
        if len(prompt) > max_prompts:
            raise RequestError(413, "prompt", f"expected at most {max_prompts} prompts, got {len(prompt)}")
        if all(isinstance(item, str) for item in prompt) or all(_is_ids(item) for item in prompt):
            return [item if isinstance(item, str) else tuple(item) for item in prompt]
    raise RequestError(400, "prompt", "expected a text, a list of texts, a list of token ids, or a list of such lists")


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < TOKEN_ID_LIMIT for item in value)
    )


class _Completions:
    """The texts in OpenAI's words."""

    def __init__(self, completion_id: str, options: CompletionOptions, has_log_probs: bool):
        self._head = {"id": completion_id, "created": int(time.time()), "model": options.model}
        self._has_log_probs = has_log_probs
        self._has_usage = options.has_usage

    def answer(self, writer: TextResponseWriter, responses: Sequence[WrittenResponse]) -> JsonObject:
        choices = [
            {
                "index": index,
                "text": response.text,
                "finish_reason": response.finish,
                "logprobs": self._logprobs_field(response, 0),
            }
            for index, response in enumerate(responses)
        ]
        prompt = sum(response.prompt_tokens for response in responses)
        completion = sum(response.tokens for response in responses)
        return answer_fields(writer, self._head, "text_completion", choices) | {"usage": usage_of(prompt, completion)}

    async def chunks(self, writers: Sequence[TextResponseWriter]) -> AsyncIterator[bytes]:
        """Yield all texts, which are written at the same time, one after another."""
        prompt = completion = 0
        try:
            for index, writer in enumerate(writers):
                finish = None
                characters = 0
                while finish is None:
                    chunk = await writer.next()
                    finish = chunk.finish
                    completion += chunk.tokens
                    log_probs = self._logprobs_field(chunk, characters)
                    characters += sum(len(token.text) for token in chunk.names)
                    choice = {"index": index, "text": chunk.text, "finish_reason": finish, "logprobs": log_probs}
                    yield server_sent_event(self._chunk(writer, [choice], None))
                prompt += chunk.prompt_tokens
        except ServingError as error:  # the status has already been sent
            yield b"data: " + error_body(as_request_error(error)) + b"\n\n"
            return
        if self._has_usage:
            yield server_sent_event(self._chunk(writers[0], [], usage_of(prompt, completion)))
        yield b"data: [DONE]\n\n"

    def _chunk(self, writer: TextResponseWriter, choices: list[Any], usage: dict[str, int] | None) -> JsonObject:
        chunk = answer_fields(writer, self._head, "text_completion", choices)
        return chunk | {"usage": usage} if self._has_usage else chunk

    def _logprobs_field(self, text: Any, offset: int) -> JsonObject | None:
        """Return the log-probabilities of a whole text or a chunk of one; None if none are asked for.

        The chunk begins `offset` characters of tokens behind the text's beginning.
        """
        if not self._has_log_probs:
            return None
        offsets = []
        for token in text.names:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [token.text for token in text.names],
            "token_logprobs": text.log_probs,
            "top_logprobs": [{token.text: p for token, p in top} for top in text.tops] if text.tops else None,
            "text_offset": offsets,
        }
