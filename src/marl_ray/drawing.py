"""Parts that the charts of the gateway's page and of a sweep's report share: frames, round ticks, and SVG paths."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MINUS = "\N{MINUS SIGN}"


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


def round_step(size: float, max_steps: int) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that divides `size` into `max_steps` steps at most."""
    rough = size / max(max_steps, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * k for k in (1, 2, 5, 10) if power * k >= rough * (1 - 1e-9))


def multiples(step: float, low: float, high: float) -> list[float]:
    """Return the multiples of the step from low to high."""
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def line_path(points: Iterable[tuple[float, float]]) -> str:
    """Return the SVG path of a line through the points."""
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def band_path(edges: Sequence[tuple[float, float, float]]) -> str:
    """Return the SVG path around the area of a curve's band; `edges` are (x, low, high)."""
    there = [f"{x} {high}" for x, _, high in edges]
    back = [f"{x} {low}" for x, low, _ in reversed(edges)]
    return "M" + "L".join(there + back) + "Z"
