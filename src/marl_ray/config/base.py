"""The base model of every config: unknown keys are refused, values are immutable."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import ErrorDetails

from marl_ray.errors import MarlRayError
from marl_ray.extensions import ExtensionPoint


class Config(BaseModel):
    """Strict, frozen model; the docstring under a field is its documentation in the JSON schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    def resolved(self) -> dict[str, Any]:
        """Plain data with every default written out."""
        return self.model_dump(mode="json")


def words(error: ErrorDetails) -> str:
    """The message of one of pydantic's errors, without the words that pydantic puts before a validator's own."""
    return str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]


def known(point: ExtensionPoint) -> Callable[[str], str]:
    """A validator of names of extensions: it takes the name of a built-in, or one whose object can be imported."""

    def validate(name: str) -> str:
        try:
            if name not in point.builtins:  # built-ins are there, and what they import is large
                point.load(name)
        except MarlRayError as error:
            raise ValueError(str(error)) from error
        return name

    return validate
