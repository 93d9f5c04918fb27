"""Checks of the weights, prices and tolerances that a user sets."""

import math
from numbers import Real
from typing import TypeGuard


def check_finite(name: str, value: object) -> None:
    """Raise ValueError naming the option if its value is no finite number; a bool is none."""
    if not is_finite(value):
        raise ValueError(f"{name}={value!r}, expected a finite number")


def check_not_negative(name: str, value: object) -> None:
    """Raise ValueError naming the option if its value is no finite number of 0 or more; a bool is none."""
    if not (is_finite(value) and value >= 0):
        raise ValueError(f"{name}={value!r}, expected a finite number, 0 or more")


def is_finite(value: object) -> TypeGuard[float]:
    """Return True for a finite number that a float can hold; a bool is none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number above the largest float
        return False
