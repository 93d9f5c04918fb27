"""The OpenAI-compatible path `/v1/chat/completions`, for OpenAI's official clients and tools built on them."""

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from marl_ray.json_types import JsonObject
from marl_ray.serving.arms.protocol import NamedToken, ResponseChunk
from marl_ray.serving.errors import ServingError
from marl_ray.serving.handlers.openai.fields import (
    COMMON_FIELDS,
    IGNORED_FIELDS,
    MAX_TOP_LOGPROBS,
    NEUTRAL_VALUES,
    CompletionOptions,
    answer_fields,
    assign_request,
    error_body,
    read_options,
    top_of,
    usage_of,
)
from marl_ray.serving.handlers.openai.messages import Tools, messages_of, tools_of
from marl_ray.serving.handlers.openai.tool_calls import ToolCallReader
from marl_ray.serving.handlers.texts.arm_request import make_text_request
from marl_ray.serving.handlers.texts.response_writer import TextResponseWriter, respond_with_text
from marl_ray.serving.handlers.texts.written_response import WrittenResponse
from marl_ray.serving.http.fields import boolean_field
from marl_ray.serving.http.messages import Request, RequestError, Response, Stream, server_sent_event
from marl_ray.serving.http.statuses import as_request_error
from marl_ray.serving.service import Service

CHAT_NEUTRAL_VALUES: dict[str, object] = NEUTRAL_VALUES | {
    "modalities": ["text"],
    "audio": None,
    "functions": None,
    "function_call": "none",
    "web_search_options": None,
    "moderation": None,
}
CHAT_FIELDS = (
    COMMON_FIELDS
    | IGNORED_FIELDS
    | CHAT_NEUTRAL_VALUES.keys()
    | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
    | {"tools", "tool_choice", "parallel_tool_calls", "response_format"}
)
FORMATS = ("text", "json_object")


async def chat_completions(service: Service, request: Request) -> Response | Stream:
    """Answer `POST /v1/chat/completions`. Raises RequestError naming a wrong field, ServingError if no arm answers."""
    service.admission.admit(request, "inference")
    data = await request.read_object(CHAT_FIELDS)
    messages = messages_of(data.get("messages"))
    tools = tools_of(data)
    has_log_probs = boolean_field(data, "logprobs")
    top = top_of(data, "top_logprobs", MAX_TOP_LOGPROBS)
    if top and not has_log_probs:
        raise RequestError(400, "top_logprobs", "expected logprobs beside it")
    is_json_object = _is_json_object(data.get("response_format"))
    if is_json_object and tools.definitions:
        raise RequestError(400, "response_format", "expected text where there are tools to call")
    if data.get("max_completion_tokens") is not None:
        if data.get("max_tokens") is not None:
            raise RequestError(400, "max_tokens", "expected either this or max_completion_tokens")
        data["max_tokens"] = data["max_completion_tokens"]
    options = read_options(data, CHAT_NEUTRAL_VALUES)
    completion_id = f"chatcmpl-{secrets.token_hex(12)}"
    session_arm, agent = await assign_request(service, request, data, options.model, completion_id)
    arm_request = make_text_request(
        service,
        agent,
        messages,
        options.settings,
        is_stop_hidden="stop" in options.settings.changes,
        has_names=has_log_probs,
        top=top,
        streamed=options.streamed,
        tools=tools.definitions,
        must_call=tools.must_call,
        is_json_object=is_json_object,
        bias=options.bias,
    )
    completion = _Completion(completion_id, options, has_log_probs, tools)
    return await respond_with_text(
        request,
        TextResponseWriter(service, session_arm, arm_request),
        options.streamed,
        completion.answer,
        completion.chunks,
    )


def chat_error_body(error: RequestError) -> bytes:
    """Return an error as `error_body` does; the field `prompt` of our own routes is called `messages` here."""
    return error_body(error, "messages")


