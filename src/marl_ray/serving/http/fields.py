"""Fields that requests of several paths share."""

import math
from collections.abc import Mapping

from marl_ray.config.serving.population import MAX_ATTRIBUTE_LENGTH, MAX_ATTRIBUTE_NAME, MAX_ATTRIBUTES
from marl_ray.experiments.assignment.population import Attributes
from marl_ray.json_types import JsonMapping
from marl_ray.serving.http.messages import Request, RequestError

MAX_SESSION_LENGTH = 256
"""Maximum number of characters of a session's or a cluster's id, which the database keeps for each unit."""


def session_id(value: object, request: Request) -> str:
    """Return the session id, from the body or else from the header `x-session-id`. Raises RequestError 400."""
    session = request.header(b"x-session-id") if value is None else value
    if not is_identifier(session):
        raise RequestError(
            400,
            "session_id",
            f"expected 1 to {MAX_SESSION_LENGTH} printable characters, here or in the header x-session-id",
        )
    return str(session)


def cluster_of(data: JsonMapping) -> str | None:
    """Return the request's `cluster_id`; None if it names none. Raises RequestError 400."""
    cluster_id = data.get("cluster_id")
    if cluster_id is not None and not is_identifier(cluster_id):
        raise RequestError(400, "cluster_id", f"expected 1 to {MAX_SESSION_LENGTH} printable characters")
    return cluster_id


def attributes_of(data: Mapping[str, object]) -> Attributes:
    """Return the attributes of the request's unit, by name; empty if the request has none. Raises RequestError 400."""
    attributes = data.get("attributes")
    if attributes is None:
        return {}
    if not isinstance(attributes, dict) or len(attributes) > MAX_ATTRIBUTES:
        raise RequestError(400, "attributes", f"expected an object of {MAX_ATTRIBUTES} names at most")
    for name, value in attributes.items():
        if not is_identifier(name, MAX_ATTRIBUTE_NAME):
            raise RequestError(
                400,
                "attributes",
                f"expected names of 1 to {MAX_ATTRIBUTE_NAME} printable characters, got {name[:50]!r}",
            )
        if not (isinstance(value, int | float) and math.isfinite(value)) and not is_identifier(
            value, MAX_ATTRIBUTE_LENGTH
        ):
            raise RequestError(
                400,
                f"attributes.{name}",
                f"expected a boolean, a number, or a text of 1 to {MAX_ATTRIBUTE_LENGTH} printable characters",
            )
    return attributes


def is_identifier(value: object, length: int = MAX_SESSION_LENGTH) -> bool:
    """Return True if the value is 1 to `length` printable characters, which NUL and lone surrogates are not."""
    return isinstance(value, str) and 0 < len(value) <= length and value.isprintable()


def boolean_field(data: Mapping[str, object], name: str) -> bool:
    """Return a field that is true or false; false where it is missing or null. Raises RequestError 400."""
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(400, name, "expected true or false")
    return bool(value)
