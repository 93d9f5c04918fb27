"""The clock of a run: it measures the seconds of named phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Seconds spent in named phases since the last reading."""

    def __init__(self, *phases: str) -> None:
        self.started, self.phases = time.perf_counter(), dict.fromkeys(phases, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a phase."""
        before = time.perf_counter()
        yield
        self.phases[name] += time.perf_counter() - before

    def read(self, steps: int) -> dict[str, float]:
        """Return steps per second and each phase's share of the time since the last reading."""
        now = time.perf_counter()
        elapsed = now - self.started
        shares = {f"time/{name}": seconds / elapsed for name, seconds in self.phases.items()}
        self.started, self.phases = now, dict.fromkeys(self.phases, 0.0)
        return {"steps_per_second": steps / elapsed, **shares, "time/other": max(0.0, 1 - sum(shares.values()))}
