"""A parser for JSON as language models write it.

It also reads single quotes, trailing commas, line breaks in texts, True and None. Time is linear in the text, whatever
it is; nothing is evaluated.
"""

import json
import re
from typing import Any

MAX_DEPTH = 100
"""Maximum number of lists and objects in each other: no call needs more, and Python's stack ends at about a thousand."""
_DECODER = json.JSONDecoder(strict=False)  # programs are often written with real line breaks
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r""""((?:[^"\\]|\\.)*+)"|'((?:[^'\\]|\\.)*+)'""", re.DOTALL)
_ATOM = re.compile(r"-?\d{1,400}(?:\.\d{1,400})?(?:[eE][-+]?\d{1,3})?(?![\w.])|[A-Za-z]{1,9}(?!\w)")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_WORD_VALUES = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def decode(text: str, start: int = 0) -> tuple[object, int]:
    """Return the first value from `start` on, and the place of its end.

    Raises ValueError with a short reason if there is none.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as strict_error:
        try:
            value, end = _read_value(text, start, 0)
        except (ValueError, IndexError):
            why = (
                strict_error.msg
                if isinstance(strict_error, json.JSONDecodeError)
                else "too deep, too large or not Unicode"
            )
            raise ValueError(why) from None
    try:
        json.dumps(value, ensure_ascii=False).encode()  # an escape may hide half a character
    except (ValueError, RecursionError):
        raise ValueError("too deep, too large or not Unicode") from None
    return value, end


def _read_value(text: str, at: int, depth: int) -> tuple[object, int]:
    """Return the value from `at` on, and the place of its end. Raises ValueError or IndexError if there is none."""
    if depth > MAX_DEPTH:
        raise ValueError
    at = _skip_blanks(text, at)
    if text[at] in "[{":
        return _read_items(text, at, depth)
    if text[at] in "\"'":
        return _read_string(text, at)
    atom = _ATOM.match(text, at)
    if atom is None:
        raise ValueError
    word = atom[0]
    if word[0].isalpha():
        if word not in _WORD_VALUES:
            raise ValueError
        return _WORD_VALUES[word], atom.end()
    return json.loads(word), atom.end()


def _read_items(text: str, at: int, depth: int) -> tuple[object, int]:
    """Parse a list or an object; every item may be followed by a comma, the last one too."""
    closing = "]" if text[at] == "[" else "}"
    items: list[Any] = []
    at = _skip_blanks(text, at + 1)
    while text[at] != closing:
        if closing == "}":
            key, at = _read_string(text, at)
            at = _skip_blanks(text, at)
            if text[at] != ":":
                raise ValueError
            value, at = _read_value(text, at + 1, depth + 1)
            items.append((key, value))
        else:
            value, at = _read_value(text, at, depth + 1)
            items.append(value)
        at = _skip_blanks(text, at)
        if text[at] == ",":
            at = _skip_blanks(text, at + 1)
        elif text[at] != closing:
            raise ValueError
    return (items if closing == "]" else dict(items)), at + 1


def _read_string(text: str, at: int) -> tuple[str, int]:
    match = _STRING.match(text, at)
    if match is None:
        raise ValueError
    inside = match[1] if match[1] is not None else match[2]
    plain = _ESCAPE.sub(
        lambda escape: chr(int(escape[1], 16)) if escape[1] else _ESCAPED_CHARACTERS.get(escape[2], escape[2]), inside
    )
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass"), match.end()


def _skip_blanks(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
