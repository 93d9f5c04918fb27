"""The properties that a checker reports of a part, each a line `ok`, or `failed` with what differs."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from marl_ray.errors import MarlRayError, describe_error
from marl_ray.extensions import ExtensionPoint


class CheckedProperty(NamedTuple):
    """A property of a part, checked."""

    name: str
    text: str
    """The property in one sentence."""
    failure: str | None
    """The difference; None if the property holds."""

    def __str__(self) -> str:
        return f"{'ok' if self.failure is None else 'failed':<6}  {self.name}: {self.failure or self.text}"


def check_property(name: str, text: str, find_difference: Callable[[], str | None]) -> CheckedProperty:
    """Return the result of checking a property.

    `find_difference` returns what differs, or None. An error that it raises is a difference, too.
    """
    try:
        failure = find_difference()
    except Exception as error:  # whatever the user's code raises
        failure = describe_error(error)
    return CheckedProperty(name, text, failure)


def print_property(checked: CheckedProperty) -> CheckedProperty:
    """Print the line of a property at once, and return the property."""
    print(checked, flush=True)
    return checked


def load_part(point: ExtensionPoint, name: str) -> object:
    """Return the object that a name stands for. Raises MarlRayError that begins with the kind."""
    try:
        return point.load(name)
    except MarlRayError as error:
        raise MarlRayError(f"{point.kind}: {error}") from error


def refuse_unknown_settings(kind: str, settings: Mapping[str, object], *accepted: str) -> None:
    """Raise MarlRayError for a setting that the checker of this kind does not read."""
    for key in settings:
        if key not in accepted:
            expected = f"expected {' or '.join(accepted)}" if accepted else "expected none"
            raise MarlRayError(f"check {kind}: unknown setting {key!r}; {expected}")
