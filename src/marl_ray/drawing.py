"""The style sheet, frames, round ticks and SVG paths, which the gateway's pages and a sweep's report share."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MINUS = "\N{MINUS SIGN}"
"""The minus of numbers in charts, as wide as a digit."""

ROUNDING = 1e-9
"""Share of a step by which floating-point numbers may miss a multiple of it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis."""

    at: float
    """Coordinate along its axis."""
    label: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A drawing of `width` x `height` units; its plot lies between left and right, top and bottom."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


def read_stylesheet() -> bytes:
    """Return the style sheet of all pages, as CSS."""
    return Path(__file__).with_name("style.css").read_bytes()


def round_step(size: float, max_steps: int) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that divides `size` into `max_steps` steps at most."""
    min_step = size / max(max_steps, 1)
    power = 10.0 ** math.floor(math.log10(min_step))
    return next(power * k for k in (1, 2, 5, 10) if power * k >= min_step * (1 - ROUNDING))


def multiples(step: float, low: float, high: float) -> list[float]:
    """Return the multiples of the step from low to high, both included."""
    return [k * step for k in range(math.ceil(low / step - ROUNDING), math.floor(high / step + ROUNDING) + 1)]


def line_path(points: Iterable[tuple[float, float]]) -> str:
    """Return the SVG path of a line through the points."""
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def band_path(edges: Sequence[tuple[float, float, float]]) -> str:
    """Return the SVG path around the area of a curve's band; `edges` are (x, low, high)."""
    upper_edge = [f"{x} {high}" for x, _, high in edges]
    lower_edge = [f"{x} {low}" for x, low, _ in reversed(edges)]
    return "M" + "L".join(upper_edge + lower_edge) + "Z"
