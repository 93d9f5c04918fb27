"""The base model of every config, which refuses unknown keys and changes, and the types of its fields."""

import os
from collections.abc import Callable
from typing import Annotated, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import PydanticKnownError, core_schema

from marl_ray.errors import MarlRayError
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


StorageField = Annotated[str, Field(pattern=NOT_EMPTY), AfterValidator(os.path.expanduser)]
"""A folder or a URI under which folders are made. A shell replaces a `~` only where a word begins with it, so configs do."""


def _check_whole_number(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


def _check_number(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


_CHECK_BY_TYPE = {"int": _check_whole_number, "float": _check_number}
_DATA_KEYS = ("default", "expected", "metadata")
"""Keys of a schema whose values are data, not schemas."""


def _refuse_bools(schema: object) -> object:
    """Return a schema of pydantic, or a part of one, in which no number takes a bool.

    Without this pydantic reads true as 1, and YAML reads `yes` and `on` as true.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(map(_refuse_bools, schema))
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "function-before" and schema["function"]["function"] in _CHECK_BY_TYPE.values():
        return schema  # a number of a config within this one
    kind = schema.get("type")
    if kind == "literal" and all(type(choice) is int for choice in schema["expected"]):
        kind = "int"
    if check := _CHECK_BY_TYPE.get(str(kind)):
        return core_schema.no_info_before_validator_function(check, cast("core_schema.CoreSchema", schema))
    return {key: value if key in _DATA_KEYS else _refuse_bools(value) for key, value in schema.items()}


class Config(BaseModel):
    """Strict, frozen model; the docstring under a field is its documentation in the JSON schema."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Return the schema by which pydantic validates the config. No number in it takes a bool."""
        return cast("core_schema.CoreSchema", _refuse_bools(handler(source)))

    def resolve(self) -> JsonObject:
        """Return plain data with every default written out."""
        return self.model_dump(mode="json")


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