def _is_json_object(response_format: object) -> bool:
    """Return True if the format is a JSON object, False if it is text. Raises RequestError 400 for others."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is not None and kind not in FORMATS:
        raise RequestError(400, "response_format", f"unsupported, expected the type {' or '.join(FORMATS)}")
    return kind == "json_object"


class _Completion:
    """One completion in OpenAI's words."""

    def __init__(self, completion_id: str, options: CompletionOptions, has_log_probs: bool, tools: Tools):
        self._head = {"id": completion_id, "created": int(time.time()), "model": options.model}
        self._has_log_probs = has_log_probs
        self._has_usage = options.has_usage
        self._tools = tools

    def _reader(self) -> ToolCallReader | None:
        names = {tool["function"]["name"] for tool in self._tools.definitions}
        return ToolCallReader(names, self._tools.parallel) if names else None

    def answer(self, writer: TextResponseWriter, response: WrittenResponse) -> JsonObject:
        reader = self._reader()
        text, calls = (response.text, []) if reader is None else reader.add(response.text, True)
        message: JsonObject = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            # Calls have an index only in the parts of a stream.
            without_index = [{key: value for key, value in call.items() if key != "index"} for call in calls]
            message |= {"content": text or None, "tool_calls": without_index}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _name_finish(response.finish, reader),
            "logprobs": self._logprobs_field(response.names, response.log_probs, response.tops),
        }
        usage = usage_of(response.prompt_tokens, response.tokens)
        return answer_fields(writer, self._head, "chat.completion", [choice]) | {"usage": usage}

    async def chunks(self, writer: TextResponseWriter) -> AsyncIterator[bytes]:
        tokens = 0
        reader = self._reader()
        delta: dict[str, object] = {"role": "assistant"}
        try:
            while True:
                chunk: ResponseChunk = await writer.next()
                tokens += chunk.tokens
                text = chunk.text
                calls = list[JsonObject]()
                if reader is not None:
                    text, calls = reader.add(chunk.text, chunk.finish is not None)
                choice = {
                    "index": 0,
                    "delta": delta | {"content": text} | ({"tool_calls": calls} if calls else {}),
                    "finish_reason": _name_finish(chunk.finish, reader),
                    "logprobs": self._logprobs_field(chunk.names, chunk.log_probs, chunk.tops),
                }
                yield server_sent_event(self._chunk(writer, [choice], None))
                delta = {}
                if chunk.finish is not None:
                    break
        except ServingError as error:  # the status has already been sent
            yield b"data: " + chat_error_body(as_request_error(error)) + b"\n\n"
            return
        if self._has_usage:
            yield server_sent_event(self._chunk(writer, [], usage_of(chunk.prompt_tokens, tokens)))
        yield b"data: [DONE]\n\n"

    def _chunk(
        self, writer: TextResponseWriter, choices: list[object], usage: Mapping[str, int] | None
    ) -> dict[str, object]:
        chunk = answer_fields(writer, self._head, "chat.completion.chunk", choices)
        return chunk | {"usage": usage} if self._has_usage else chunk

    def _logprobs_field(
        self,
        names: Sequence[NamedToken],
        log_probs: Sequence[float],
        tops: Sequence[Sequence[tuple[NamedToken, float]]],
    ) -> dict[str, object] | None:
        if not self._has_log_probs:
            return None
        content: list[dict[str, object]] = [
            _describe_token(name, log_prob)
            | {"top_logprobs": [_describe_token(*other) for other in tops[k]] if tops else []}
            for k, (name, log_prob) in enumerate(zip(names, log_probs, strict=True))
        ]
        return {"content": content, "refusal": None}


def _describe_token(name: NamedToken, log_prob: float) -> dict[str, object]:
    return {"token": name.text, "logprob": log_prob, "bytes": name.utf8}


def _name_finish(finish: str | None, reader: ToolCallReader | None) -> str | None:
    return "tool_calls" if finish == "stop" and reader is not None and reader.calls else finish
