"""A progress bar with return and speed; plain lines where there is no terminal."""

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from marl_ray.config import RunConfig
from marl_ray.training.tracking.printed_lines import print_line
from marl_ray.training.tracking.summary import budget_texts, evaluation_text

LINE_EVERY_S = 5.0
"""Seconds between lines where there is no terminal (a job's log)."""


class ProgressBar:
    """Shows the latest row of metrics; a context manager."""

    def __init__(self, config: RunConfig, write: Callable[[str], None]):
        """Begin to show a run; `write` gets the lines that appear where there is no terminal, wherever the bar is shown."""
        self.config, self.write, self.last_line = config, write, 0.0
        self.scored: Mapping[str, float] | None = None
        """The row of the last evaluation."""
        console = Console(file=sys.stderr)
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps  {task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (config.tracking.progress and console.is_terminal),
        )
        self.task = self.bar.add_task(config.name, total=config.train.total_steps, note="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def show(self, row: Mapping[str, float]) -> None:
        """Show one iteration's metrics."""
        self.scored = row if "eval/return" in row else self.scored
        note = iteration_line(self.config, row, self.scored)
        self.bar.update(self.task, completed=row["steps"], note=note)
        last = row["steps"] >= self.config.train.total_steps
        if last or time.monotonic() - self.last_line > LINE_EVERY_S:
            self.last_line = time.monotonic()
            line = f"{row['steps']:,} steps  {note}"
            self.write(line)
            if self.bar.disable and self.config.tracking.progress:
                print_line(f"{self.config.name}: {line}", sys.stdout)


def iteration_line(config: RunConfig, row: Mapping[str, float], scored: Mapping[str, float] | None) -> str:
    """Return one iteration in a few words; `scored` is the row of the last evaluation."""
    # There is no return until episodes are released.
    parts = [f"return {row['return']:.3f}" if "return" in row else "return -"]
    if scored is not None:
        parts.append(f"evaluated {evaluation_text(scored)}")
        if scored["steps"] != row["steps"]:
            parts[-1] += f" at step {scored['steps']:,.0f}"
    # Until training episodes have costs, the line shows those of the evaluation.
    parts += budget_texts(config, row, "") or budget_texts(config, row, "eval/")
    if "steps_per_second" in row:
        parts.append(f"{row['steps_per_second']:,.0f} steps/s")
    return "  ".join(parts)
