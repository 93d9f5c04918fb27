"""Functions that the tables of several benchmarks share."""

import statistics
from collections.abc import Sequence


def median_range(values: Sequence[float], digits: int = 0) -> str:
    """Return `median (least-most)`."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"
