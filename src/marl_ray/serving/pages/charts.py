"""Geometry of the drawings on the page for people: numbers in, coordinates and labels out."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

from marl_ray.drawing import MINUS, Frame, Tick, band_path, line_path, multiples, round_step

LAST_TIME = 253_402_300_799
"""The last second of the year 9999."""
MAX_POINTS = 240
"""Maximum number of points drawn per line; more would not be visible."""
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
"""Seconds."""
_TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * k for k in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * k for k in (1, 2, 3, 6, 12)),
    *(_DAY * k for k in (1, 2, 7, 14, 30, 91, 182, 365)),
)
_ZERO_BELOW = 1e-90
"""Values below this have the axis of zeros, because their range could underflow."""
_UNSCALED_PART = 1 / 3
"""Bands are very wide at first, so the scale fits the values after this part of the time."""


@dataclass(frozen=True, slots=True)
class TimeLine:
    """One arm's curve as SVG path data."""

    arm: str
    path: str
    """The means."""
    band: str
    """The intervals around them."""
    end: tuple[float, float]
    """Coordinates of the last point."""


@dataclass(frozen=True, slots=True)
class TimeChart(Frame):
    """Curves over time."""

    times: tuple[Tick, ...]
    """Ticks of the axis of time."""
    values: tuple[Tick, ...]
    """Ticks of the axis of the outcome."""
    first_day: str
    """Date of the first time; empty if it has none."""
    lines: tuple[TimeLine, ...]
    """One line per arm."""


@dataclass(frozen=True, slots=True)
class ScaledInterval:
    """An interval as coordinates on a scale from 0 to 100."""

    low: float
    high: float
    middle: float
    """The estimate."""
    zero: float
    """No difference from the control."""
    margin: float
    """The accepted loss."""


@dataclass(frozen=True, slots=True)
class _Point:
    at: float
    """Seconds since 1970."""
    mean: float
    band: tuple[float, float] | None
    """The confidence sequence; None where it has no bounds yet."""


def round_to_step(value: float, step: float, sign: bool = False) -> str:
    """Return a number rounded to `step`, so that all numbers of a column or an axis have equally many decimals."""
    if max(abs(value), step) >= 1e7 or step < 1e-6:
        text = f"{value:{'+' if sign else ''}.4g}"
    else:
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        text = f"{value:{'+' if sign else ''},.{decimals}f}"
    return text.replace("-", MINUS)


def display_step(values: Iterable[float]) -> float:
    """Return the step that shows the largest of the values with four digits."""
    largest = max((abs(value) for value in values), default=0.0)
    return 10.0 ** (math.floor(math.log10(largest)) - 3) if largest > 0 else 0.001


def utc_moment(seconds: float | None) -> datetime | None:
    """Return the seconds since 1970 as a time in UTC; None if there is no such time."""
    if seconds is None or not 0 <= seconds <= LAST_TIME:
        return None
    return datetime.fromtimestamp(seconds, UTC)


def evidence_share(e_value: float, alpha: float) -> float:
    """Return the evidence on a scale from none (0) to proof (1).

    The scale is ln e / ln(1 / alpha), because evidence multiplies.
    """
    if not e_value > 1:
        return 0.0
    return min(1.0, math.log(e_value) / math.log(1 / alpha))


def scale_arm_intervals(
    intervals: Mapping[str, tuple[float, float, float]], margin: float
) -> dict[str, ScaledInterval]:
    """Return arm -> its (low, estimate, high) on the scale that holds all of them, zero and -margin."""
    marks = [0.0, -margin, *(value for interval in intervals.values() for value in interval)]
    low = min(marks)
    size = (max(marks) - min(marks)) or 1.0

    def on(value: float) -> float:
        return round(4 + 92 * (value - low) / size, 2)

    return {
        arm: ScaledInterval(on(a), on(b), on(middle), on(0.0), on(-margin)) for arm, (a, middle, b) in intervals.items()
    }


