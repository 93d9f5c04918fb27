"""Parsing of the call in a language agent's response, in any of the ways that current models write one.

    Thought: I need the product.                                    ReAct, which the prompt asks for
    Action: code_interpreter
    Input: {"code": "print(6 * 7)"}

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>         Hermes, Qwen
    <|python_tag|>{"name": ..., "parameters": {...}}                 Llama 3; also without the tag, which is a special token
    <function=NAME>{...}</function>
    [TOOL_CALLS] [{"name": ..., "arguments": {...}}]                 Mistral; also without the tag
    [TOOL_CALLS]NAME[ARGS]{...}
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...    Qwen 3 Coder (see `named_arguments`)
    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE...         GLM 4.5
    [NAME(KEY=VALUE, ...)]                                           Llama 3.2 and 4; in a fence `tool_code`, Gemma; without
                                                                     brackets also behind `Action:`

The JSON may be in a fence of any label, and `arguments` may be a text of JSON (see `lenient_json` for what else is read).
The first call counts, whatever follows it; a call inside of a think block, closed or not, counts for nothing.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from marl_ray.agents.lenient_json import decode
from marl_ray.agents.named_arguments import parse_marked_call, parse_python_call
from marl_ray.agents.tools import replace_surrogates
from marl_ray.json_types import JsonObject

CallFailure = Literal[
    "", "no_call", "bad_json", "unknown_tool", "wrong_arguments", "timeout", "failed", "crash", "no_calls_left"
]
MAX_TRIED_CALLS = 16
"""Maximum number of places that are tried where a call without a tag or a line `Action:` may begin."""

_LINE = r"^[ \t]*(?:[#>*-]+[ \t]*)?{}[ \t*]*:[ \t*]*"
_FLAGS = re.IGNORECASE | re.MULTILINE
_THOUGHT = re.compile(_LINE.format("thought"), _FLAGS)
_ACTION = re.compile(_LINE.format("action"), _FLAGS)
_INPUT = re.compile(_LINE.format(r"(?:action[ \t]+)?input"), _FLAGS)
_OBSERVATION = re.compile(_LINE.format("observation"), _FLAGS)
_TAG = re.compile(
    r"<tool_call>|<function_call>|<\|tool_call\|>|<\|python_tag\|>|\[TOOL_CALLS\]|<function=[\w.-]{1,64}>",
    re.IGNORECASE,
)
_NAME_BEFORE_OBJECT = re.compile(r"\s*([A-Za-z_][\w.-]{0,63})(?:\[CALL_ID\]\w*)?\s*+(?:\[ARGS\]\s*+)?(?=\{)")
_BARE_NAME = re.compile(r"\s*([A-Za-z_][\w.-]{0,63})(?=\{)")
_CALL = re.compile(f"{_ACTION.pattern}|{_INPUT.pattern}|{_TAG.pattern}", _FLAGS)
_BARE_OBJECT = re.compile(r"^[ \t]*+(?:(?:`{3,}+|~{3,}+)[^\n`]*+\n\s*+)?(?:\[\s*+)?(?=\{)", re.MULTILINE)
_PYTHON_CALL = re.compile(
    r"^[ \t]*+(?:\[\s*+|`{3,}+tool_code[ \t]*+\n\s*+(?:print\()?)(?=[A-Za-z_][\w.]{0,63}\()", re.MULTILINE
)
_THINK_TAG = re.compile(r"<(?P<end>/?)(?i:think|thinking)>|\[(?P<off>/?)THINK\]")
_NAME = re.compile(r"[^\W\d]\w*")
_OPENING_FENCE = re.compile(r"\s*(?:(`{3,}|~{3,})[ \t]*[\w+#.-]*[ \t]*\n?\s*|`)?(?:\[\s*(?=\{))?")
_CLOSING_MARK = re.compile(r"\s*(?:\]\s*)?(?:`{3,}|~{3,}|</(?:tool_call|function_call|function)>|\])")
_NAME_KEYS = ("name", "tool", "tool_name", "function", "action")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "action_input")


@dataclass(frozen=True)
class ParsedCall:
    """The call that a response makes."""

    text: str
    """The response up to the end of its call; what follows was never read, and no later prompt repeats it."""
    thought: str
    """The text before the call, or that of its line `Thought:`."""
    tool: str
    """Name of the tool; empty if the response has none."""
    arguments: JsonObject | None
    """None if the input is no JSON object; `failure` and `why` then say what is wrong."""
    failure: CallFailure = ""
    """Empty if the call can be made."""
    why: str = ""
    """The reason of the failure, in a few words; empty without one."""
    code: str | None = None
    """The text of a fenced block that stands where JSON was expected; a tool with one argument may take it."""


def parse_call(text: str) -> ParsedCall:
    """Return the call that a response makes. Never raises, and takes time linear in the text.

    The case of words such as `Action:` does not matter. A line `Observation:` ends the response: what an agent makes up
    after it counts for nothing.
    """
    text = replace_surrogates(text)
    visible = _blank_thoughts(text)
    observation = _OBSERVATION.search(visible)
    visible = visible[: observation.start()] if observation else visible
    tag, line = _TAG.search(visible), _ACTION.search(visible) or _INPUT.search(visible)
    positions = [(line.start(), _parse_react_call(visible))] if line else []
    positions += [(tag.start(), _parse_marked_call(visible, tag))] if tag else []
    calls = [call for _, call in sorted(positions, key=lambda position: position[0])]
    if not calls:
        calls = [
            _parse_bare_call(visible)
            or ParsedCall(visible.rstrip(), _read_thought(visible), "", None, "no_call", "no line `Action:`")
        ]
    call = next((call for call in calls if not call.failure), calls[0])
    return ParsedCall(
        text[: len(call.text)], call.thought, call.tool, call.arguments, call.failure, call.why, call.code
    )


def _blank_thoughts(text: str) -> str:
    """Return the text with its thoughts blanked out.

    Thoughts are the think blocks before the first call, and all before a lone `</think>`.
    """
    parts: list[str] = []
    at, call = 0, _CALL.search(text)
    while tag := _THINK_TAG.search(text, at):
        begin, end = at, tag.end()
        if not _closes(tag):
            while call and call.start() < at:
                call = _CALL.search(text, at)
            if call and call.start() < tag.start():
                break
            closing = next(filter(_closes, _THINK_TAG.finditer(text, tag.end())), None)
            begin, end = tag.start(), closing.end() if closing else len(text)
        elif at:
            begin = tag.start()  # one too many
        parts += [text[at:begin], " " * (end - begin)]
        at = end
    return "".join([*parts, text[at:]])


def _closes(tag: re.Match[str]) -> bool:
    return bool(tag["end"] or tag["off"])


def _parse_react_call(text: str) -> ParsedCall:
    """Parse a call of lines `Action:` and `Input:`."""
    action = _ACTION.search(text)
    input_line = _INPUT.search(text, action.end() if action else 0)
    begin = action or input_line
    assert begin is not None
    thought = _read_thought(text[: begin.start()])
    if action and (complete_call := _named_object(text, action.end(), thought)):
        return complete_call
    if action and (called := parse_python_call(text, action.end())):
        return ParsedCall(text[: called[2]], thought, called[0], called[1])
    tool = _first_name(text[action.end() :].split("\n", 1)[0]) if action else ""
    second = _ACTION.search(text, action.end()) if action else None
    if input_line is None or (second is not None and second.start() < input_line.start()):
        head = text[: second.start()] if second else text
        return ParsedCall(head.rstrip(), thought, tool, None, "bad_json", "no line `Input:` after `Action:`")
    value, end, why = _read_object(text, input_line.end())
    if value is None:
        code, end = _read_fence(text, input_line.end()) if end is None else (None, end)
        return ParsedCall(text[:end].rstrip(), thought, tool, None, "bad_json", why, code)
    inner = value.get("arguments", value.get("parameters"))
    if len(value) == 2 and "name" in value and isinstance(inner, dict):
        tool, value = tool or _first_name(str(value["name"])), inner
    elif not tool and (name_and_arguments := _name_and_arguments(value)):
        tool, value = name_and_arguments
    if not tool:
        return ParsedCall(text[:end], thought, "", None, "no_call", "no line `Action:`")
    return ParsedCall(text[:end], thought, tool, value)


def _named_object(text: str, start: int, thought: str) -> ParsedCall | None:
    """Return a call that is one object, with name and arguments; None if it is not.

    Such an object follows `Action:` in LangChain's format, for example.
    """
    value, end, _ = _read_object(text, start)
    name_and_arguments = _name_and_arguments(value) if value is not None else None
    if name_and_arguments is None or end is None:
        return None
    closing = _CLOSING_MARK.match(text, end)
    return ParsedCall(text[: closing.end() if closing else end], thought, *name_and_arguments)


def _parse_marked_call(text: str, tag: re.Match[str]) -> ParsedCall:
    """Parse a call behind one of the marks of Hermes, Llama and Mistral."""
    thought, start, tool = _read_thought(text[: tag.start()]), tag.end(), ""
    marked = parse_marked_call(text, tag.start() if tag[0].startswith("<function=") else start)
    if marked is None and tag[0].lower() == "<|python_tag|>":
        marked = parse_python_call(text, start)
    if marked is not None:
        return ParsedCall(text[: marked[2]], thought, marked[0], marked[1])
    if tag[0].startswith("<function="):
        tool = tag[0][len("<function=") : -1]
    elif tag[0].upper() == "[TOOL_CALLS]" and (name := _NAME_BEFORE_OBJECT.match(text, start)):
        tool, start = name[1], name.end()
    value, end, why = _read_object(text, start)
    if value is None or end is None:
        return ParsedCall(text[:end].rstrip(), thought, tool, None, "bad_json", why)
    if not tool:
        name_and_arguments = _name_and_arguments(value, optional=True)
        if name_and_arguments is None:
            return ParsedCall(text[:end], thought, "", None, "bad_json", 'expected {"name": ..., "arguments": {...}}')
        tool, value = name_and_arguments
    closing = _CLOSING_MARK.match(text, end)
    return ParsedCall(text[: closing.end() if closing else end], thought, tool, value)


def _parse_bare_call(text: str) -> ParsedCall | None:
    """Return a call of JSON alone; None if there is none.

    Llama's and Mistral's are such calls, without the special tokens before them.
    """
    name = _BARE_NAME.match(text)
    if name is not None:
        value, end, _ = _read_object(text, name.end())
        if value is not None:
            return ParsedCall(text[:end], "", name[1], value)
    for number, match in enumerate(_BARE_OBJECT.finditer(text)):
        if number == MAX_TRIED_CALLS:
            break
        if call := _named_object(text, match.end(), _read_thought(text[: match.start()])):
            return call
    for number, match in enumerate(_PYTHON_CALL.finditer(text)):
        if number == MAX_TRIED_CALLS:
            break
        if called := parse_python_call(text, match.end()):
            closing = _CLOSING_MARK.match(text, called[2])
            end = closing.end() if closing else called[2]
            return ParsedCall(text[:end], _read_thought(text[: match.start()]), called[0], called[1])
    return None


def _read_object(text: str, start: int) -> tuple[dict[str, object] | None, int | None, str]:
    """Return the object that begins here, the place of its end, and the reason if there is none.

    The object may be in a fence, or first in a list.
    """
    opening = _OPENING_FENCE.match(text, start)
    try:
        value, end = decode(text, opening.end() if opening else start)
    except ValueError as error:
        return None, None, str(error)
    if not isinstance(value, dict):
        return None, end, "expected an object {...}"
    return value, end, ""


def _name_and_arguments(value: JsonObject, optional: bool = False) -> tuple[str, dict[str, object]] | None:
    """Return the name and arguments of an object that is a call, else None.

    With `optional` the arguments may be missing.
    """
    if isinstance(several := value.get("tool_calls"), list) and several and isinstance(several[0], dict):
        value = several[0]
    if isinstance(value.get("function"), dict):  # OpenAI's form
        value = value["function"]
    name = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if key in value), {} if optional else None)
    if isinstance(arguments, str):
        try:
            arguments, _ = decode(arguments, len(arguments) - len(arguments.lstrip()))
        except ValueError:
            return None
    if name is None or not isinstance(arguments, dict):
        return None
    return _first_name(name), arguments


def _read_fence(text: str, start: int) -> tuple[str | None, int | None]:
    """Return the text of the closed fence that begins here, and the place of its end.

    Both are None if there is no such fence.
    """
    opening = _OPENING_FENCE.match(text, start)
    if opening is None or not opening[1]:
        return None, None
    begin = text.find("\n", opening.start(1)) + 1
    close = text.find(f"\n{opening[1]}", begin - 1) if begin else -1
    return (None, None) if close < 0 else (text[begin : close + 1], close + 1 + len(opening[1]))


def _read_thought(text: str) -> str:
    """Return the text behind the line `Thought:`; all of it if there is no such line."""
    match = _THOUGHT.search(text)
    return text[match.end() if match else 0 :].strip()


def _first_name(text: str) -> str:
    """Return the first word that may be a tool's name; the text itself if there is none."""
    match = _NAME.search(text)
    return match[0] if match else text.strip()
