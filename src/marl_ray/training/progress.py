"""A progress bar with return and speed; plain lines where there is no terminal."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from marl_ray.config import RunConfig

LINE_EVERY_S = 5.0
"""Seconds between lines where there is no terminal (a job's log)."""


class Progress:
    """Shows the latest row of metrics; a context manager."""

    def __init__(self, config: RunConfig):
        self.config, self.last_line = config, 0.0
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

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def show(self, row: Mapping[str, float]) -> None:
        """One iteration's metrics."""
        mean = f"{row['return']:.3f}" if "return" in row else "-"  # until a first episode has ended
        note = f"return {mean}  {row['steps_per_second']:,.0f} steps/s"
        self.bar.update(self.task, completed=row["steps"], note=note)
        last = row["steps"] >= self.config.train.total_steps
        if (
            self.bar.disable
            and self.config.tracking.progress
            and (last or time.monotonic() - self.last_line > LINE_EVERY_S)
        ):
            self.last_line = time.monotonic()
            print(f"{self.config.name}: {row['steps']:,} steps  {note}", flush=True)
