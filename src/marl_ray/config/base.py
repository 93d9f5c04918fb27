"""The base model of every config: unknown keys are refused, values are immutable."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from marl_ray.errors import MarlRayError
from marl_ray.extensions import ExtensionPoint

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
"""The names that runs, sweeps, experiments and endpoints may have."""


class Config(BaseModel):
    """Strict, frozen model; the docstring under a field is its documentation in the JSON schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    def resolved(self) -> dict[str, Any]:
        """Return plain data with every default written out."""
        return self.model_dump(mode="json")


def words(error: ErrorDetails) -> str:
    """Return the message of one of pydantic's errors, without the words that pydantic puts before a validator's own."""
    return str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]


def first_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic has found, as `FIELD: MESSAGE`.

    The field is a path with dots; it is left out where the problem is of the value as a whole.
    """
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else str(first["msg"])


def known(point: ExtensionPoint) -> Callable[[str], str]:
    """Return a validator of names of extensions.

    It takes the name of a built-in, or one whose object can be imported.
    """

    def validate(name: str) -> str:
        try:
            if name not in point.builtins:  # built-ins are there, and what they import is large
                point.load(name)
        except MarlRayError as error:
            raise ValueError(str(error)) from error
        return name

    return validate
