"""One look at an experiment, which makes the observations that tests take from sums over its units.

An observation is of a unit, a cluster or a block.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

from marl_ray.experiments.assignment.rendezvous import block_group, block_span
from marl_ray.experiments.evidence.judged_units import BetQuestion
from marl_ray.experiments.evidence.running_sums import Exposed, Judged, LookSettings, MetricCell, Totals
from marl_ray.experiments.statistics.bets import BetEvidence, End
from marl_ray.experiments.statistics.intervals import NO_OUTCOME, Summary
from marl_ray.experiments.statistics.missing_outcomes import mean_excess_beyond
from marl_ray.experiments.statistics.moments import NO_MOMENTS, Moments, merge_moments
from marl_ray.experiments.statistics.sequential import scale_summary
from marl_ray.experiments.statistics.unit_clusters import Blocks, block_summaries, pool_strata, summary_of

Counts = dict[int, dict[str, int]]
"""Epoch -> arm -> number."""
MetricMoments = Mapping[MetricCell, Moments]
"""The moments of each metric by epoch, arm and cluster."""
FillArguments = tuple[str, str, str, int, float, float, float]
"""The arguments of `Look.filled_summaries`."""


class Home(NamedTuple):
    """The arm that a cluster or block has had first."""

    epoch: int
    """Its first epoch."""
    arm: str
    """Its arm in that epoch."""
    changed: bool
    """True if it has had other epochs or arms."""


Homes = Mapping[str, Home]
"""Cluster or block -> its home."""


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """Units and outcomes of one arm."""

    exposures: int
    judged: int
    """Units whose windows are over."""
    outcomes: Summary
    """Summary of the outcomes that judged units have reported."""


@dataclass(frozen=True, slots=True)
class Observations:
    """Observations of an experiment: one number per unit, cluster or block, the mean of its units."""

    values: Mapping[str, Mapping[str, Summary]] = field(default_factory=dict)
    """Metric (or `outcome`) -> arm -> summary of its observations."""
    strata: Mapping[str, Mapping[int, Mapping[str, Summary]]] = field(default_factory=dict)
    """Metric -> epoch of assignment -> arm -> summary of its observations."""
    blocks: Mapping[str, Mapping[int, Mapping[str, Mapping[str, float]]]] = field(default_factory=dict)
    """Metric -> epoch -> arm -> block -> its mean; filled for switchbacks only."""

    def summary(self, metric: str, arm: str) -> Summary:
        """Return the summary of the arm's observations of the metric."""
        return self.values.get(metric, {}).get(arm, NO_OUTCOME)

    def pair(self, metric: str, treatment: str, control: str, arms: int, scale: float = 1.0) -> tuple[Summary, Summary]:
        """Return the summaries of both arms as the tests take them, compared within epochs.

        The control's is multiplied by `scale`. `arms` is the number of arms that the experiment has.
        """
        if metric not in self.blocks:
            by_epoch = self.strata.get(metric, {}).values()
            return pool_strata(
                (by_arm.get(treatment, NO_OUTCOME), scale_summary(by_arm.get(control, NO_OUTCOME), scale))
                for by_arm in by_epoch
            )

        def group_blocks(blocks: Mapping[str, float], factor: float = 1.0) -> Blocks:
            return {block_group(name, arms): factor * mean for name, mean in blocks.items()}

        by_epoch_blocks = self.blocks[metric].values()
        return block_summaries(
            [
                (group_blocks(by_arm.get(treatment, {})), group_blocks(by_arm.get(control, {}), scale))
                for by_arm in by_epoch_blocks
            ]
        )

    def gains(self, metric: str, control: str, arms: Iterable[str], total: int) -> dict[str, Summary]:
        """Return arm -> its observations as gains over the control, compared within epochs.

        The control's own mean is 0. `total` is the number of arms that the experiment has.
        """
        pairs = {arm: self.pair(metric, arm, control, total) for arm in arms if arm != control}
        gains = {arm: replace(treated, mean=treated.mean - other.mean) for arm, (treated, other) in pairs.items()}
        best_known = max((other for _, other in pairs.values()), key=lambda other: other.n)
        return {control: replace(best_known, mean=0.0)} | gains


