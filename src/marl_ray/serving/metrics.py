"""Prometheus metrics of one gateway replica."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Ray Serve's own histograms start at 1 ms, where a small policy has long answered."""

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
OF_ARM = ("experiment", "arm")


@dataclass(frozen=True, slots=True)
class ArmMeters:
    """The hot metrics of one arm, looked up once: finding a label costs more than counting."""

    exposures: Any
    acts: Any
    seconds: Any


class Metrics:
    """A private registry, so that several gateways in one process, and Ray's own metrics, stay apart."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered.", "endpoint", "status")
        self.errors = self._counter("errors", "Of these, with 4xx or 5xx.", "endpoint", "status")
        self.exposures = self._counter("exposures", "Sessions first seen.", *OF_ARM)
        self.acts = self._counter("acts", "Acts of an arm.", *OF_ARM)
        self.failures = self._counter("arm_failures", "Passes of an arm that failed.", *OF_ARM)
        self.latency = Histogram(
            "marl_ray_gateway_act_seconds",
            "Time from the request's fields to its answer, successful acts.",
            OF_ARM,
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.circuit = self._gauge("circuit", "0 closed, 0.5 half-open, 1 open.", *OF_ARM)
        self.shadows = self._gauge("shadow", "Copies of requests: acts, errors, dropped, agreed.", *OF_ARM, "count")
        self.dropped = self._gauge("exposures_dropped", "Exposures dropped by a full queue and spool.")
        self.waiting = self._gauge("exposures_waiting", "Exposures not written to the store yet.")
        self.decisions_dropped = self._gauge("decisions_dropped", "Decisions dropped by a full queue.")
        self._arms: dict[str, dict[str, ArmMeters]] = {}
        self._statuses: dict[tuple[str, int], Any] = {}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"marl_ray_gateway_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"marl_ray_gateway_{name}", text, labels, registry=self.registry)

    def arms(self, experiment: str, arms: Iterable[str]) -> dict[str, ArmMeters]:
        """Arm -> its metrics."""
        found = self._arms.get(experiment)
        if found is None:
            found = self._arms[experiment] = {
                arm: ArmMeters(
                    self.exposures.labels(experiment, arm),
                    self.acts.labels(experiment, arm),
                    self.latency.labels(experiment, arm),
                )
                for arm in arms
            }
        return found

    def count(self, endpoint: str, status: int) -> None:
        """One request answered."""
        counter = self._statuses.get((endpoint, status))
        if counter is None:
            counter = self._statuses[endpoint, status] = self.requests.labels(endpoint, status)
        counter.inc()
        if status >= 400:
            self.errors.labels(endpoint, status).inc()

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
