"""The base model of every config: unknown keys are refused, values are immutable."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import ErrorDetails


class Config(BaseModel):
    """Strict, frozen model; the docstring under a field is its documentation in the JSON schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    def resolved(self) -> dict[str, Any]:
        """Plain data with every default written out."""
        return self.model_dump(mode="json")


def words(error: ErrorDetails) -> str:
    """The message of one of pydantic's errors, without the words that pydantic puts before a validator's own."""
    return str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
