"""WebArena-Verified's stricter evaluator of answers, which are JSON objects.

Source: https://github.com/ServiceNow/webarena-verified, core/evaluation, at 6473f72db5dc. Values are compared as strings,
numbers, booleans or amounts of money; tasks with another format (dates, durations, addresses, ...) are refused by
`unread_formats`. Letters outside of ASCII lose their accents and are left out otherwise, where the original transliterates.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from marl_ray.envs.web.webarena.tasks.schema import ResponseCheck, is_pattern
from marl_ray.json_types import JsonMapping, JsonValue

MONEY_TOLERANCE = Decimal("0.1")
"""Difference up to which amounts of money are the same, in their own currency, as in the original."""
RETRIEVE_TYPE = "retrieve"
_BLOCK = re.compile(r"```(?:json)?\s*\n?(.*?)\n?```", re.DOTALL)
_HYPHEN = re.compile(r"(?<=[a-zA-Z])[\u002D\u2010-\u2015\u2212\u00AD]|[\u002D\u2010-\u2015\u2212\u00AD](?=[a-zA-Z])")
_MARKS = dict.fromkeys(map(ord, "\u2122\u00ae\u2120\u00a9"))
_QUOTES = "'\"`.,;:!?"
_AMOUNT = re.compile(r"\d[\d.,]*")
_TRUE, _FALSE = {"true", "yes", "y", "1", "t", "on"}, {"false", "no", "n", "0", "f", "off"}


def response_score(check: ResponseCheck, answer: str) -> float:
    """Return 1.0 if the answer is a JSON object with the expected task type, status and data, else 0.0.

    The object may stand in a block of ```.
    """
    response = _parse_answer(answer)
    if not isinstance(response, dict):
        return 0.0
    kind = response.get("task_type", response.get("performed_operation"))
    status = response.get("status")
    if not (isinstance(kind, str) and isinstance(status, str)):
        return 0.0
    if not (same_string(check.task_type, kind) and same_string(check.status, status)):
        return 0.0
    if check.task_type != RETRIEVE_TYPE:
        return 1.0
    retrieved = response.get("retrieved_data")
    if _is_empty(check.data) or _is_empty(retrieved):
        return float(_is_empty(check.data) and _is_empty(retrieved))
    return float(_same_list(check.data, _parse_list(retrieved), check.schema, check.ordered))


def unread_formats(schema: JsonMapping) -> list[str]:
    """Return the formats in a check's schema that `response_score` does not compare."""
    kind = schema.get("type", "array" if "items" in schema else "string")
    if kind == "array":
        return unread_formats(schema.get("items", {}))
    if kind == "object":
        return [name for part in schema.get("properties", {}).values() for name in unread_formats(part)]
    name = schema.get("format", kind)
    return [] if name in _COMPARISONS or name == "null" else [name]


def same_string(expected: JsonValue, answer: JsonValue) -> bool:
    """Return True if two texts are equal as WebArena-Verified compares them.

    Case, accents, spaces, hyphens in words and punctuation around them do not count. An expected text from ^ to $ is
    a regular expression.
    """
    if is_pattern(expected):
        return re.fullmatch(expected, _plain_text(answer), re.IGNORECASE) is not None
    expected_text, text = _plain_text(expected), _plain_text(answer)
    return expected_text == text or expected_text.strip(_QUOTES) == text.strip(_QUOTES)


def _same_number(expected: JsonValue, answer: JsonValue) -> bool:
    return _read_number(expected) == _read_number(answer)


def _same_boolean(expected: JsonValue, answer: JsonValue) -> bool:
    return _read_boolean(expected) is _read_boolean(answer)


def _same_amount(expected: JsonValue, answer: JsonValue) -> bool:
    return abs(_read_amount(expected) - _read_amount(answer)) <= MONEY_TOLERANCE


_COMPARISONS: Mapping[str, Callable[[JsonValue, JsonValue], bool]] = {
    "string": same_string,
    "number": _same_number,
    "integer": _same_number,
    "boolean": _same_boolean,
    "currency": _same_amount,
}


def _is_same(expected: JsonValue, answer: JsonValue, schema: JsonMapping, ordered: bool) -> bool:
    """Compare a value by its schema. A list that is expected where the schema has none holds alternatives."""
    kind = schema.get("type", "string")
    if kind == "array":
        return _same_list(expected, _parse_list(answer), schema, ordered)
    if kind == "object":
        return _same_object(expected, answer, schema, ordered)
    compare = _COMPARISONS[schema.get("format", kind)]
    alternatives = expected if isinstance(expected, list) else [expected]
    return any(_matches(compare, alternative, answer) for alternative in alternatives)


def _same_list(expected: Sequence[JsonValue], answers: Sequence[JsonValue], schema: JsonMapping, ordered: bool) -> bool:
    """Compare lists, by place if `ordered`; else each expected value takes the first answer that is the same."""
    items, unmatched = schema.get("items", {}), list(answers)
    if len(expected) != len(unmatched):
        return False
    if ordered:
        return all(_is_same(value, other, items, ordered) for value, other in zip(expected, unmatched, strict=True))
    for value in expected:
        match = next((k for k, other in enumerate(unmatched) if _is_same(value, other, items, ordered)), None)
        if match is None:
            return False
        del unmatched[match]
    return True


def _same_object(expected: JsonValue, answer: JsonValue, schema: JsonMapping, ordered: bool) -> bool:
    """Compare the properties that the schema names.

    One that neither has is the same, and further ones do not count.
    """
    answer = _parse_json(answer, dict)
    if not isinstance(answer, dict):
        return False
    for name, part in schema.get("properties", {}).items():
        if (name in expected) != (name in answer):
            return False
        if name in expected and not _is_same(expected[name], answer[name], part, ordered):
            return False
    return True


def _matches(compare: Callable[[JsonValue, JsonValue], bool], expected: JsonValue, answer: JsonValue) -> bool:
    try:
        return compare(expected, answer)
    except (ValueError, TypeError, ArithmeticError):
        return False


def _parse_answer(answer: str) -> JsonValue:
    block = _BLOCK.search(answer)
    try:
        return json.loads(block[1] if block else answer)
    except (ValueError, RecursionError):
        return None


def _parse_list(value: JsonValue) -> list[Any]:
    value = _parse_json(value, list)
    return value if isinstance(value, list) else [value]


def _parse_json(value: JsonValue, kind: type) -> JsonValue:
    """Return a value, or what it says as JSON where that is of this kind."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return inner if isinstance(inner, kind) else value
    return value


def _is_empty(value: JsonValue) -> bool:
    return not value and not isinstance(value, int | float)


def _plain_text(value: JsonValue) -> str:
    text = unicodedata.normalize("NFKC", str(value).translate(_MARKS))
    text = unicodedata.normalize("NFKD", _HYPHEN.sub(" ", text))
    return " ".join(text.encode("ascii", "ignore").decode().casefold().split())


def _read_number(value: JsonValue) -> float:
    """Return the number. Raises ValueError for what is none."""
    return float(value if isinstance(value, int | float) else _plain_text(value).replace(",", "").replace(" ", ""))


def _read_boolean(value: JsonValue) -> bool:
    if isinstance(value, int | float):
        return bool(value)
    text = _plain_text(value)
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return text in _TRUE


def _read_amount(value: JsonValue) -> Decimal:
    """Return the amount of money, with the last of point and comma as the mark of decimals.

    Raises ValueError for what is none.
    """
    text = str(value)
    match = _AMOUNT.search(text)
    if match is None:
        raise ValueError(f"{text!r} is no amount")
    digits = match[0].rstrip(".,")
    mark = "." if digits.rfind(".") > digits.rfind(",") else ","
    if mark == "," and re.search(r",\d{3}$", digits):
        mark = "."  # a comma before three digits parts thousands
    other = "," if mark == "." else "."
    amount = Decimal(digits.replace(other, "").replace(mark, "."))
    return -amount if text.strip().startswith("-") else amount
