"""Curves of experiments, kept for some seconds, because all outcomes are read for them."""

import math
import time
from collections.abc import Callable

CurveRows = dict[str, list[list[float | None]]]
"""Arm -> its rows of outcomes over time, as `report.curves` returns them."""

CURVES_S, CURVES_FACTOR = 5.0, 20.0
"""Curves expire after the first number of seconds, or after the second number times the time that reading them took,
whichever is later."""


class CurveCache:
    """Curves of experiments, which pages and clients that reload share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._curves: dict[str, tuple[float, CurveRows]] = {}
        """Experiment -> (time at which its curves expire, the curves)."""

    def read(self, experiment: str, make: Callable[[], CurveRows]) -> CurveRows:
        """Return the curves of an experiment: those that have not expired, or else what `make` returns.

        Raises whatever `make` raises; threads may call it at the same time.
        """
        began = self._clock()
        until, curves = self._curves.get(experiment, (-math.inf, {}))
        if began > until:
            curves = make()
            now = self._clock()
            self._curves[experiment] = now + max(CURVES_S, CURVES_FACTOR * (now - began)), curves
        return curves
