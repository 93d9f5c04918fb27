"""A live table of a sweep's trials, or plain lines if there is no terminal."""

import sys
import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marl_ray.config.sweep import SweepConfig
from marl_ray.training.tracking.printed_lines import print_line
from marl_ray.tuning.records import (
    FAILED_STATUSES,
    SweepRecords,
    TrialRecord,
    end_reason,
    signed_objectives,
    values_line,
)

TABLE_EVERY_S = 0.5
"""Seconds between two refreshes of the table on a terminal."""
LINE_EVERY_S = 10.0
"""Seconds between two lines where there is no terminal, as in a job's log."""
_OTHER_LINES = 8
"""Number of the terminal's lines that the table's rows cannot use."""
_COLOURS = {"finished": "green", "stopped": "yellow", "interrupted": "yellow", "running": "cyan", "waiting": "blue"}
"""Colours of a trial's status, or of its state while it has none; all others are red."""


class SweepProgress:
    """Shows the current records; a context manager. Only one thread may use it."""

    def __init__(self, config: SweepConfig, records: SweepRecords, console: Console | None = None):
        self.config, self.records = config, records
        run = config.example()
        self.total, self.enabled = run.train.total_steps, run.tracking.progress
        self.console = console or Console(file=sys.stderr)
        self.began = self.last = time.monotonic()
        self.live: Live | None = None

    def __enter__(self) -> Self:
        if self.enabled and self.console.is_terminal:
            # Printed lines go above the table, unless the output is not the terminal.
            is_terminal = sys.stdout.isatty()
            self.live = Live(console=self.console, auto_refresh=False, redirect_stdout=is_terminal)
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.update(self.table(), refresh=True)
            self.live.stop()

    def show(self) -> None:
        """Refresh the display if it is due; call this whenever something has changed."""
        if not self.enabled or time.monotonic() - self.last < (TABLE_EVERY_S if self.live else LINE_EVERY_S):
            return
        self.last = time.monotonic()
        if self.live is not None:
            self.live.update(self.table(), refresh=True)
        else:
            print_line(f"{self.config.name}: {self.summary()}", sys.stdout)

    def summary(self) -> str:
        """Return the sweep in one line."""
        counts = Counter(record.status or record.state for record in self.records.trials)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        seconds = time.monotonic() - self.began
        text = f"{kinds or 'starting'}; {self.records.played:,} steps, {seconds:,.0f} s"
        best = self.best()
        if best is not None and best.objectives is not None:
            text += f"; best {best.number:04d}: {self.config.metric[0].name} {best.objectives[0]:.4g}"
        return text

    def best(self) -> TrialRecord | None:
        """Return the trial with the best result so far, in whatever state it is; None before the first result."""
        metrics = self.config.metric
        scores = {
            record.number: scores_of_trial[0]
            for record in self.records.trials
            if record.status not in FAILED_STATUSES
            and (scores_of_trial := signed_objectives(metrics, record.objectives)) is not None
        }
        return self.records.trials[max(scores, key=lambda number: scores[number])] if scores else None

    def table(self) -> Table:
        """Return a table of as many trials as the terminal has lines.

        The running ones come first, then the waiting ones, then the latest.
        """
        steps, metric = len(f"{self.total:,} (100%)"), self.config.metric[0].name
        score = max(9, len(metric))
        # the width that the other columns and the gaps leave
        free = self.console.size.width - (5 + 14 + steps + score) - 19
        table = Table(box=box.SIMPLE_HEAD, title=f"{self.config.name}: {self.summary()}", title_justify="left")
        for name, width in (("trial", 5), ("values", max(10, free * 3 // 5)), ("state", 14)):
            table.add_column(name, width=width, no_wrap=True)
        table.add_column("steps", width=steps, justify="right", no_wrap=True)
        table.add_column(metric, width=score, justify="right", no_wrap=True)
        table.add_column("why", width=max(8, free * 2 // 5), no_wrap=True)
        best = self.best()
        first = ("running", "waiting", "ended")
        in_order = sorted(self.records.trials, key=lambda r: (r is not best, first.index(r.state), -r.number))
        max_rows = max(4, self.console.size.height - _OTHER_LINES)
        for record in sorted(in_order[:max_rows], key=lambda r: r.number):
            table.add_row(*self._row(record, record is best), style="bold green" if record is best else "")
        if len(in_order) > max_rows:
            table.add_row("", f"and {len(in_order) - max_rows} more", "", "", "", "", style="dim")
        return table

    def _row(self, record: TrialRecord, best: bool) -> list[str | Text]:
        status = record.status or record.state
        score = f"{record.objectives[0]:.4g}" if record.objectives else "-"
        return [
            f"{record.number:04d}",
            Text(values_line(record.values)),  # plain text, because a list in it is not markup
            Text(f"{status}, best" if best else status, _COLOURS.get(status, "red")),
            f"{record.steps:,} ({min(record.steps / self.total, 1):.0%})",
            score,
            Text(end_reason(record, self.records) or _last_takeover(record)),
        ]


def _last_takeover(record: TrialRecord) -> str:
    """Return the last takeover of the trial, in words; empty if there was none."""
    return f"took over {record.exploits[-1]['donor']:04d} at {record.exploits[-1]['at']:,}" if record.exploits else ""
