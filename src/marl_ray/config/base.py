"""The base model of every config: unknown keys are refused, values are immutable."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Strict, frozen model; the docstring under a field is its documentation in the JSON schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
