"""Prometheus metrics of one gateway replica."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from marl_ray.config import ExperimentConfig

LATENCY_BUCKETS_S = (
    1e-4, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0,
)  # fmt: skip
"""Ray Serve's own histograms start at 1 ms, by which time a small policy has answered; the last buckets are for texts."""

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
ARM_LABELS = ("experiment", "arm")
ANSWER_LABELS = ("endpoint", "status")
_BOUNDS = [*map(str, LATENCY_BUCKETS_S), "+Inf"]


class Histogram:
    """Counts of seconds by bucket, as plain numbers."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUNDS)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration. On one thread alone: the counts have no lock."""
        self.counts[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        self.total += seconds

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Add the counts so far to a family of Prometheus, under these values of its labels."""
        buckets = zip(_BOUNDS, map(float, accumulate(self.counts)), strict=True)
        family.add_metric(labels, list(buckets), self.total)


class ArmCounters:
    """An arm's counters that every act changes.

    The counters are plain numbers, because each of the library's counters takes a lock.
    """

    __slots__ = ("cost_unknown", "cost_usd", "exposures", "first_token", "prompt_tokens", "seconds", "tokens")

    def __init__(self) -> None:
        self.exposures = 0
        self.seconds = Histogram()
        """Seconds of acts."""
        self.prompt_tokens = self.tokens = 0
        self.first_token = Histogram()
        """Seconds to the first token of texts."""
        self.cost_usd = 0.0
        self.cost_unknown = 0
        """Responses of unknown cost, of an arm with a price."""

    def observe(self, seconds: float) -> None:
        """Count an act that took this many seconds."""
        self.seconds.observe(seconds)

    def count_text(self, prompt_tokens: int, first_token_s: float, cost_usd: float | None) -> None:
        """Count a complete text; a cost of None is unknown."""
        self.prompt_tokens += prompt_tokens
        self.cost_usd += cost_usd or 0.0
        self.cost_unknown += cost_usd is None
        self.first_token.observe(first_token_s)


class _CounterCollector(Collector):
    """Exports the plain numbers to Prometheus."""

    def __init__(
        self, arms: dict[str, dict[str, ArmCounters]], answers: dict[tuple[str, int], int], holdouts: dict[str, int]
    ):
        self._arms = arms
        self._answers = answers
        self._holdouts = holdouts

    def collect(self) -> Iterator[Metric]:
        exposures = CounterMetricFamily("marl_ray_gateway_exposures", "Sessions first seen.", labels=ARM_LABELS)
        seconds = HistogramMetricFamily(
            "marl_ray_gateway_act_seconds",
            "Time from the request's fields to its answer, successful acts.",
            labels=ARM_LABELS,
        )
        first_tokens = HistogramMetricFamily(
            "marl_ray_gateway_first_token_seconds", "Time to a text's first token, complete texts.", labels=ARM_LABELS
        )
        tokens = CounterMetricFamily(
            "marl_ray_gateway_tokens", "Tokens of texts: of their prompts, and generated.", labels=(*ARM_LABELS, "kind")
        )
        cost = CounterMetricFamily("marl_ray_gateway_cost_usd", "Price of external arms' tokens.", labels=ARM_LABELS)
        unknown_costs = CounterMetricFamily(
            "marl_ray_gateway_cost_unknown", "Responses of arms with a price whose cost is unknown.", labels=ARM_LABELS
        )
        for experiment, arms in list(self._arms.items()):
            for arm, counters in arms.items():
                exposures.add_metric([experiment, arm], counters.exposures)
                counters.seconds.add_to(seconds, [experiment, arm])
                if counters.tokens:
                    counters.first_token.add_to(first_tokens, [experiment, arm])
                    tokens.add_metric([experiment, arm, "prompt"], counters.prompt_tokens)
                    tokens.add_metric([experiment, arm, "generated"], counters.tokens)
                if counters.cost_usd:
                    cost.add_metric([experiment, arm], counters.cost_usd)
                if counters.cost_unknown:
                    unknown_costs.add_metric([experiment, arm], counters.cost_unknown)
        requests = CounterMetricFamily("marl_ray_gateway_requests", "Requests answered.", labels=ANSWER_LABELS)
        errors = CounterMetricFamily("marl_ray_gateway_errors", "Of these, with 4xx or 5xx.", labels=ANSWER_LABELS)
        for (endpoint, status), count in list(self._answers.items()):
            requests.add_metric([endpoint, str(status)], count)
            if status >= 400:
                errors.add_metric([endpoint, str(status)], count)
        holdouts = CounterMetricFamily(
            "marl_ray_gateway_holdouts", "Acts of units that are held out of all experiments.", labels=("endpoint",)
        )
        for endpoint, acts in list(self._holdouts.items()):
            holdouts.add_metric([endpoint], acts)
        yield from (exposures, seconds, first_tokens, tokens, cost, unknown_costs, requests, errors, holdouts)


class GatewayMetrics:
    """A private registry, so that several gateways in one process, and Ray's own metrics, stay apart."""

    def __init__(self, replica: str | None = None) -> None:
        """Register the metrics of one replica.

        `replica` labels every line of `prometheus_text` with the replica's name, because each scrape of the replicas'
        common port reads only one of them.
        """
        self._replica = replica
        self.registry = CollectorRegistry()
        self._arms: dict[str, dict[str, ArmCounters]] = {}
        self._answers: dict[tuple[str, int], int] = {}
        self._holdouts: dict[str, int] = {}
        self.registry.register(_CounterCollector(self._arms, self._answers, self._holdouts))
        self.failures = Counter(
            "marl_ray_gateway_arm_failures", "Passes of an arm that failed.", ARM_LABELS, registry=self.registry
        )
        self.circuit = self._gauge("circuit", "0 closed, 0.5 half-open, 1 open.", *ARM_LABELS)
        self.shadows = self._gauge(
            "shadow",
            "Copies of requests: acts, errors, dropped, agreed; of texts their tokens and log_prob.",
            *ARM_LABELS,
            "count",
        )
        self.dropped = self._gauge("exposures_dropped", "Exposures dropped by a full queue and spool.")
        self.waiting = self._gauge("exposures_waiting", "Exposures not written to the store yet.")
        self.acts_dropped = self._gauge("decisions_dropped", "Logged requests dropped by a full queue.")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"marl_ray_gateway_{name}", text, labels, registry=self.registry)

    def counters_of(self, experiment: ExperimentConfig) -> dict[str, ArmCounters]:
        """Return arm -> its counters; change them on the event loop alone."""
        counters = self._arms.get(experiment.name)
        if counters is None:
            counters = {arm: ArmCounters() for arm in experiment.arms}
            self._arms[experiment.name] = counters
        return counters

    def count(self, endpoint: str, status: int) -> None:
        """Count an answered request."""
        key = (endpoint, status)
        self._answers[key] = self._answers.get(key, 0) + 1

    def count_holdout(self, endpoint: str) -> None:
        """Count an act of a unit that is held out."""
        self._holdouts[endpoint] = self._holdouts.get(endpoint, 0) + 1

    def prometheus_text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(
            self.registry if self._replica is None else _ReplicaRegistry(self.registry, self._replica)
        )


class _ReplicaRegistry(CollectorRegistry):
    """The numbers of another registry, each labelled with the replica."""

    def __init__(self, registry: CollectorRegistry, replica: str):
        super().__init__()
        self._registry = registry
        self._labels = {"replica": replica}

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample._replace(labels=sample.labels | self._labels) for sample in family.samples]
            yield family
