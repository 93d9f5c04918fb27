"""Parsing of calls whose arguments are written with their names, in marks or as in Python.

    <function=NAME><parameter=KEY>VALUE</parameter></function>                      Qwen 3 Coder
    NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>                          GLM 4.5
    NAME(KEY=VALUE, ...)                                                            Llama 3.2 and 4, Gemma

Time is linear in the text, whatever it is; nothing is evaluated.
"""

import re

from marl_ray.agents.lenient_json import decode
from marl_ray.json_types import JsonObject

NamedCall = tuple[str, JsonObject, int]
"""Name, arguments, and the place where the call ends."""

_FUNCTION = re.compile(r"\s*<function=([\w.-]{1,64})>", re.IGNORECASE)
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]{0,63})\s*(?=<arg_key>|</tool_call>)")
_PARAMETER = re.compile(r"\s*<parameter=([\w.-]{1,64})>")
_KEY = re.compile(r"\s*<arg_key>\s*([\w.-]{1,64})\s*</arg_key>\s*<arg_value>")
_CLOSING_TAGS = re.compile(r"\s*(?:</function>)?(?:\s*</tool_call>)?")
_CALL_START = re.compile(r"\s*([A-Za-z_][\w.]{0,63})\(")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w{0,63})\s*=\s*")
_SEPARATOR = re.compile(r"\s*(,\s*\)|,|\))")


def parse_marked_call(text: str, start: int) -> NamedCall | None:
    """Return the call in marks that begins here; None if there is none, or if it does not end."""
    function, name = _FUNCTION.match(text, start), _NAME.match(text, start)
    opening = function or name
    if opening is None:
        return None
    key, close = (_PARAMETER, "</parameter>") if function else (_KEY, "</arg_value>")
    arguments: dict[str, object] = {}
    at = opening.end()
    while key_match := key.match(text, at):
        end = text.find(close, key_match.end())
        if end < 0:
            return None
        arguments[key_match[1]] = text[key_match.end() : end].removeprefix("\n").removesuffix("\n")
        at = end + len(close)
    ends = _CLOSING_TAGS.match(text, at)
    closed = ends is not None and bool(ends[0].strip())
    if not arguments and not closed:
        return None
    return opening[1], arguments, ends.end() if ends and closed else at


def parse_python_call(text: str, start: int) -> NamedCall | None:
    """Return the call `NAME(KEY=VALUE, ...)` that begins here, with values as in JSON; None if there is none."""
    opening = _CALL_START.match(text, start)
    if opening is None:
        return None
    arguments: dict[str, object] = {}
    at = opening.end()
    if text[at : at + 1] == ")":
        return opening[1], arguments, at + 1
    while key_match := _KEYWORD.match(text, at):
        try:
            arguments[key_match[1]], at = decode(text, key_match.end())
        except ValueError:
            return None
        following = _SEPARATOR.match(text, at)
        if following is None:
            return None
        at = following.end()
        if following[1] != ",":
            return opening[1], arguments, at
    return None
