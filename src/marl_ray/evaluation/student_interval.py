"""Student's interval of a mean."""

import math
from collections.abc import Sequence


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of Student's 95 % interval of the mean of two or more independent values."""
    from scipy.special import stdtrit  # scipy is imported here, because every process of a run imports this file

    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half_width = float(stdtrit(len(values) - 1, 0.975)) * deviation / math.sqrt(len(values))
    return mean - half_width, mean + half_width
