"""Draws the curves of several runs into one picture."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from marl_ray.runs.comparison import RunCurve, SeedGroup
from marl_ray.runs.summary import Score

MAX_KEYS = 3
"""Maximum number of keys of a config in a line about a group."""
MAX_LINE = 90
"""Maximum number of characters in a line below the axes, as wide as the picture."""


def plot_comparison(groups: Sequence[SeedGroup], path: Path, title: str) -> Path:
    """Draw every run's curve into a PNG, and return its path.

    Each group has a colour; names and scores stand below the axes. Points have their intervals. A group of several
    seeds has its mean as a thick line, where all have been measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = [textwrap.fill(legend_line(group), MAX_LINE) for group in groups]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(8, 5 + 0.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (group, label) in enumerate(zip(groups, labels, strict=True)):
        color, has_mean = f"C{number % 10}", len(group.runs) > 1
        for curve in group.runs:
            steps, values = zip(*curve.points, strict=True)
            style = (
                {"linewidth": 0.8, "alpha": 0.5} if has_mean else {"linewidth": 1.8, "marker": "o", "markersize": 3.0}
            )
            axes.plot(steps, values, color=color, label=None if has_mean else label, **style)
            if curve.intervals and not has_mean:
                interval_steps, low, high = zip(*curve.intervals, strict=True)
                axes.fill_between(interval_steps, low, high, color=color, alpha=0.15, linewidth=0)
        if has_mean:
            means = mean_curve(group.runs)
            axes.plot(*(zip(*means, strict=True) if means else ((), ())), color=color, linewidth=2.2, label=label)
    axes.set(title=title, xlabel="environment steps", ylabel=groups[0].runs[0].metric)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, title=textwrap.fill(legend_title(groups), MAX_LINE))
    figure.savefig(path, dpi=130, format="png")  # else a name with another ending means another format
    return path


def legend_line(group: SeedGroup) -> str:
    """Return the group's line in the legend: runs and score with its interval."""
    return group.label if group.score is None else f"{group.label}: {_score_text(group.score)}"


def legend_title(groups: Sequence[SeedGroup]) -> str:
    """Return the title of the legend, which says what the lines, the bands and the numbers of the picture are."""
    parts = []
    if any(curve.intervals for group in groups if len(group.runs) == 1 for curve in group.runs):
        parts.append("band: 95 % interval of each point")
    if any(len(group.runs) > 1 for group in groups):
        parts.append("thin: each seed, thick: their mean")
    if scores := [group.score for group in groups if group.score is not None]:
        intervals = " [95 % interval]" * any(score.low is not None for score in scores)
        parts.append(f"number: {' or '.join(dict.fromkeys(score.episodes for score in scores))}{intervals}")
    return "; ".join(parts)


def group_line(group: SeedGroup) -> str:
    """Return one line about a group.

    The line has runs, algorithm, seeds, up to MAX_KEYS keys in which the group differs, and its score with the
    interval.
    """
    seeds = ", ".join(str(curve.seed) for curve in group.runs)
    text = f"{group.label}: {group.runs[0].algorithm}, seed{'s' if len(group.runs) > 1 else ''} {seeds}"
    differences = [(key, value) for key, value in group.differences.items() if key != "algorithm"]
    for key, value in differences[:MAX_KEYS]:
        text += f", {key_difference(key, value)}"
    if len(differences) > MAX_KEYS:
        text += ", ..."
    if group.score is None:
        return text
    return f"{text}, {_score_text(group.score)}"


def key_difference(key: str, value: object) -> str:
    """Return a key in which runs differ, with its value; None stands for the default."""
    return f"{key} at its default" if value is None else f"{key}={value}"


def mean_curve(curves: Sequence[RunCurve]) -> list[tuple[int, float]]:
    """Return the mean of the curves at the steps that all have."""
    tables = [dict(curve.points) for curve in curves]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    return [(step, sum(table[step] for table in tables) / len(tables)) for step in shared]


def _score_text(score: Score) -> str:
    interval = "" if score.low is None or score.high is None else f" [{score.low:.3g}, {score.high:.3g}]"
    return f"{score.value:.3g}{interval}"
