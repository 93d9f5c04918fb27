"""Geometry of the charts in a sweep's report: numbers become coordinates and labels."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import trim_mean

from marl_ray.config.sweep import DimensionConfig
from marl_ray.drawing import MINUS, Frame, Tick, band_path, line_path, multiples, round_step
from marl_ray.evaluation.statistics import BootstrapInterval
from marl_ray.tuning.reporting.compare import Curve, interval_bands, thin_curve

MAX_POINTS = 200
"""Number of points drawn per curve; more would not be visible."""
COLOURED_CURVES = 6
"""Number of curves that have a colour and a band; the others are thin and grey."""
MAX_LABEL = 18
"""Characters of a label at an axis of parallel coordinates: more would reach the next axis, 120 units away at least."""
SHADES = 9
"""Number of shades for scores in parallel coordinates."""


@dataclass(frozen=True)
class CurveLine:
    """One trial's curve, in pixels of its figure: SVG paths of the line and of the band around it."""

    name: str
    path: str
    band: str
    style: str
    """CSS class: `c1` to `c6`, or `other`."""
    end: tuple[float, float]
    marks: tuple[tuple[float, float], ...]
    """Points at which the trial took over another trial's weights."""


@dataclass(frozen=True, slots=True)
class CurveChart(Frame):
    """Curves over environment steps."""

    steps: tuple[Tick, ...]
    values: tuple[Tick, ...]
    lines: tuple[CurveLine, ...]
    """Lines in drawing order: the last is drawn on top."""
    levels: tuple[Tick, ...] = ()
    """Straight lines across the chart: budgets."""


@dataclass(frozen=True)
class Axis:
    """One key of parallel coordinates."""

    at: float
    name: str
    ticks: tuple[Tick, ...]


@dataclass(frozen=True)
class Thread:
    """One trial in parallel coordinates."""

    name: str
    path: str
    style: str
    """CSS class: `s0` (worst) to `s8` (best), `best` or `none`."""


@dataclass(frozen=True)
class ParallelAxes:
    """A figure of parallel axes, in pixels: an axis per key and for the objective, a line per trial."""

    width: float
    height: float
    top: float
    bottom: float
    axes: tuple[Axis, ...]
    threads: tuple[Thread, ...]


def ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return the round values from low to high, at most `max_ticks` + 1 of them."""
    if not high > low:
        return [low]
    return multiples(round_step(high - low, max_ticks), low, high)


def format_number(value: float) -> str:
    """Return a number in four digits, or in thousands and millions where it is a large whole one."""
    shown = float(f"{value:.4g}")  # which decides the unit: 9999.6 is 10k
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(shown) >= 10 * size or (abs(value) >= size and value % (size / 10) == 0):
            return f"{value / size:.4g}{unit}".replace("-", MINUS)
    return f"{0.0 if abs(value) < 1e-12 else value:.4g}".replace("-", MINUS)


@dataclass(frozen=True)
class Stroke:
    """The parts of a curve that are drawn, each (points,)."""

    steps: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray
    style: str
    marks: tuple[tuple[float, float], ...]
    """(steps, value) of each point at which the trial took over another trial's weights."""


def strokes(curves: Mapping[str, tuple[Curve, Sequence[float]]], coloured: int = COLOURED_CURVES) -> dict[str, Stroke]:
    """Return name -> the parts of its curve to draw, the best curve first.

    `curves` are (curve, steps at which it took over another trial). The first `coloured` curves get a colour
    and a band.
    """
    drawn = {}
    for place, (name, (full_curve, takeovers)) in enumerate(curves.items()):
        curve = thin_curve(full_curve, MAX_POINTS)
        middle, low, high = interval_bands(curve) if place < coloured else (trim_mean(curve.seeds, 0.25, axis=0),) * 3
        marks = tuple((at, float(middle[max(0, int((curve.steps <= at).sum()) - 1)])) for at in takeovers)
        style = f"c{place + 1}" if place < coloured else "other"
        drawn[name] = Stroke(curve.steps, middle, low, high, style, marks)
    return drawn


