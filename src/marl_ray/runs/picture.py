"""Draws the curves of several runs into one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marl_ray.runs.comparison import RunCurve, SeedGroup

MOST_KEYS = 3
"""Most keys of a config in a line of the legend."""


def plot_comparison(groups: Sequence[SeedGroup], path: Path, title: str) -> Path:
    """Draw every run's curve into a PNG, a colour for each group, with scores and seeds in the legend; its path.

    Points have their intervals. A group of several seeds has its mean as a thick line, where all have been measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, group in enumerate(groups):
        color, several = f"C{number % 10}", len(group.runs) > 1
        for curve in group.runs:
            steps, values = zip(*curve.points, strict=True)
            style = (
                {"linewidth": 0.8, "alpha": 0.5} if several else {"linewidth": 1.8, "marker": "o", "markersize": 3.0}
            )
            axes.plot(steps, values, color=color, label=None if several else legend_of(group), **style)
            if curve.intervals and not several:
                at, low, high = zip(*curve.intervals, strict=True)
                axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        if several:
            means = mean_curve(group.runs)
            axes.plot(
                *(zip(*means, strict=True) if means else ((), ())), color=color, linewidth=2.2, label=legend_of(group)
            )
    axes.set(title=title, xlabel="environment steps", ylabel=groups[0].runs[0].metric)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=130)
    return path


def legend_of(group: SeedGroup) -> str:
    """Return the group in one line: runs, algorithm, seeds, up to three keys in which it differs, and score with its
    interval."""
    seeds = ", ".join(str(curve.seed) for curve in group.runs)
    text = f"{group.label}: {group.runs[0].algorithm}, seed{'s' if len(group.runs) > 1 else ''} {seeds}"
    differences = [(key, value) for key, value in group.differences.items() if key != "algorithm"]
    for key, value in differences[:MOST_KEYS]:
        text += f", {difference(key, value)}"
    if len(differences) > MOST_KEYS:
        text += ", ..."
    if group.score is None:
        return text
    score = group.score
    interval = "" if score.low is None or score.high is None else f" [{score.low:.3g}, {score.high:.3g}]"
    return f"{text}, {score.value:.3g}{interval}"


def difference(key: str, value: Any) -> str:
    """Return a key in which runs differ, with its value."""
    return f"{key} at its default" if value is None else f"{key}={value}"


def mean_curve(curves: Sequence[RunCurve]) -> list[tuple[int, float]]:
    """Return the mean of the curves at the steps that all have."""
    tables = [dict(curve.points) for curve in curves]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    return [(step, sum(table[step] for table in tables) / len(tables)) for step in shared]
