"""Fields that requests of OpenAI's paths share, and how the gateway treats fields that it cannot obey.

The gateway obeys a field whose value would change the answer, or refuses the request and names the field. Hints for the
provider (how to bill, store or cache) change nothing here and are ignored. Names that OpenAI's API does not have are
refused, as OpenAI refuses them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.policies.engines.decoding.logit_bias import LogitBias
from marl_ray.serving.handlers.texts.arm_request import agent_of, check_writes_text
from marl_ray.serving.handlers.texts.response_writer import TextResponseWriter
from marl_ray.serving.http.fields import attributes_of, boolean_field, session_id
from marl_ray.serving.http.messages import Request, RequestError
from marl_ray.serving.http.text_settings import SETTINGS, Settings, settings_of
from marl_ray.serving.routing.assignment import SessionArm
from marl_ray.serving.service import Service
from marl_ray.stored_files.folder_kinds import DIGEST_DIGITS

COMMON_FIELDS = SETTINGS | {"model", "user", "attributes", "stream", "stream_options", "top_k", "logit_bias"} | {
    "presence_penalty", "frequency_penalty",
}  # fmt: skip
IGNORED_FIELDS = frozenset({
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "verbosity",
})  # fmt: skip
"""Hints. `reasoning_effort` and `verbosity` only affect models trained with them."""
NEUTRAL_VALUES: dict[str, object] = {"n": 1, "repetition_penalty": 1, "min_p": 0}
"""Fields that are accepted only with this value, which changes nothing."""
MAX_BIAS, MAX_PENALTY = 100, 2
"""The limits of OpenAI's API for a bias and for a penalty, and for their negatives."""
MAX_TOP_LOGPROBS = 20
"""The largest number of most likely tokens to list beside each token."""
_FIELDS = {"experiment": "model", "agent": "model", "session_id": "user"}
"""Our own fields -> their names in OpenAI's API."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def error_body(error: RequestError, prompt: str = "prompt") -> bytes:
    """Return an error in the form that OpenAI's clients read.

    `param` is the `field` of our other routes. `prompt` is the path's name of the prompt.
    """
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code = error.code or _CODES.get(error.status)
    field = (_FIELDS | {"prompt": prompt}).get(error.field or "", error.field)
    fields = {"message": str(error), "type": kind, "param": field, "code": code, "field": field}
    return orjson.dumps({"error": fields})


class CompletionOptions(NamedTuple):
    """The options for a text that all of OpenAI's paths share."""

    model: str
    """Name of the endpoint, or ENDPOINT/AGENT."""
    settings: Settings
    streamed: bool
    """True if the answer is sent as events."""
    has_usage: bool
    """True if the last event of a stream has the numbers of tokens."""
    bias: LogitBias | None
    """None if the request changes no logits."""


def read_options(data: dict[str, object], neutral: Mapping[str, object]) -> CompletionOptions:
    """Read the fields that all of OpenAI's paths share.

    `neutral` maps fields that are not supported to the value that they may have. Raises RequestError 400 naming the
    invalid field.
    """
    streamed = boolean_field(data, "stream")
    options = data.get("stream_options")
    has_usage = False
    if options is not None:
        if not streamed:
            raise RequestError(400, "stream_options", "expected none without stream")
        if not isinstance(options, dict):
            raise RequestError(400, "stream_options", "expected an object")
        # Other options, such as include_obfuscation, concern only the transport.
        has_usage = boolean_field(options, "include_usage")
    for name, neutral_value in neutral.items():
        if not _is_neutral(data.get(name), neutral_value):
            raise RequestError(400, name, f"unsupported, expected {orjson.dumps(neutral_value).decode()} or nothing")
    model = data.get("model")
    if not isinstance(model, str):
        raise RequestError(400, "model", "expected the name of an endpoint, as /v1/models lists them")
    return CompletionOptions(model, settings_of(data), streamed, has_usage, _read_bias(data))


def _read_bias(data: Mapping[str, object]) -> LogitBias | None:
    """Return the amounts to add to the logits; None if there are none."""
    biases = data.get("logit_bias")
    if biases is not None and not isinstance(biases, dict):
        raise RequestError(400, "logit_bias", "expected an object of token ids and biases")
    tokens = []
    for name, value in (biases or {}).items():
        is_id = name.isascii() and name.isdecimal() and len(name) <= 10 and str(int(name)) == name  # each token once
        if not (is_id and _is_between(value, MAX_BIAS)):
            expected = f"expected token ids and biases from -{MAX_BIAS} to {MAX_BIAS}"
            raise RequestError(400, "logit_bias", expected)
        tokens.append((int(name), float(value)))
    bias = LogitBias(
        tuple(pair for pair in tokens if pair[1]),
        _read_penalty(data, "presence_penalty"),
        _read_penalty(data, "frequency_penalty"),
    )
    return None if bias == LogitBias() else bias


def _read_penalty(data: JsonMapping, name: str) -> float:
    value = data.get(name)
    if value is not None and not _is_between(value, MAX_PENALTY):
        raise RequestError(400, name, f"expected a number from -{MAX_PENALTY} to {MAX_PENALTY}")
    return float(value or 0)


def _is_between(value: object, maximum: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -maximum <= value <= maximum


def _is_neutral(value: object, neutral: object) -> bool:
    if value is None:
        return True
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def top_of(data: Mapping[str, object], name: str, maximum: int) -> int:
    """Return the number of most likely tokens that a field asks for; 0 where it is missing or null.

    Raises RequestError 400 naming the field.
    """
    value = data.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum):
        raise RequestError(400, name, f"expected an integer from 0 to {maximum}")
    return value or 0


async def assign_request(
    service: Service, request: Request, data: Mapping[str, object], model: str, number: str
) -> tuple[SessionArm, str]:
    """Assign the request's session to an arm, and name the agent whose text the request asks for.

    The unit is `user`, else the header `x-session-id`, else this completion alone, by its `number`.
    """
    endpoint, _, agent = model.partition("/")
    routers = service.endpoints.acting_routers(endpoint)
    check_writes_text(routers[0].arms)
    has_unit = data.get("user") is not None or request.header(b"x-session-id") is not None
    session = session_id(data.get("user"), request) if has_unit else number
    session_arm = await service.assigner.assign(
        routers, session, None, attributes_of(data), service.admission.forced_arm(request)
    )
    check_writes_text(session_arm.arms)
    return session_arm, agent_of(session_arm.arms, agent or None)


def answer_fields(writer: TextResponseWriter, head: JsonMapping, kind: str, choices: list[Any]) -> JsonObject:
    """Return the fields that a complete answer and the parts of a stream share."""
    return {**head, "object": kind, "system_fingerprint": writer.digest[:DIGEST_DIGITS], "choices": choices}


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """Return OpenAI's `usage`: the numbers of tokens of the prompt, of the completion and of both."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
