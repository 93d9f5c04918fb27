"""Find out how a chat template shows tools, and how the model writes a call of a tool."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from marl_ray.agents.lenient_json import decode
from marl_ray.agents.named_arguments import parse_marked_call
from marl_ray.errors import FieldError
from marl_ray.policies.engines.decoding.json_guide import GuideState, frame_guide
from marl_ray.policies.prompting.prompts import PROBE_TEXT, Message, encode_chat, render_messages, uses_template
from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.policies.prompting.tokenizers import special_tokens

_USER = {"role": "user", "content": PROBE_TEXT}
_ARGUMENTS = {f"{PROBE_TEXT}key": f"{PROBE_TEXT}value"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": f"{PROBE_TEXT}call", "arguments": _ARGUMENTS}}
    ],
}
_RESULT = {"role": "tool", "content": f"{PROBE_TEXT}result", "tool_call_id": "call00001", "name": f"{PROBE_TEXT}call"}
_TOOL = {
    "type": "function",
    "function": {"name": f"{PROBE_TEXT}tool", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
"""The marks of `HERMES` around a call."""
LIST_MARK = "[TOOL_CALLS]"
"""The text that Mistral's models write before a list of calls."""


class WrittenCall(NamedTuple):
    """A call of a tool by a model."""

    name: str
    arguments: str
    """A JSON object, as text."""


class CallFormat(NamedTuple):
    """The text of a call: `before`, the tool's name, `between`, its arguments as a JSON object, `behind`."""

    before: str
    between: str
    behind: str


HERMES = CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
"""The format of the models of NousResearch and Qwen; also used if a template shows no other."""


class _TemplateFacts(NamedTuple):
    tools: bool
    """True if the template shows the tools."""
    calls: bool
    """True if the template shows an assistant's calls."""
    results: bool
    """True if the template shows a tool's answers."""
    call_format: CallFormat


_FACTS_OF: WeakKeyDictionary[Tokenizer, _TemplateFacts] = WeakKeyDictionary()


def encode_tool_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], chat: bool | None
) -> list[int]:
    """Encode as `encode_chat` does, for a model that may call `tools`.

    Messages may have `tool_calls` (their arguments as objects) or the role `tool`. Raises FieldError naming `tools` or
    `prompt` if the template would leave any of them out.
    """
    called, answered = any("tool_calls" in m for m in messages), any(m["role"] == "tool" for m in messages)
    if not (tools or called or answered):
        return encode_chat(tokenizer, messages)
    facts = _facts(tokenizer) if uses_template(tokenizer, chat) else None
    if tools and not (facts and facts.tools):
        raise FieldError("tools", "the chat template of this policy shows its model no tools")
    if called and not (facts and facts.calls):
        raise FieldError("prompt", "the chat template leaves out tool_calls")
    if answered and not (facts and facts.results):
        raise FieldError("prompt", "the chat template leaves out what the role tool says")
    return encode_chat(tokenizer, messages, tools)


def call_guide(tokenizer: Tokenizer, names: Sequence[str]) -> GuideState:
    """Return a guide to a response that is one call of one of these tools, in the template's own form."""
    call_format = _facts(tokenizer).call_format
    return frame_guide(tuple(f"{call_format.before}{name}{call_format.between}" for name in names), call_format.behind)


def _facts(tokenizer: Tokenizer) -> _TemplateFacts:
    if tokenizer not in _FACTS_OF:
        called = render_messages(tokenizer, [_USER, _CALL])
        answered = render_messages(tokenizer, [_USER, _CALL, _RESULT], add_generation_prompt=True)
        _FACTS_OF[tokenizer] = _TemplateFacts(
            f"{PROBE_TEXT}tool" in render_messages(tokenizer, [_USER], tools=[_TOOL], add_generation_prompt=True),
            f"{PROBE_TEXT}call" in called or f"{PROBE_TEXT}call" in answered,
            f"{PROBE_TEXT}result" in answered,
            _call_format(tokenizer, called),
        )
    return _FACTS_OF[tokenizer]


def _call_format(tokenizer: Tokenizer, called: str) -> CallFormat:
    """Return the template's form of a call, as a conversation that ends with one shows it; else `HERMES`."""
    start = render_messages(tokenizer, [_USER], add_generation_prompt=True)
    before, name, rest = called.removeprefix(start).partition(f"{PROBE_TEXT}call")
    between, arguments, behind = rest.partition(json.dumps(_ARGUMENTS))
    if not (called.startswith(start) and name and arguments):
        return HERMES
    end = render_messages(tokenizer, [_USER, {"role": "assistant", "content": f"{PROBE_TEXT}end"}]).rpartition(
        f"{PROBE_TEXT}end"
    )[2]
    call_format = CallFormat(before, between, behind.removesuffix(end))
    for token in special_tokens(tokenizer).values():  # texts show no call at all
        call_format = CallFormat(*(part.replace(token, "") for part in call_format))
    written = f"{call_format.before}x{call_format.between}{{}}{call_format.behind}".strip()
    return call_format if calls_in(written.removeprefix(OPEN_TAG).removesuffix(CLOSE_TAG)) else HERMES


def calls_in(text: str) -> list[WrittenCall]:
    """Return the calls that a text consists of; empty if the text is something else.

    The text may be a JSON object with `name` and `arguments` (or `parameters`), a list of such objects, or one call
    with its arguments in marks.
    """
    text = text.strip().removeprefix(LIST_MARK).strip()
    try:
        value, end = decode(text)
    except ValueError:
        marked = parse_marked_call(text, 0)
        return [] if marked is None else [WrittenCall(marked[0], json.dumps(marked[1], ensure_ascii=False))]
    if end < len(text):
        return []
    calls = [_call(part) for part in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(part: object) -> WrittenCall | None:
    """Return the call that a value of JSON stands for; None if it is none."""
    if not isinstance(part, dict) or not isinstance(part.get("name"), str) or not part["name"]:
        return None
    arguments = part.get("arguments", part.get("parameters", {}))
    if isinstance(arguments, str):
        return WrittenCall(part["name"], arguments)
    return WrittenCall(part["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
