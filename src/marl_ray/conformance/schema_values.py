"""Values that fit a JSON schema as pydantic writes it for type hints.

A schema's own `examples` come first. What a schema does not tell, such as the bounds of a date, only they can.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from marl_ray.json_types import JsonMapping, JsonObject

TEXTS = ("a", "", "K\u00f6ln 7\n{x}", "7", "A")
"""A letter, nothing, several lines with what `str.format` would read, a digit and a capital."""
ANY_TEXT_FORMATS = ("binary", "password", "path")
"""Formats of which every text is one."""
FORMATS: dict[str, tuple[str, ...]] = {
    "date": ("2024-02-29", "1999-12-31", "2030-01-01"),
    "date-time": ("2024-02-29T12:00:00Z", "1999-12-31T23:59:59Z", "2030-01-01T00:00:00Z"),
    "time": ("12:00:00Z", "23:59:59Z", "00:00:00Z"),
    "duration": ("P1D", "PT0S", "PT90M"),
    "uuid": ("8c5f1f0a-3b2e-4c1d-9a7b-0f6e5d4c3b2a", "0e37df36-f698-41e6-99d5-0ca22b6a1c0f"),
    "uuid4": ("8c5f1f0a-3b2e-4c1d-9a7b-0f6e5d4c3b2a", "0e37df36-f698-41e6-99d5-0ca22b6a1c0f"),
    "uri": ("https://example.com/a", "https://example.com/"),
    "email": ("a@example.com", "b.c@example.org"),
    "base64": ("YQ==", "", "S8O2bG4="),
    "base64url": ("YQ==", "", "S8O2bG4="),
    "ipv4": ("192.0.2.1", "198.51.100.7"),
    "ipv4network": ("192.0.2.0/24", "198.51.100.7/32"),
    "ipv6": ("2001:db8::1", "2001:db8::7"),
    "json-string": ("1", "[]", '{"a": 1}'),
}
"""Format of a JSON schema -> some texts of it."""


class NoFittingValueError(Exception):
    """No value is known that fits a schema; the text names the pattern or the format that none does."""


def fitting_object(schema: JsonMapping, variant: int, definitions: JsonMapping | None = None) -> JsonObject:
    """Return an object that fits an object's schema; variant 0 leaves out the properties that may be.

    `definitions` are those that `$ref` names, by default the schema's own. A property that may be left out is, if no value
    of it is known. Raises NoFittingValueError for one that may not.
    """
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    required, values = schema.get("required", ()), JsonObject()
    for name, property_schema in schema.get("properties", {}).items():
        if not variant and name not in required:
            continue
        try:
            values[name] = fitting_value(property_schema, definitions, variant)
        except NoFittingValueError as error:
            if name in required:
                raise NoFittingValueError(f"{name}: {error}") from error
    others = schema.get("additionalProperties")
    if isinstance(others, Mapping):
        for number in range(len(values), schema.get("minProperties", 0)):
            values[f"key{number}"] = fitting_value(others, definitions, variant + number)
    return values


def fitting_value(schema: JsonMapping, definitions: JsonMapping, variant: int) -> object:
    """Return a value that fits a schema. `variant` is 0 or more; neighbours give different values where there are several.

    Raises NoFittingValueError if none is known.
    """
    if "examples" in schema:
        return _choose(schema["examples"], variant)
    if "$ref" in schema:
        return fitting_value(definitions[schema["$ref"].rpartition("/")[2]], definitions, variant)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return _choose(schema["enum"], variant)
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        if any(branch.get("type") == "number" for branch in branches):  # perhaps Decimal, which few texts are
            branches = [branch for branch in branches if branch.get("type") != "string"]
        return fitting_value(_choose(branches, variant), definitions, variant)
    match schema.get("type"):
        case "string":
            return _fitting_text(schema, variant)
        case "integer" | "number" as kind:
            return _fitting_number(schema, variant, is_whole=kind == "integer")
        case "boolean":
            return variant % 2 == 1
        case "array":
            return _fitting_array(schema, definitions, variant)
        case "object":
            return fitting_object(schema, variant, definitions)
    return None


def _fitting_array(schema: JsonMapping, definitions: JsonMapping, variant: int) -> list[object]:
    """Return as many items as the variant's number modulo 3, or the nearest number that the schema allows."""
    count = min(max(schema.get("minItems", 0), variant % 3), schema.get("maxItems", math.inf))
    first = list(schema.get("prefixItems", ()))
    schemas = itertools.chain(first, itertools.repeat(schema.get("items", {})))
    return [
        fitting_value(item, definitions, variant + number)
        for number, item in enumerate(itertools.islice(schemas, int(count)))
    ]


def _fitting_text(schema: JsonMapping, variant: int) -> str:
    """Return a text of a schema's format, lengths and pattern. Raises NoFittingValueError if none is known."""
    text_format, pattern = schema.get("format"), schema.get("pattern")
    minimum, maximum = schema.get("minLength", 0), schema.get("maxLength")
    if text_format is None or text_format in ANY_TEXT_FORMATS:
        numbered = [f"{text}{variant}" for text in TEXTS]  # more texts, for a set of many
        known = [text[:maximum].ljust(minimum, text[:1] or "a") for text in (*TEXTS, *numbered)]
    else:
        known = [text for text in FORMATS.get(text_format, ()) if minimum <= len(text) <= (maximum or math.inf)]
    fitting = [text for text in known if pattern is None or re.search(pattern, text)]
    if not fitting:
        requirement = f"the format {text_format}" if pattern is None else f"the pattern {pattern!r}"
        raise NoFittingValueError(f"no text of {requirement} is known; name some by Field(examples=[...])")
    return fitting[min(variant, len(fitting) - 1)]


def _fitting_number(schema: JsonMapping, variant: int, *, is_whole: bool) -> float:
    """Return 1, 0, 7, 8 and so on where the schema's bounds and multiples allow them all, else others that they allow.

    Raises NoFittingValueError if there is none.
    """
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    low, high = max(schema.get("minimum", -math.inf), above), min(schema.get("maximum", math.inf), below)
    step = schema.get("multipleOf", 1 if is_whole else None)
    number: float
    if above < 0 and low <= 0 and high == math.inf:
        number = ((1, 0, 7)[variant] if variant < 3 else variant + 5) * (step or 1.0)
    elif step is not None:
        first = math.floor(low / step) + 1 if low == above > -math.inf else low / step
        last = math.ceil(high / step) - 1 if high == below < math.inf else high / step
        if math.isinf(last):
            number = step * (math.ceil(first) + variant)
        elif math.isinf(first):
            number = step * (math.floor(last) - variant)
        else:
            count = math.floor(last) - math.ceil(first) + 1
            number = step * (math.ceil(first) + variant % max(1, count))
    elif math.isinf(high):
        number = low + variant + 1.0
    elif math.isinf(low):
        number = high - variant - 1.0
    else:
        number = low + (high - low) * (variant + 1) / (variant + 2)
    if number < low or number > high or number in (above, below):
        raise NoFittingValueError(f"no number between {low:g} and {high:g} fits {dict(schema)}")
    return number


def _choose(values: Sequence[Any], variant: int) -> Any:
    """Return the value of a variant; the variants go round the values."""
    return values[variant % len(values)]
