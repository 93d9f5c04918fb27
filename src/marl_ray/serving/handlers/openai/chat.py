"""The OpenAI-compatible API: `/v1/chat/completions`, for its official clients and whatever is built on them."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from marl_ray.serving.arms.protocol import Messages, Piece
from marl_ray.serving.handlers.writing import Whole, Writing, agent_of, text_only, text_request, written
from marl_ray.serving.http.fields import attributes_of, flag, session_id
from marl_ray.serving.http.protocol import Request, RequestError, Response, Stream, event
from marl_ray.serving.http.text_settings import SETTINGS, settings_of
from marl_ray.serving.routing.router import Router
from marl_ray.serving.service import Service

ROLES = ("system", "developer", "user", "assistant")
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "top_logprobs": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tools": [],
    "store": False,
}
"""Fields of which only the value that asks for nothing is understood."""
CHAT_FIELDS = (
    SETTINGS
    | NEUTRAL.keys()
    | {"model", "messages", "user", "attributes", "max_completion_tokens", "stream", "stream_options", "logprobs"}
)
_FIELDS = {"experiment": "model", "agent": "model", "prompt": "messages", "session_id": "user"}
"""What our own fields are called here."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def problem(error: RequestError) -> bytes:
    """An error as OpenAI's clients read it; `field` is the same as `param`, as on our other routes."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code = _CODES.get(error.status)
    if error.status == 400 and error.field == "prompt":
        code = "context_length_exceeded"
    field = _FIELDS.get(error.field or "", error.field)
    told = {"message": str(error), "type": kind, "param": field, "code": code, "field": field}
    return orjson.dumps({"error": told})


async def completions(service: Service, request: Request) -> Response | Stream:
    """`POST /v1/chat/completions`. The unit is `user`, or the header `x-session-id`, or else this completion alone."""
    service.admission.admit(request, "inference")
    data = await request.object(CHAT_FIELDS)
    messages = _messages(data.get("messages"))
    streamed, log_probs = flag(data, "stream"), flag(data, "logprobs")
    options = data.get("stream_options")
    usage = streamed and _wants_usage(options)
    if options is not None and not streamed:
        raise RequestError(400, "stream_options", "expected none without stream")
    for name, neutral in NEUTRAL.items():
        if not _is_neutral(data.get(name), neutral):
            raise RequestError(400, name, f"unsupported, expected {orjson.dumps(neutral).decode()} or nothing")
    if data.get("max_completion_tokens") is not None:
        if data.get("max_tokens") is not None:
            raise RequestError(400, "max_tokens", "expected either this or max_completion_tokens")
        data["max_tokens"] = data["max_completion_tokens"]
    settings = settings_of(data)
    model = data.get("model")
    if not isinstance(model, str):
        raise RequestError(400, "model", "expected the name of an endpoint, as /v1/models lists them")
    endpoint, _, agent = model.partition("/")
    routers = service.endpoints.acting(endpoint)
    text_only(routers[0])
    number = f"chatcmpl-{secrets.token_hex(12)}"
    known = data.get("user") is not None or request.header(b"x-session-id") is not None
    session = session_id(data.get("user"), request) if known else number
    met = await service.assigner.meet(
        routers, session, None, attributes_of(data), service.admission.forced_arm(request)
    )
    text_only(met.router)
    asked = text_request(
        service,
        agent_of(met.router, agent or None),
        messages,
        settings,
        hide_stop="stop" in settings.changes,
        names=log_probs,
        streamed=streamed,
    )
    made = _Completion(number, model, log_probs, usage)
    return await written(request, Writing(service, met, asked), streamed, made.whole, made.chunks)


def models_of(routers: Sequence[Router]) -> list[dict[str, Any]]:
    """What `model` may be, of an endpoint's experiments (newest first): its name, where one policy plays all agents, else
    one per agent. None of an endpoint without language models."""
    newest = routers[0]
    if not newest.is_text:
        return []
    agents, name = newest.bundle_of(newest.control).agents, newest.config.served_as
    names = [name] if len(set(agents.values())) == 1 else [f"{name}/{agent}" for agent in agents]
    created = int(newest.created)
    return [{"id": each, "object": "model", "created": created, "owned_by": "marl-ray"} for each in names]


class _Completion:
    """One completion in OpenAI's words."""

    def __init__(self, number: str, model: str, log_probs: bool, usage: bool):
        self._head = {"id": number, "created": int(time.time()), "model": model}
        self._log_probs, self._usage = log_probs, usage

    def whole(self, writing: Writing, whole: Whole) -> dict[str, Any]:
        message = {"role": "assistant", "content": whole.text, "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": whole.finish,
            "logprobs": self._told(whole.names, whole.log_probs),
        }
        return self._part(writing, "chat.completion", [choice]) | {"usage": _usage(whole.prompt_tokens, len(whole.ids))}

    async def chunks(self, writing: Writing) -> AsyncIterator[bytes]:
        tokens = 0
        delta: dict[str, Any] = {"role": "assistant"}
        try:
            while True:
                piece: Piece = await writing.next()
                tokens += len(piece.ids)
                choice = {
                    "index": 0,
                    "delta": delta | {"content": piece.text},
                    "finish_reason": piece.finish,
                    "logprobs": self._told(piece.names, piece.log_probs),
                }
                yield event(self._chunk(writing, [choice], None))
                delta = {}
                if piece.finish is not None:
                    break
        except RequestError as error:  # too late for a status
            yield b"data: " + problem(error) + b"\n\n"
            return
        if self._usage:
            yield event(self._chunk(writing, [], _usage(piece.prompt_tokens, tokens)))
        yield b"data: [DONE]\n\n"

    def _chunk(self, writing: Writing, choices: list[Any], usage: dict[str, int] | None) -> dict[str, Any]:
        part = self._part(writing, "chat.completion.chunk", choices)
        return part | {"usage": usage} if self._usage else part

    def _part(self, writing: Writing, kind: str, choices: list[Any]) -> dict[str, Any]:
        return self._head | {"object": kind, "system_fingerprint": writing.digest[:16], "choices": choices}

    def _told(self, names: Sequence[str], log_probs: Sequence[float]) -> dict[str, Any] | None:
        if not self._log_probs:
            return None
        content: list[dict[str, Any]] = [
            {"token": name, "logprob": log_prob, "bytes": None, "top_logprobs": []}
            for name, log_prob in zip(names, log_probs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _wants_usage(options: Any) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise RequestError(400, "stream_options", "expected an object with include_usage")
    return flag(options, "include_usage")


def _is_neutral(value: Any, neutral: Any) -> bool:
    if value is None:
        return True
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _messages(given: Any) -> Messages:
    """Role and content of every message; RequestError 400 naming the one at fault."""
    if not isinstance(given, list) or not given:
        raise RequestError(400, "messages", "expected a list with at least one message")
    return tuple(_message(f"messages.{k}", message) for k, message in enumerate(given))


def _message(where: str, message: Any) -> tuple[str, str]:
    # A client may send back the message that it got, which has a `refusal`.
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys() <= {"role", "content", "refusal"}:
        raise RequestError(400, where, "expected an object with role and content")
    if message["role"] not in ROLES:
        raise RequestError(400, f"{where}.role", f"expected one of {', '.join(ROLES)}")
    if message.get("refusal") is not None:
        raise RequestError(400, f"{where}.refusal", "expected null")
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts or not all(_is_text_part(part) for part in parts):
        raise RequestError(400, f"{where}.content", "expected a text, or a list of parts of the type text")
    return message["role"], "".join(part["text"] for part in parts)


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )
