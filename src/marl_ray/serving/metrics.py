"""Prometheus metrics of one gateway replica."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Ray Serve's own histograms start at 1 ms, where a small policy has long answered."""

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """A private registry, so that several gateways in one process, and Ray's own metrics, stay apart."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "marl_ray_gateway_requests", "Requests answered.", ["endpoint", "status"], registry=self.registry
        )
        self.errors = Counter(
            "marl_ray_gateway_errors", "Of these, with 4xx or 5xx.", ["endpoint", "status"], registry=self.registry
        )
        self.exposures = Counter(
            "marl_ray_gateway_exposures", "Sessions first seen.", ["experiment", "arm"], registry=self.registry
        )
        self.acts = Counter("marl_ray_gateway_acts", "Acts of an arm.", ["experiment", "arm"], registry=self.registry)
        self.latency = Histogram(
            "marl_ray_gateway_act_seconds",
            "Time from the request's head to its answer, successful acts.",
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.dropped = Gauge(
            "marl_ray_gateway_exposures_dropped", "Exposures dropped by a full queue.", registry=self.registry
        )
        self.waiting = Gauge(
            "marl_ray_gateway_exposures_waiting", "Exposures not written to the store yet.", registry=self.registry
        )

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
