"""Rows of metrics on their way from a worker to the driver."""

import time
from typing import Any

SENDING_S = 0.5
"""Least time between two sendings of metrics to the driver."""


class Rows:
    """Sends them through a Ray queue, at most twice a second, so that fast iterations do not wait."""

    def __init__(self, queue: Any):
        self.queue, self.sent = queue, float("-inf")
        self.rows: list[dict[str, Any]] = []

    def add(self, metrics: dict[str, Any]) -> None:
        self.rows.append(metrics)
        if time.monotonic() - self.sent > SENDING_S:
            self.flush()

    def flush(self) -> None:
        if self.rows:
            self.queue.put_nowait_batch(self.rows)
            self.rows, self.sent = [], time.monotonic()
