"""The functions that a run calls while it trains; a run's journal has one for each."""

from collections.abc import Callable
from dataclasses import dataclass

Metrics = dict[str, float]


@dataclass(frozen=True)
class RunCallbacks:
    """Functions that a run calls on one worker while it trains; by default each does nothing."""

    row: Callable[[Metrics], None] = lambda metrics: None
    """Called with the metrics of each epoch of a warm start, then of each iteration, on rank 0 alone."""
    transcripts: Callable[[int, list[dict[str, object]]], None] = lambda iteration, episodes: None
    """Called with episodes as text of the iterations that have a checkpoint, before their row, on rank 0 alone."""
    phase: Callable[[str], None] = lambda name: None
    """Called with the name of each part of the run as it begins."""
    begin: Callable[[int | None], None] = lambda iteration: None
    """Called before any row with the iteration of the run's own checkpoint that the run continues from, or None."""
    say: Callable[[str], None] = lambda line: None
    """Called with a line for people, such as one about a damaged checkpoint."""


SILENT_CALLBACKS = RunCallbacks()
"""The callbacks of a run whose caller reads its state."""
