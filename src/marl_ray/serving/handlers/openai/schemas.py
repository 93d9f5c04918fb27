"""OpenAI's paths in our OpenAPI document: answers as pydantic models, requests as JSON schema."""
# ruff: noqa: UP013, UP035 (with a line per field the answers would take three pages; pydantic wants this TypedDict)

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from marl_ray.json_types import JsonSchema
from marl_ray.serving.handlers.openai.chat import CHAT_FIELDS, CHAT_NEUTRAL_VALUES, FORMATS
from marl_ray.serving.handlers.openai.completions import (
    COMPLETION_FIELDS,
    COMPLETION_NEUTRAL_VALUES,
    MAX_LOGPROBS,
    TOKEN_ID_LIMIT,
)
from marl_ray.serving.handlers.openai.fields import IGNORED_FIELDS, MAX_BIAS, MAX_PENALTY, MAX_TOP_LOGPROBS
from marl_ray.serving.handlers.openai.messages import MAX_TOOLS, ROLES, TOOL_NAME
from marl_ray.serving.http.text_settings import MAX_TOKENS

# fmt: off
Finish = Literal["stop", "length"]
CalledFunction = TypedDict("CalledFunction", {"name": str, "arguments": str})
ToolCall = TypedDict("ToolCall", {"id": str, "type": Literal["function"], "function": CalledFunction})
ChatMessage = TypedDict("ChatMessage", {
    "role": Literal["assistant"], "content": str | None, "refusal": None, "tool_calls": NotRequired[list[ToolCall]],
})
# UTF-8 bytes of the token, which may be a part of a character; null if the tokenizer is not byte-level.
TokenUtf8 = list[Annotated[int, Field(ge=0, le=255)]] | None
TopToken = TypedDict("TopToken", {"token": str, "logprob": float, "bytes": TokenUtf8})
ChatToken = TypedDict("ChatToken", {
    "token": str, "logprob": float, "bytes": TokenUtf8, "top_logprobs": list[TopToken],
})
ChatLogProbs = TypedDict("ChatLogProbs", {"content": list[ChatToken], "refusal": None})
ChatChoice = TypedDict("ChatChoice", {
    "index": int, "message": ChatMessage, "finish_reason": Finish | Literal["tool_calls"],
    "logprobs": ChatLogProbs | None,
})
Usage = TypedDict("Usage", {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int})
ChatAnswer = TypedDict("ChatAnswer", {
    "id": str, "object": Literal["chat.completion"], "created": int, "model": str, "system_fingerprint": str,
    "choices": list[ChatChoice], "usage": Usage,
})
CompletionLogProbs = TypedDict("CompletionLogProbs", {
    "tokens": list[str], "token_logprobs": list[float], "top_logprobs": list[dict[str, float]] | None,
    "text_offset": list[int],
})
CompletionChoice = TypedDict("CompletionChoice", {
    "index": int, "text": str, "finish_reason": Finish, "logprobs": CompletionLogProbs | None,
})
CompletionAnswer = TypedDict("CompletionAnswer", {
    "id": str, "object": Literal["text_completion"], "created": int, "model": str, "system_fingerprint": str,
    "choices": list[CompletionChoice], "usage": Usage,
})
ModelName = TypedDict("ModelName", {"id": str, "object": Literal["model"], "created": int, "owned_by": str})
# fmt: on