@dataclass(frozen=True, slots=True)
class Sources:
    """The sums from which a look computes observations."""

    values: MetricMoments
    """Values that judged units have reported."""
    judged: Mapping[Judged, int]
    """Numbers of units whose windows are over."""
    homes: Homes
    """Clusters and blocks that count."""
    settings: LookSettings
    pooled_moments: dict[tuple[str, str, str], Moments] = field(default_factory=dict)
    """Results of `Look.pooled_moments`, for which later looks without news ask again."""
    filled_summaries: dict[FillArguments, tuple[Summary, Summary]] = field(default_factory=dict)
    """Results of `Look.filled_summaries`."""
    mean_excess: dict[tuple[FillArguments, End], tuple[float, float]] = field(default_factory=dict)
    """Results of `Look.mean_excess`."""


@dataclass(frozen=True, slots=True)
class Look(Observations):
    """The state of the evidence at one moment.

    All values are of units whose windows are over; a unit that has reported nothing counts as the experiment's config says,
    or not at all.
    """

    units: Mapping[str, ArmSummary] = field(default_factory=dict)
    """Arm -> its units and their outcomes, unit by unit."""
    exposed: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Epoch -> arm -> number of units first exposed in it."""
    assigned: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Epoch -> arm -> number of assigned units, clusters or blocks."""
    shares: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Epoch -> the weights in force, from the stage's first epoch on."""
    reporting: Observations = Observations()
    """Metric (or `outcome`) -> 1 for a unit that has reported it and 0 for one that has not, as observations."""
    reported: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Metric (or `outcome`) -> arm -> number of its units that have reported it."""
    bets: Mapping[BetQuestion, BetEvidence] = field(default_factory=dict)
    """Evidence of the betting tests, by question."""
    barred: str | None = None
    """Sentence that says why no arm may get more traffic: another experiment has rolled its weights back; else None."""
    sources: Sources | None = None

    def pooled_moments(self, metric: str, treatment: str, control: str) -> Moments:
        """Return the moments of the metric's values that judged units of both arms have reported, together."""
        if self.sources is None:
            return NO_MOMENTS
        names = metric, treatment, control
        if names not in self.sources.pooled_moments:
            parts = (
                moments for key, moments in self.sources.values.items() if key[0] == metric and key[2] in names[1:]
            )
            self.sources.pooled_moments[names] = reduce(merge_moments, parts, NO_MOMENTS)
        return self.sources.pooled_moments[names]

    def filled_summaries(
        self, metric: str, treatment: str, control: str, arms: int, *, value: float, shift: float, scale: float
    ) -> tuple[Summary, Summary]:
        """Return the summaries of `pair` over all judged units, where missing values are filled.

        A unit that has not reported the metric counts as `value`; `shift` is added to the treatment's reported values, and
        the control's are multiplied by `scale`.
        """
        if self.sources is None:
            return NO_OUTCOME, NO_OUTCOME
        fill = metric, treatment, control, arms, value, shift, scale
        if fill in self.sources.filled_summaries:
            return self.sources.filled_summaries[fill]
        values, judged = self._of_pair(metric, {treatment: (1.0, shift), control: (scale, 0.0)})
        observations = _group_observations(
            _fill_missing(values, judged, {metric: value}), self.sources.homes, self.sources.settings
        )
        return self.sources.filled_summaries.setdefault(fill, observations.pair(metric, treatment, control, arms))

    def mean_excess(
        self,
        metric: str,
        treatment: str,
        control: str,
        arms: int,
        *,
        value: float,
        end: End,
        shift: float,
        scale: float,
    ) -> tuple[float, float]:
        """Return the average excess over `value` of the treatment's and of the control's numbers, at most.

        At the low end it is the excess below `value`. The numbers are those of `filled_summaries`; one on the near side of
        `value` counts 0. See `missing_outcomes.mean_excess_beyond`.
        """
        if self.sources is None:
            return 0.0, 0.0
        request = (metric, treatment, control, arms, value, shift, scale), end
        if request in self.sources.mean_excess:
            return self.sources.mean_excess[request]
        values, judged = self._of_pair(metric, {treatment: (1.0, shift), control: (scale, 0.0)})
        parts = {
            key: observations.n * mean_excess_beyond(observations, value, end) for key, observations in values.items()
        }
        values = {(metric, *key): Moments(n, parts.get((metric, *key), 0.0) / n, 0.0) for key, n in judged.items()}
        observations = _group_observations(values, self.sources.homes, self.sources.settings)
        treated, other = observations.pair(metric, treatment, control, arms)
        return self.sources.mean_excess.setdefault(request, (treated.mean, other.mean))

    def _of_pair(
        self, metric: str, changes: Mapping[str, tuple[float, float]]
    ) -> tuple[MetricMoments, Mapping[Judged, int]]:
        """Return the reported values of these arms, changed, and the numbers of judged units.

        Each value is multiplied by its arm's factor, and then its arm's shift is added.
        """
        assert self.sources is not None
        values = {
            key: Moments(n, factor * mean + more, factor**2 * squares, factor * low + more, factor * high + more)
            for key, (n, mean, squares, low, high) in self.sources.values.items()
            if key[0] == metric and key[2] in changes
            for factor, more in (changes[key[2]],)
        }
        return values, {key: n for key, n in self.sources.judged.items() if key[1] in changes}