def draw_time_chart(
    curves: Mapping[str, Sequence[Sequence[float | None]]], width: float, height: float, character: float = 7.2
) -> TimeChart | None:
    """Return the chart of arm -> rows (seconds since 1970, n, mean, low or None, high or None).

    Returns None without any mean.

    `character` is the width of a label's character in units of the chart.
    """
    arms = {arm: points for arm, rows in curves.items() if (points := _points(rows))}
    if not arms:
        return None
    first, last = min(p[0].at for p in arms.values()), max(p[-1].at for p in arms.values())
    if first == last:
        first, last = first - _MINUTE, last + _MINUTE
    low, high = _value_range(arms.values(), first + _UNSCALED_PART * (last - first))
    step = round_step(high - low, int(height // 48))
    ticks = multiples(step, low, high)
    labels = [round_to_step(value, step) for value in ticks]
    left = 12 + character * max((len(label) for label in labels), default=0)
    right = width - 14
    top = 10.0
    bottom = height - 28

    def x(at: float) -> float:
        return round(left + (right - left) * (at - first) / (last - first), 1)

    def y(value: float) -> float:
        # Points outside are clipped, so their distance does not matter.
        inside = min(max((value - low) / (high - low), -5.0), 6.0)
        return round(bottom - (bottom - top) * inside, 1)

    def draw(arm: str, points: list[_Point]) -> TimeLine:
        line = line_path((x(p.at), y(p.mean)) for p in points)
        return TimeLine(arm, line, _bands(points, x, y), (x(points[-1].at), y(points[-1].mean)))

    begin = utc_moment(max(first, 0.0))
    return TimeChart(
        *(width, height, round(left, 1), right, top, bottom),
        times=tuple(Tick(x(at), label) for at, label in _time_ticks(first, last, (right - left) / (character * 9))),
        values=tuple(Tick(y(value), label) for value, label in zip(ticks, labels, strict=True)),
        first_day=f"{begin:%Y-%m-%d}" if begin else "",
        lines=tuple(draw(arm, points) for arm, points in arms.items()),
    )


def _points(rows: Sequence[Sequence[float | None]]) -> list[_Point]:
    """Return the rows that have a mean and a time, in the order of time, thinned to `MAX_POINTS`."""
    points = []
    for at, _, mean, low, high in rows:
        if at is not None and utc_moment(at) is not None and mean is not None and math.isfinite(mean):
            band = (low, high) if low is not None and high is not None and math.isfinite(high - low) else None
            points.append(_Point(at, mean, band))
    points.sort(key=lambda point: point.at)
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(k * (len(points) - 1) / (MAX_POINTS - 1))] for k in range(MAX_POINTS)]


def _value_range(arms: Iterable[list[_Point]], since: float) -> tuple[float, float]:
    shown_values: list[float] = []
    for points in arms:
        for point in [p for p in points if p.at >= since] or points[-1:]:
            shown_values += [point.mean, *(point.band or ())]
    low, high = min(shown_values), max(shown_values)
    largest = max(abs(low), abs(high))
    if largest < _ZERO_BELOW:
        pad = 1.0
    elif high - low < 1e-9 * largest:
        pad = 0.1 * largest
    else:
        pad = 0.06 * (high - low)
    return low - pad, high + pad


def _bands(points: list[_Point], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    paths = []
    for _, run in groupby(points, key=lambda point: point.band is None):
        edges = [(x(p.at), y(p.band[0]), y(p.band[1])) for p in run if p.band is not None]
        if edges:
            paths.append(band_path(edges))
    return "".join(paths)


def _time_ticks(first: float, last: float, max_ticks: float) -> list[tuple[float, str]]:
    """Return (seconds, label) of the ticks, on round times in UTC; midnights show the day."""
    year = _TIME_STEPS[-1]
    longer = year * max(1, math.ceil((last - first) / year / max_ticks))
    step = next((step for step in _TIME_STEPS if (last - first) / step <= max_ticks), longer)
    ticks = []
    for k in range(math.ceil(first / step), math.floor(last / step) + 1):
        at = datetime.fromtimestamp(k * step, UTC)
        if step >= 91 * _DAY:
            label = f"{at:%b %Y}"
        elif k * step % _DAY == 0:
            label = f"{at.day} {at:%b}"
        else:
            label = f"{at:%H:%M:%S}" if step < _MINUTE else f"{at:%H:%M}"
        ticks.append((float(k * step), label))
    return ticks