_FLAG: JsonSchema = {"type": ["boolean", "null"]}
_PENALTY: JsonSchema = {"type": ["number", "null"], "minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}
_SHARED_PROPERTIES: dict[str, JsonSchema] = {
    "stream_options": {
        "type": ["object", "null"], "properties": {"include_usage": _FLAG}, "description": "Only with stream.",
    },
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "description": "Token id -> the amount that is added to its logit.",
    },
    "presence_penalty": _PENALTY | {"description": "Subtracted from the logit of every token that the text has already."},
    "frequency_penalty": _PENALTY | {"description": "Subtracted once for each time that the text has the token already."},
    **{name: {"description": "A hint, which is ignored."} for name in sorted(IGNORED_FIELDS)},
}  # fmt: skip
_NOTHING_ELSE = "Nothing else is supported."
_CHAT: dict[str, JsonSchema] = _SHARED_PROPERTIES | {
    "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/ChatRequestMessage"}},
    "max_completion_tokens": {
        "type": ["integer", "null"], "minimum": 1, "maximum": MAX_TOKENS,
        "description": "The same as max_tokens; only one may be given.",
    },
    "logprobs": _FLAG,
    "top_logprobs": {
        "type": ["integer", "null"], "minimum": 0, "maximum": MAX_TOP_LOGPROBS, "description": "Only with logprobs.",
    },
    "tools": {"type": ["array", "null"], "maxItems": MAX_TOOLS, "items": {"$ref": "#/components/schemas/ChatTool"}},
    "tool_choice": {"anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]},
    "parallel_tool_calls": _FLAG | {"description": "False if an answer may have one call at most."},
    "response_format": {
        "type": ["object", "null"], "properties": {"type": {"enum": list(FORMATS)}}, "required": ["type"],
        "description": "json_object: the answer is a JSON object, unless it is truncated. Not with tools.",
    },
    **{name: {"enum": [nothing, None], "description": _NOTHING_ELSE} for name, nothing in CHAT_NEUTRAL_VALUES.items()},
}  # fmt: skip
_TOKEN_IDS: JsonSchema = {
    "type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": TOKEN_ID_LIMIT},
}  # fmt: skip
_COMPLETION: dict[str, JsonSchema] = _SHARED_PROPERTIES | {
    "prompt": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"type": "string"}},
            _TOKEN_IDS,
            {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
        ],
        "description": "Read without a chat template; token ids are taken unchanged. Each prompt has its own choice.",
    },
    "logprobs": {
        "type": ["integer", "null"], "minimum": 0, "maximum": MAX_LOGPROBS,
        "description": "Number of the most likely tokens to list beside each token.",
    },
    **{name: {"enum": [nothing, None], "description": _NOTHING_ELSE} for name, nothing in COMPLETION_NEUTRAL_VALUES.items()},
}  # fmt: skip
OPENAI_REQUESTS: dict[str, tuple[dict[str, JsonSchema], frozenset[str], tuple[str, ...]]] = {
    "ChatRequest": (_CHAT, frozenset(CHAT_FIELDS), ("model", "messages")),
    "CompletionRequest": (_COMPLETION, frozenset(COMPLETION_FIELDS), ("model", "prompt")),
}
"""Schema -> the fields that mean something else on other paths, all fields, and the required fields."""
_TEXT_PART: JsonSchema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXT_CONTENT: JsonSchema = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]}
_TOOL_CALL: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "string", "description": "A JSON object.", "examples": ["{}"]},
            },
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}


def _message(roles: list[str], content: JsonSchema, *required: str, **more: JsonSchema) -> JsonSchema:
    return {
        "type": "object",
        "properties": {"role": {"enum": roles}, "content": content, **more},
        "required": ["role", *required],
    }


OPENAI_PARTS: dict[str, JsonSchema] = {
    "ChatRequestMessage": {
        "anyOf": [
            _message([role for role in ROLES if role != "tool"], _TEXT_CONTENT, "content"),
            _message(
                ["assistant"],
                {"anyOf": [_TEXT_CONTENT, {"type": "null"}]},
                "tool_calls",
                tool_calls={"type": "array", "minItems": 1, "items": _TOOL_CALL},
            ),
            _message(["tool"], _TEXT_CONTENT, "content", "tool_call_id", tool_call_id={"type": "string"}),
        ],
        "description": "Further fields are ignored.",
    },
    "ChatTool": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"], "description": "JSON schema of the arguments."},
                },
                "required": ["name"],
            },
        },
        "required": ["type", "function"],
    },
}
