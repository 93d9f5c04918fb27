"""Learning curves as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_returns(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path, title: str) -> Path:
    """Draw (environment steps, mean return) curves by name into a PNG and return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([step for step, _ in points], [value for _, value in points], label=name, linewidth=1.8)
    axes.set(title=title, xlabel="environment steps", ylabel="mean return of recent episodes")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)
    return path
