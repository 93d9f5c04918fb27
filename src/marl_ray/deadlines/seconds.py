"""The range of the seconds that a user sets as a limit."""

from numbers import Real

DAY_S = 86_400
"""Seconds of a day, our own choice: nothing that has such a limit is meant to take a day, and every timer takes a day."""
EXPECTED_SECONDS = f"seconds, more than 0 and less than a day ({DAY_S:,})"
"""The range in words, for errors."""


def are_seconds(value: object) -> bool:
    """Return True for a number within the range; False for everything else, such as a bool, NaN or a text."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value < DAY_S and not value <= 0)


def check_seconds(name: str, value: object) -> None:
    """Raise ValueError naming the option if its value is no number within the range."""
    if not are_seconds(value):
        raise ValueError(f"{name}={value!r}, expected {EXPECTED_SECONDS}")
