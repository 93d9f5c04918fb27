"""A replica's numbers for Ray's metrics agents, from which Prometheus scrapes those of every replica.

No request waits for this: a thread reads the counters every few seconds and reports their increase to Ray. A histogram
becomes one counter per bucket, because Ray's own histograms keep no sums and estimate them from the buckets' midpoints.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import Metric
from ray import serve
from ray.serve import metrics as ray_metrics

PUSH_S = 2.0
"""Seconds between updates of Ray's metrics."""
_log = logging.getLogger(__name__)


class RayMetrics:
    """Reports a replica's numbers to Ray, with the labels `application`, `deployment` and `replica`."""

    def __init__(self, read: Callable[[], Iterable[Metric]]):
        """Make it in a replica. `read` returns the current numbers; a thread calls it."""
        self._read = read
        self._metrics: dict[str, Any] = {}
        self._last_values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def start(self) -> None:
        """Push the numbers every few seconds, for as long as the process lives."""
        threading.Thread(target=self._run, name="ray-metrics", daemon=True).start()

    def push(self) -> None:
        """Push the changes since the last push."""
        for family in self._read():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = tuple(sorted(sample.labels.items()))
                last_value = self._last_values.get((sample.name, labels))
                if sample.value == last_value:
                    continue
                self._last_values[sample.name, labels] = sample.value
                metric = self._metric_of(family, sample.name, tuple(sorted(sample.labels)))
                if family.type == "gauge":
                    metric.set(sample.value, tags=dict(labels))
                elif sample.value > (last_value or 0.0):
                    metric.inc(sample.value - (last_value or 0.0), tags=dict(labels))

    def _metric_of(self, family: Metric, name: str, labels: Any) -> Any:
        name = name.removesuffix("_total")  # Ray's agents add the suffix to counters
        if name not in self._metrics:
            kind = ray_metrics.Gauge if family.type == "gauge" else ray_metrics.Counter
            self._metrics[name] = kind(name, description=family.documentation, tag_keys=labels)
        return self._metrics[name]

    def _run(self) -> None:
        while True:
            time.sleep(PUSH_S)
            try:
                self.push()
            except Exception:  # numbers may be missed, but no request may fail
                _log.exception("the metrics of this replica are not reported to Ray")


def replica_name() -> str:
    """Return the name of the replica in this process."""
    return str(serve.get_replica_context().replica_id.unique_id)