def draw_curve_chart(
    curves: Mapping[str, Stroke], width: float, height: float, levels: Sequence[float] = ()
) -> CurveChart | None:
    """Return the chart of curves, the best first.

    Returns None if there are no curves. `levels` are values to draw across.
    """
    if not curves:
        return None
    low, high = pad_range(
        min(*(float(c.low.min()) for c in curves.values()), *levels, math.inf),
        max(*(float(c.high.max()) for c in curves.values()), *levels, -math.inf),
    )
    first, last = 0.0, max(float(curve.steps[-1]) for curve in curves.values())
    values = ticks(low, high, int(height // 56))
    labels = [format_number(value) for value in values]
    left_edge = 14 + 7.4 * max((len(label) for label in labels), default=0)
    right, top, bottom = width - 16, 10.0, height - 44

    def x(steps: float) -> float:
        return round(left_edge + (right - left_edge) * (steps - first) / ((last - first) or 1.0), 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - top) * (value - low) / (high - low), 1)

    def line(name: str, curve: Stroke) -> CurveLine:
        bounds = zip(curve.steps, curve.low, curve.high, strict=True)
        edges = [(x(at), y(lower), y(upper)) for at, lower, upper in bounds]
        return CurveLine(
            name,
            line_path((x(at), y(value)) for at, value in zip(curve.steps, curve.middle, strict=True)),
            band_path(edges) if (curve.high > curve.low).any() else "",
            curve.style,
            (x(curve.steps[-1]), y(curve.middle[-1])),
            tuple((x(at), y(value)) for at, value in curve.marks),
        )

    return CurveChart(
        *(width, height, round(left_edge, 1), right, top, bottom),
        steps=tuple(Tick(x(at), format_number(at)) for at in ticks(first, last, int((right - left_edge) // 90))),
        values=tuple(Tick(y(value), label) for value, label in zip(values, labels, strict=True)),
        lines=tuple(line(name, curve) for name, curve in reversed(list(curves.items()))),
        levels=tuple(Tick(y(level), format_number(level)) for level in levels),
    )


def pad_range(low: float, high: float) -> tuple[float, float]:
    """Return a range extended at both ends."""
    room = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def scale_trial_intervals(intervals: Mapping[int, BootstrapInterval]) -> dict[int, BootstrapInterval]:
    """Return the intervals of trials by their numbers, on one scale from 4 to 96."""
    if not intervals:
        return {}
    low, high = min(i.low for i in intervals.values()), max(i.high for i in intervals.values())

    def on(value: float) -> float:
        return round(4 + 92 * (value - low) / (high - low), 2) if high > low else 50.0

    return {trial: BootstrapInterval(*map(on, interval)) for trial, interval in intervals.items()}


def draw_parallel_axes(
    space: Mapping[str, DimensionConfig],
    trials: Sequence[tuple[str, Mapping[str, object], float | None]],
    metric: str,
    mode: str,
    best: str | None,
    height: float = 360,
) -> ParallelAxes | None:
    """Draw trials as lines through one axis for each key and a last one for the metric, whose better end is up.

    Returns None if there are no trials. `trials` are (name, values, result or None). A key that a trial does not have
    is at the foot of its axis, and so is the missing result of a failed trial.
    """
    results = [result for _, _, result in trials if result is not None]
    if not trials:
        return None
    spacing = max(120.0, min(300.0, 1020.0 / len(space)))
    left_edge, top, bottom = 70.0, 44.0, height - 40
    width = left_edge + spacing * len(space) + 90
    foot = bottom + 22
    places: list[Callable[[object], float]] = []
    axes: list[Axis] = []
    for k, (key, dimension) in enumerate(space.items()):
        place, marks = _scale(dimension, top, bottom)
        if any(key not in values for _, values, _ in trials):
            marks.append(Tick(foot, "not set"))
        places.append(place)
        axes.append(Axis(round(left_edge + k * spacing, 1), key, tuple(marks)))
    low, high = pad_range(min(results), max(results)) if results else (0.0, 1.0)
    up, down = (bottom, top) if mode == "max" else (top, bottom)

    def at_end(result: float | None) -> float:
        return foot if result is None else round(up + (down - up) * (result - low) / (high - low), 1)

    marks = [Tick(at_end(value), format_number(value)) for value in ticks(low, high, 5)] if results else []
    if len(results) < len(trials):
        marks.append(Tick(foot, "no result"))
    end = round(left_edge + spacing * len(space), 1)
    axes.append(Axis(end, metric, tuple(marks)))
    ranked = sorted(results, reverse=mode == "min")

    def style(name: str, result: float | None) -> str:
        if result is None or name == best:
            return "none" if result is None else "best"
        return f"s{round((SHADES - 1) * ranked.index(result) / max(1, len(ranked) - 1))}"

    def thread(name: str, values: Mapping[str, object], result: float | None) -> Thread:
        points = [
            (axis.at, place(values[key]) if key in values else foot)
            for axis, place, key in zip(axes, places, space, strict=False)
        ]
        points.append((end, at_end(result)))
        path = f"M{points[0][0]} {points[0][1]}"
        for (x0, y0), (x1, y1) in itertools.pairwise(points):  # horizontal where it meets an axis
            bend = round((x1 - x0) / 2.5, 1)
            path += f"C{x0 + bend:.1f} {y0} {x1 - bend:.1f} {y1} {x1} {y1}"
        return Thread(name, path, style(name, result))

    worst_first = sorted(
        trials, key=lambda t: (t[0] == best, t[2] is not None, ranked.index(t[2]) if t[2] in ranked else 0)
    )
    return ParallelAxes(width, height, top, bottom, tuple(axes), tuple(thread(*trial) for trial in worst_first))


def _scale(dimension: DimensionConfig, top: float, bottom: float) -> tuple[Callable[[object], float], list[Tick]]:
    """Return the function from a value to its height on the axis, and the axis's ticks."""
    listed = dimension.values
    if listed is not None:
        step = (bottom - top) / max(1, len(listed) - 1)
        heights = [bottom - step * k if len(listed) > 1 else (top + bottom) / 2 for k in range(len(listed))]
        labels = [format_number(value) if isinstance(value, float) else str(value) for value in listed]
        short = [label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…" for label in labels]
        marks = [Tick(round(y, 1), label) for y, label in zip(heights, short, strict=True)]
        return lambda value: round(heights[list(listed).index(value)], 1), marks
    assert dimension.bounds is not None
    logarithmic = dimension.loguniform is not None
    change: Callable[[float], float] = math.log10 if logarithmic else float
    low, high = map(change, dimension.bounds)

    def place(value: Any) -> float:
        return round(bottom - (bottom - top) * (change(value) - low) / (high - low), 1)

    if logarithmic:
        powers = [10.0**k for k in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
        marked = powers if len(powers) > 1 else list(dimension.bounds)
    else:
        marked = ticks(low, high, 5)
    return place, [Tick(place(value), format_number(value)) for value in marked]
