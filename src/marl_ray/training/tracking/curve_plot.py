"""Learning curves as pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.config import RunConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Points = Sequence[tuple[int, float]]
"""(environment steps, value)."""
History = Callable[[str], Points]
"""Metric -> its points."""
TRAINING_STYLE = {"color": "0.6", "linewidth": 1.0, "label": "training episodes"}
"""The style of the curve of training episodes, which is drawn behind that of the evaluations."""


@dataclass(frozen=True)
class MetricPanel:
    """One metric of a run over its steps: evaluations, training episodes and budget."""

    name: str
    evaluation_points: Points
    training_points: Points
    budget: float | None = None
    intervals: Sequence[tuple[int, float, float]] = ()
    """(environment steps, low, high) of evaluations."""


def plot_returns(curves: Mapping[str, Points], path: Path, title: str) -> Path:
    """Draw the mean returns of evaluations by name into a PNG and return its path."""
    figure = _make_figure(1)
    (axes,) = figure.subplots(1, 1, squeeze=False).flat
    for name, points in curves.items():
        axes.plot(*_to_columns(points), label=name, linewidth=1.8, marker="o", markersize=3.5)
    axes.set(title=title, ylabel="mean return of an evaluation")
    _finish_axes(axes, len(curves) > 1)
    figure.savefig(path, dpi=130)
    return path


def panels_of(config: RunConfig, history: History) -> list[MetricPanel]:
    """Return the panels of the mean return, and of each cost with its budget, from the logged `history` of a metric."""
    single = len(config.budgets) == 1
    costs = [
        MetricPanel(
            "mean cost of an episode" if single else f"mean cost {k} of an episode",
            history(f"eval/episode_cost_{k}"),
            history("episode_cost" if single else f"episode_cost_{k}"),
            budget,
        )
        for k, budget in enumerate(config.budgets)
    ]
    high = dict(history("eval/return_high"))
    intervals = [(step, low, high[step]) for step, low in history("eval/return_low") if step in high]
    return [MetricPanel("mean return", history("eval/return"), history("return"), None, intervals), *costs]


def title_of(config: RunConfig) -> str:
    """Return the title of a run's picture: name, the algorithm of each policy, seed and environment."""
    trained = {name: config.algorithm_of(name) for name, policy in config.team.items() if not policy.frozen}
    algorithms = next(iter(trained.values()))
    if len(set(trained.values())) > 1:
        algorithms = ", ".join(f"{name} {algorithm}" for name, algorithm in trained.items())
    return f"{config.name}: {algorithms}, seed {config.seed}\n{config.env.id}"


def plot_run(panels: Sequence[MetricPanel], path: Path, title: str) -> Path:
    """Draw a run's panels, one under the other, into a PNG and return its path."""
    figure = _make_figure(len(panels))
    rows = figure.subplots(len(panels), 1, squeeze=False, sharex=True).flat
    for axes, panel in zip(rows, panels, strict=True):
        if panel.training_points:
            axes.plot(*_to_columns(panel.training_points), **TRAINING_STYLE)
        if panel.evaluation_points:
            label = "evaluations, 95 % intervals" if panel.intervals else "evaluations"
            (line,) = axes.plot(
                *_to_columns(panel.evaluation_points), label=label, linewidth=1.8, marker="o", markersize=3.5
            )
            if panel.intervals:
                steps, low, high = zip(*panel.intervals, strict=True)
                axes.vlines(steps, low, high, color=line.get_color(), linewidth=1.2, alpha=0.7)
        if panel.budget is not None:
            axes.axhline(panel.budget, color="tab:red", linestyle="--", linewidth=1.2, label=f"budget {panel.budget:g}")
        axes.set(ylabel=panel.name)
        _finish_axes(axes, True)
    rows[0].set_title(title)
    for axes in list(rows)[:-1]:
        axes.set_xlabel("")
    figure.savefig(path, dpi=130)
    return path


def plot_benchmarks(config: RunConfig, history: History, path: Path) -> Path | None:
    """Draw pass@1 of the run's benchmarks, with intervals, against each axis that was logged.

    Returns the path of the PNG, or None where nothing was measured.
    """
    axes_of = {"tokens": "tokens trained on", "hours": "hours of training", "price": "price of training"}
    logged = {label: dict(history(f"benchmark/{axis}")) for axis, label in axes_of.items()}
    logged = {label: values for label, values in logged.items() if values}
    curves = {}
    for benchmark in config.evaluation.benchmarks:
        parts = [dict(history(f"benchmark/{benchmark.metric}/pass_at_1{part}")) for part in ("", "_low", "_high")]
        curves[benchmark.metric] = [(step, value, parts[1][step], parts[2][step]) for step, value in parts[0].items()]
    if not logged or not any(curves.values()):
        return None
    figure = _make_figure(len(logged))
    for axes, (label, place) in zip(figure.subplots(len(logged), 1, squeeze=False).flat, logged.items(), strict=True):
        for name, points in curves.items():
            # A price may be given when a run continues: what was measured before has none.
            placed = [(place[step], *numbers) for step, *numbers in points if step in place]
            if placed:
                places, values, low, high = zip(*placed, strict=True)
                axes.plot(places, values, label=name, linewidth=1.8, marker="o", markersize=3.5)
                axes.fill_between(places, low, high, alpha=0.15)
        axes.set(ylabel="pass@1")
        _finish_axes(axes, True)
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    figure.suptitle(config.name)
    figure.savefig(path, dpi=130)
    return path


def _make_figure(panels: int) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2 if panels == 1 else 2.8 * panels), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _to_columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _finish_axes(axes: "Axes", legend: bool) -> None:
    """Give the axes their labels and grid, and with `legend` a legend if something has a label."""
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False)
