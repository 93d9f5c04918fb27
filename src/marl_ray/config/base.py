"""The base model of every config, which refuses unknown keys and changes, and the words of its errors."""

import os
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from marl_ray.errors import MarlRayError, suggestion
from marl_ray.extensions import ExtensionPoint
from marl_ray.json_types import JsonObject

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
"""The names that runs, sweeps, experiments and endpoints may have."""
# The patterns below are those of PATTERNS, which says each of them in words.
HTTP_URL = r"^https?://[^\s]+$"
HTTP_BASE_URL = r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"
ORIGIN = r"^(\*|https?://[^/*\s]+)$"
MEMORY_OR_REDIS = r"^(memory:$|rediss?://)"
KUBERNETES_NAME = r"^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"
IMAGE = r"^[A-Za-z0-9][-._:/@A-Za-z0-9]*$"
VERSION = r"^[0-9]+\.[0-9]+\.[0-9]+[.a-z0-9]*$"
QUANTITY = r"^(0*[1-9][0-9]*(\.[0-9]+)?|0+\.[0-9]*[1-9][0-9]*)(Ki|Mi|Gi|Ti|K|M|G|T)?$"
VARIABLE = r"^[-._A-Za-z][-._A-Za-z0-9]*$"
NOT_EMPTY = r"\S"
REDIS = r"^(rediss?://)?[-.\[\]:A-Za-z0-9]+$"
PATTERNS = {
    NAME_PATTERN: "expected letters, digits, _, . and -, a letter or digit first, at most 100 characters",
    HTTP_URL: "expected an address that begins with http:// or https://",
    HTTP_BASE_URL: "expected an address such as http://host:8000/v1, without user and query",
    ORIGIN: "expected * or an origin such as https://shop.example",
    MEMORY_OR_REDIS: "expected memory: or an address that begins with redis:// or rediss://",
    KUBERNETES_NAME: "expected lower-case letters, digits and -, a letter first, at most 47 characters",
    IMAGE: "expected the name of an image, such as registry.example/marl-ray:1.0",
    VERSION: "expected a version, such as 2.60.0",
    QUANTITY: "expected an amount above 0, such as 500M or 8Gi",
    VARIABLE: "expected the name of an environment variable",
    NOT_EMPTY: "expected a text that is not empty",
    REDIS: "expected an address such as redis://host:6379, without a password",
}
"""Pattern of a text -> what it says, in words."""
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


StorageField = Annotated[str, Field(pattern=NOT_EMPTY), AfterValidator(os.path.expanduser)]
"""A folder or a URI under which folders are made. A shell replaces a `~` only where a word begins with it, so configs do."""


class Config(BaseModel):
    """Strict, frozen model; the docstring under a field is its documentation in the JSON schema."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def resolve(self) -> JsonObject:
        """Return plain data with every default written out."""
        return self.model_dump(mode="json")


def message_of(error: ErrorDetails) -> str:
    """Return the message of one of pydantic's errors in the words of this product, or in those of a validator."""
    details = error.get("ctx", {})
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
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    return suggestion(error["input"], re.findall(r"'([^']*)'", error["ctx"]["expected"]))


def _whole_number(value: Any) -> Any:
    """Return a bound as people write it, 1 for 1.0; other values stay as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def first_mistake(error: ValidationError) -> str:
    """Return the first mistake that pydantic has found, as `FIELD: MESSAGE`.

    The field is a path with dots; it is left out where the mistake is of the value as a whole.
    """
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {message_of(first)}" if field else message_of(first)


def name_validator(point: ExtensionPoint) -> Callable[[str], str]:
    """Return a validator of names of extensions.

    The validator takes the name of a built-in, or one whose object can be imported.
    """

    def validate(name: str) -> str:
        try:
            if name not in point.builtins:  # built-ins are there, and what they import is large
                point.load(name)
        except MarlRayError as error:
            raise ValueError(str(error)) from error
        return name

    return validate