def look_at(totals: Totals, settings: LookSettings, now: float) -> Look:
    """Compute a look from the sums; `now` (seconds since 1970) decides which blocks are over.

    A cluster counts in the arm it had first, by its units in that arm. A block counts once it and the windows of its
    units are over, without its washout; a block in which the weights changed does not count.
    """
    exposures, judged = totals.exposures, totals.judged
    exposed: Counts = {}
    for (epoch, arm, _), n in exposures.items():
        _add_count(exposed, epoch, arm, n)
    reported: dict[str, dict[str, int]] = {"outcome": {}}
    outcomes: dict[str, Moments] = {}
    for (metric, _, arm, _, _), moments in totals.values.items():
        of_arms = reported.setdefault(metric, {})
        of_arms[arm] = of_arms.get(arm, 0) + moments.n
        if metric == "outcome":
            outcomes[arm] = merge_moments(outcomes.get(arm, NO_MOMENTS), moments)
    units: dict[str, ArmSummary] = {}
    for arm in {arm for _, arm, _ in exposures}:
        exposed_units = sum(of_arms.get(arm, 0) for of_arms in exposed.values())
        judged_units = sum(n for key, n in judged.items() if key[1] == arm)
        units[arm] = ArmSummary(exposed_units, judged_units, outcomes.get(arm, NO_MOMENTS).summary())
    homes = _find_homes(exposures)
    assigned: Counts = {}
    for home in homes.values():
        _add_count(assigned, home.epoch, home.arm, 1)
    if settings.randomize == "switchback":
        done = {name for name, home in homes.items() if not home.changed and sum(block_span(name)) <= now}
        homes = {name: homes[name] for name in done - _clusters_under_way(exposures, judged)}
    values = _group_observations(_fill_missing(totals.values, judged, dict(settings.missing)), homes, settings)
    reporting = _group_observations(_reporting_indicators(totals.values, judged, reported), homes, settings)
    assigned = exposed if settings.randomize == "session" else assigned
    sources = Sources(totals.values, judged, homes, settings)
    return Look(
        values.values,
        values.strata,
        values.blocks,
        units=units,
        exposed=exposed,
        assigned=assigned,
        reporting=reporting,
        reported=reported,
        sources=sources,
    )


def _add_count(counts: Counts, epoch: int, arm: str, n: int) -> None:
    arm_counts = counts.setdefault(epoch, {})
    arm_counts[arm] = arm_counts.get(arm, 0) + n


