"""Messages and tools of a chat, as OpenAI's clients send them."""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

import orjson

from marl_ray.json_types import JsonMapping
from marl_ray.policies.prompting.prompts import Message
from marl_ray.serving.arms.protocol import Messages
from marl_ray.serving.http.fields import boolean_field
from marl_ray.serving.http.messages import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOOLS = 128
"""Maximum number of tools of a request: the limit of OpenAI's API, https://platform.openai.com/docs/api-reference/chat."""
TOOL_NAME = r"[a-zA-Z0-9_-]{1,64}"
"""Pattern of a whole name, as OpenAI's API has it."""


class Tools(NamedTuple):
    """The tools that the model may call."""

    definitions: tuple[JsonMapping, ...] = ()
    """Empty if `tool_choice` is `none`."""
    must_call: tuple[str, ...] = ()
    """See `TextRequest.must_call`."""
    parallel: bool = True
    """True if an answer may have several calls."""


def messages_of(messages: object) -> Messages:
    """Return every message reduced to what the model reads.

    Other fields are dropped, because clients send back the messages that they got, with any fields. Raises RequestError
    400 naming the invalid message.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages", "expected a list with at least one message")
    return tuple(_read_message(f"messages.{k}", message) for k, message in enumerate(messages))


def _read_message(where: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise RequestError(400, where, "expected an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(400, f"{where}.role", f"expected one of {', '.join(ROLES)}")
    calls = message.get("tool_calls") if role == "assistant" else None
    refusal = message.get("refusal") if role == "assistant" else None
    if refusal is not None and not isinstance(refusal, str):
        raise RequestError(400, f"{where}.refusal", "expected a text or null")
    if calls is not None and (not isinstance(calls, list) or not calls):
        raise RequestError(400, f"{where}.tool_calls", "expected a list with at least one call")
    content = message.get("content")
    if content is None and (calls or refusal):
        content = refusal or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts or not all(_is_text_part(part) for part in parts):
        raise RequestError(400, f"{where}.content", "expected a text, or a list of parts of the type text")
    fields: dict[str, object] = {"role": role, "content": "".join(part["text"] for part in parts)}
    if calls:
        fields["tool_calls"] = [_read_call(f"{where}.tool_calls.{k}", call) for k, call in enumerate(calls)]
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise RequestError(400, f"{where}.tool_call_id", "expected a text")
        fields["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            fields["name"] = message["name"]
    return fields


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _read_call(where: str, call: object) -> Message:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise RequestError(400, where, "expected an object of the type function")
    if call.get("id") is not None and not isinstance(call["id"], str):
        raise RequestError(400, f"{where}.id", "expected a text")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(400, f"{where}.function", "expected an object with name and arguments")
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments or "{}", strict=False) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not _is_writable_json(arguments):
        arguments = None
    if not isinstance(arguments, dict):  # chat templates need objects
        raise RequestError(400, f"{where}.function.arguments", "expected a JSON object as a text")
    fields = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **fields} if call.get("id") is not None else fields


def _is_writable_json(value: object) -> bool:
    """Return True if the value can be written as JSON again.

    orjson refuses what is deeper than 254 levels, halves of characters, and integers of more than 64 bits.
    """
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def tools_of(data: Mapping[str, object]) -> Tools:
    """Read and check the tools. Raises RequestError 400 naming the invalid field."""
    definitions = data.get("tools")
    choice = data.get("tool_choice")
    parallel = data.get("parallel_tool_calls") is None or boolean_field(data, "parallel_tool_calls")
    if definitions is not None and (not isinstance(definitions, list) or len(definitions) > MAX_TOOLS):
        raise RequestError(400, "tools", f"expected a list of {MAX_TOOLS} tools at most")
    if not _is_writable_json(definitions):
        raise RequestError(400, "tools", "expected JSON that is less deep")
    names = [_tool_name(f"tools.{k}", tool) for k, tool in enumerate(definitions or [])]
    if len(set(names)) < len(names):
        raise RequestError(400, "tools", "expected tools of different names")
    if choice in (None, "none", "auto"):
        return Tools(tuple(definitions or ()) if choice != "none" else (), (), parallel)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else choice
    if name not in names and choice != "required":
        raise RequestError(400, "tool_choice", "expected none, auto, required, or a function that is among the tools")
    if not names:
        raise RequestError(400, "tool_choice", "expected tools beside it")
    return Tools(tuple(definitions or ()), tuple(names) if choice == "required" else (str(name),), parallel)


def _tool_name(where: str, tool: object) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise RequestError(400, where, "expected an object of the type function, with a function")
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name):
        raise RequestError(400, f"{where}.function.name", "expected 1 to 64 letters, digits, dashes and underscores")
    for key, kind in (("description", str), ("parameters", dict)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise RequestError(400, f"{where}.function.{key}", f"expected {'a text' if kind is str else 'an object'}")
    return name
