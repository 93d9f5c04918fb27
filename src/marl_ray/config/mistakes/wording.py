"""The one line that says what pydantic refused, in the words of this product."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from marl_ray.config.base import PATTERNS
from marl_ray.config.mistakes.places import path_in, unknown_key_hint
from marl_ray.errors import suggestion

ABOUT_KEYS = {
    "missing": "missing key",
    "extra_forbidden": "unknown key",
    "unexpected_keyword_argument": "unknown key",
}
"""Type of pydantic's errors that are about a key, not about its value -> what they say."""
EXPECTED: dict[str, tuple[str, ...]] = {
    "a mapping of keys": ("dict_type", "mapping_type", "model_type", "model_attributes_type"),
    "a list": ("tuple_type", "list_type", "set_type", "frozen_set_type"),
    "text": ("string_type",),
    "true or false": ("bool_type", "bool_parsing"),
    "a whole number": ("int_type", "int_parsing", "int_parsing_size", "int_from_float"),
    "a number": ("float_type", "float_parsing"),
    "a finite number": ("finite_number",),
    "no value": ("none_required",),
    "a number greater than {gt}": ("greater_than",),
    "a number of at least {ge}": ("greater_than_equal",),
    "a number less than {lt}": ("less_than",),
    "a number of at most {le}": ("less_than_equal",),
    "a multiple of {multiple_of}": ("multiple_of",),
    "a length of at least {min_length}": ("string_too_short", "too_short"),
    "a length of at most {max_length}": ("string_too_long", "too_long"),
    "a text that matches {pattern}": ("string_pattern_mismatch",),
    "{expected}": ("literal_error", "enum"),
    "the key {discriminator}": ("union_tag_not_found",),
    "{discriminator} to be one of {expected_tags}, not '{tag}'": ("union_tag_invalid",),
}
"""An expectation in the words of YAML -> types of pydantic's errors that have it; their details fill the braces."""
MAX_INPUT_LENGTH = 60
"""Maximum number of characters of a value that an error shows, so that it fits in one line of a terminal."""


def message_of(error: ErrorDetails) -> str:
    """Return the message of one of pydantic's errors in the words of this product, or in those of a validator."""
    details = error.get("ctx", {})
    if error["type"] in ABOUT_KEYS:
        return ABOUT_KEYS[error["type"]]
    if error["type"] == "json_invalid":
        return f"not JSON: {details['error']}"
    if error["type"] in ("value_error", "assertion_error"):
        return str(details["error"])
    if details.get("pattern") in PATTERNS:
        return PATTERNS[details["pattern"]]
    for text, types in EXPECTED.items():
        if error["type"] in types:
            return "expected " + text.format(**{key: _whole_number(value) for key, value in details.items()})
    return re.sub(r"^\w+ should (be|have) ", "expected ", error["msg"])


def choice_hint(error: ErrorDetails) -> str:
    """Return '; did you mean ...?' for a text that is close to one of the possible ones; empty for other errors."""
    if error["type"] != "literal_error" or not isinstance(error.get("input"), str):
        return ""
    return suggestion(error["input"], re.findall(r"'([^']*)'", error["ctx"]["expected"]))


def _whole_number(value: Any) -> Any:
    """Return a bound as people write it, 1 for 1.0; other values, and 1e+100, stay as they are."""
    is_short = isinstance(value, float) and value.is_integer() and abs(value) < 1e16  # a float writes no more digits
    return int(value) if is_short else value


def explain(error: ErrorDetails, key: str) -> str:
    """Return one of pydantic's errors as `KEY: MESSAGE, got VALUE`, or as `missing key 'KEY'` and `unknown key 'KEY'`.

    The key is left out if it is empty, and the value if it is a mapping, too long, in the message, or not in the error.
    """
    message = message_of(error)
    if error["type"] in ABOUT_KEYS:
        return f"{message} {key!r}"
    value = error.get("input", {})
    shown_value = "nothing" if value is None else repr(value)
    is_named = error["type"] == "json_invalid" or (error["type"] == "value_error" and str(value) in message)
    hides_value = len(shown_value) > MAX_INPUT_LENGTH or isinstance(value, Mapping) or is_named
    suffix = "" if hides_value else f", got {shown_value}"
    return f"{f'{key}: ' if key else ''}{message}{suffix}{choice_hint(error)}"


def first_mistake(
    error: ValidationError, data: object = None, model: type[BaseModel] | None = None, *, shows_values: bool = True
) -> str:
    """Return the first mistake that pydantic found, as of `explain`, and the number of the others.

    `data` is what was validated: without it the key may contain names of types. An unknown key gets a hint if the
    `model` is given. `shows_values` is false for data that may hold secrets.
    """
    mistakes = error.errors(include_url=False, include_input=shows_values)
    # An unknown key comes first: where it is a misspelt one, the right one is missing, too.
    first = next((mistake for mistake in mistakes if mistake["type"] == "extra_forbidden"), mistakes[0])
    path = _path_of(first, data)
    key = ".".join(path)
    other_keys = [
        ".".join(_path_of(mistake, data))
        for mistake in mistakes
        if mistake is not first and not _is_consequence(mistake, mistakes)
    ]
    count = f" (and {len(other_keys)} more)" if other_keys else ""
    if len(other_keys) == 1 and other_keys != [key]:
        count = f" (and 1 more: {other_keys[0]})"
    hint = ""
    if first["type"] == "extra_forbidden" and model is not None:
        hint = unknown_key_hint(model, first["loc"], "".join(f"{step}." for step in path[:-1]))
    return f"{explain(first, key)}{hint}{count}"


def _path_of(error: ErrorDetails, data: object) -> list[str]:
    """Return the keys that lead to the place of one of pydantic's errors; none if it is about the data as a whole."""
    return list(map(str, error["loc"]) if data is None else path_in(data, error))


def _is_consequence(error: ErrorDetails, errors: Sequence[ErrorDetails]) -> bool:
    """Return True if a list is too short because an entry of it is wrong."""
    place = error["loc"]
    return error["type"] == "too_short" and any(
        other is not error and other["loc"][: len(place)] == place for other in errors
    )