def _fill_missing(values: MetricMoments, judged: Mapping[Judged, int], missing: Mapping[str, float]) -> MetricMoments:
    """Return the values that also contain the units that have reported nothing, each counted as `missing` says."""
    filled = dict(values)
    for metric, value in missing.items():
        for key, n in judged.items():
            reported = values.get((metric, *key), NO_MOMENTS)
            filled[(metric, *key)] = merge_moments(reported, Moments(n - reported.n, value, 0.0))
    return filled


def _reporting_indicators(values: MetricMoments, judged: Mapping[Judged, int], metrics: Iterable[str]) -> MetricMoments:
    """Return the moments of 1 for each unit that has reported the metric and 0 for each that has not."""
    indicators: dict[MetricCell, Moments] = {}
    for metric in metrics:
        for key, n in judged.items():
            reports = values.get((metric, *key), NO_MOMENTS).n
            indicators[(metric, *key)] = Moments(n, reports / n, reports * (n - reports) / n)
    return indicators


def _group_observations(values: MetricMoments, homes: Homes, settings: LookSettings) -> Observations:
    """Group values by what was assigned: units, clusters or blocks.

    `homes` has the clusters and blocks that count.
    """
    if settings.randomize == "session":
        pooled: dict[str, dict[str, Moments]] = {}
        strata: dict[str, dict[int, dict[str, Summary]]] = {}
        for (metric, epoch, arm, _, _), moments in values.items():
            by_arm = pooled.setdefault(metric, {})
            by_arm[arm] = merge_moments(by_arm.get(arm, NO_MOMENTS), moments)
            strata.setdefault(metric, {}).setdefault(epoch, {})[arm] = moments.summary()
        plain = {metric: {arm: m.summary() for arm, m in by_arm.items()} for metric, by_arm in pooled.items()}
        return Observations(plain, strata)
    of_clusters: dict[str, dict[str, Moments]] = {}
    for (metric, _, arm, cluster, counts), moments in values.items():
        if counts and moments.n and cluster in homes and homes[cluster].arm == arm:
            by_cluster = of_clusters.setdefault(metric, {})
            by_cluster[cluster] = merge_moments(by_cluster.get(cluster, NO_MOMENTS), moments)
    means: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    for metric, by_cluster in of_clusters.items():
        for cluster, moments in by_cluster.items():
            epoch, arm, _ = homes[cluster]
            means.setdefault(metric, {}).setdefault(epoch, {}).setdefault(arm, {})[cluster] = moments.mean
    strata = {
        metric: {
            epoch: {arm: summary_of(list(of_arm.values())) for arm, of_arm in arms.items()}
            for epoch, arms in moments.items()
        }
        for metric, moments in means.items()
    }
    return Observations(_pool_epochs(means), strata, means if settings.randomize == "switchback" else {})


def _pool_epochs(means: dict[str, dict[int, dict[str, dict[str, float]]]]) -> dict[str, dict[str, Summary]]:
    pooled: dict[str, dict[str, list[float]]] = {}
    for metric, by_epoch in means.items():
        for by_arm in by_epoch.values():
            for arm, means_by_block in by_arm.items():
                pooled.setdefault(metric, {}).setdefault(arm, []).extend(means_by_block.values())
    return {
        metric: {arm: summary_of(means_of_arm) for arm, means_of_arm in arms.items()} for metric, arms in pooled.items()
    }


def _clusters_under_way(exposures: Mapping[Exposed, int], judged: Mapping[Judged, int]) -> set[str]:
    """Return the clusters that have units whose windows are not over."""
    pending = dict(exposures)
    for (epoch, arm, cluster, _), n in judged.items():
        pending[epoch, arm, cluster] -= n
    return {cluster for (_, _, cluster), n in pending.items() if n}


def _find_homes(exposures: Mapping[Exposed, int]) -> dict[str, Home]:
    """Return the home of each cluster or block.

    Of two arms in its first epoch it is the one with more units.
    """
    homes: dict[str, Home] = {}
    for epoch, arm, cluster in sorted(exposures, key=lambda key: (key[0], -exposures[key], key[1])):
        if cluster:
            home = homes.get(cluster)
            homes[cluster] = Home(epoch, arm, False) if home is None else home._replace(changed=True)
    return homes
