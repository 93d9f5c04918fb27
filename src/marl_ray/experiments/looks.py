"""One look at an experiment: from sums over its units to what the tests take, an observation per unit, cluster or block."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from marl_ray.experiments.assignment import block_group, block_span
from marl_ray.experiments.clusters import Blocks, block_summaries, stratified, summary_of
from marl_ray.experiments.statistics import Summary
from marl_ray.experiments.sums import NONE, Design, Exposed, Moments, Valued, merged
from marl_ray.experiments.units import NO_OUTCOME, ArmSummary

Counts = dict[int, dict[str, int]]
"""Epoch -> arm -> how many."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is known at one moment."""

    units: Mapping[str, ArmSummary] = field(default_factory=dict)
    """Arm -> its exposures, and its outcomes unit by unit."""
    exposed: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Epoch -> arm -> units first exposed then."""
    assigned: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """The same of what is assigned: units, clusters or blocks."""
    shares: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Epoch -> the weights in force, from the stage's first epoch on."""
    values: Mapping[str, Mapping[str, Summary]] = field(default_factory=dict)
    """Metric (`outcome` among them) -> arm -> its observations."""
    strata: Mapping[str, Mapping[int, Mapping[str, Summary]]] = field(default_factory=dict)
    """The same by the epoch that they were assigned in: metric -> epoch -> arm."""
    blocks: Mapping[str, Mapping[int, Mapping[str, Mapping[str, float]]]] = field(default_factory=dict)
    """Of a switchback: metric -> epoch -> arm -> block -> its mean."""

    def summary(self, metric: str, arm: str) -> Summary:
        """The arm's observations."""
        return self.values.get(metric, {}).get(arm, NO_OUTCOME)

    def pair(self, metric: str, treatment: str, control: str, arms: int) -> tuple[Summary, Summary]:
        """Both arms' observations as the tests take them, compared within epochs; `arms` is the number that the
        experiment has."""
        if metric not in self.blocks:
            by_epoch = self.strata.get(metric, {}).values()
            return stratified((of.get(treatment, NO_OUTCOME), of.get(control, NO_OUTCOME)) for of in by_epoch)

        def grouped(blocks: Mapping[str, float]) -> Blocks:
            return {block_group(name, arms): mean for name, mean in blocks.items()}

        by_epoch_blocks = self.blocks[metric].values()
        return block_summaries(
            [(grouped(of.get(treatment, {})), grouped(of.get(control, {}))) for of in by_epoch_blocks]
        )


def look_at(exposures: Mapping[Exposed, int], values: Mapping[Valued, Moments], design: Design, now: float) -> Look:
    """The look that the sums give; `now` (seconds since 1970) says which blocks are over.

    A cluster counts in the arm it had first, by the units that met that arm. A block counts once it is over, without
    its washout; one in which the weights changed does not.
    """
    exposed: Counts = {}
    for (epoch, arm, _), n in exposures.items():
        here = exposed.setdefault(epoch, {})
        here[arm] = here.get(arm, 0) + n
    outcomes: dict[str, Moments] = {}
    for (metric, _, arm, _, _), found in values.items():
        if metric == "outcome":
            outcomes[arm] = merged(outcomes.get(arm, NONE), found)
    totals = {arm: sum(counts.get(arm, 0) for counts in exposed.values()) for arm in {a for _, a, _ in exposures}}
    units = {arm: ArmSummary(n, outcomes.get(arm, NONE).summary()) for arm, n in totals.items()}
    if design.randomize == "session":
        pooled: dict[str, dict[str, Moments]] = {}
        strata: dict[str, dict[int, dict[str, Summary]]] = {}
        for (metric, epoch, arm, _, _), found in values.items():
            by_arm = pooled.setdefault(metric, {})
            by_arm[arm] = merged(by_arm.get(arm, NONE), found)
            strata.setdefault(metric, {}).setdefault(epoch, {})[arm] = found.summary()
        plain = {metric: {arm: m.summary() for arm, m in by_arm.items()} for metric, by_arm in pooled.items()}
        return Look(units, exposed, exposed, {}, plain, strata)
    homes = _homes(exposures)
    assigned: Counts = {}
    for epoch, arm, _ in homes.values():
        here = assigned.setdefault(epoch, {})
        here[arm] = here.get(arm, 0) + 1
    if design.randomize == "switchback":
        homes = {name: home for name, home in homes.items() if not home[2] and sum(block_span(name)) <= now}
    of_clusters: dict[str, dict[str, Moments]] = {}
    for (metric, _, arm, cluster, counts), found in values.items():
        if counts and cluster in homes and homes[cluster][1] == arm:
            by_cluster = of_clusters.setdefault(metric, {})
            by_cluster[cluster] = merged(by_cluster.get(cluster, NONE), found)
    means: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    for metric, by_cluster in of_clusters.items():
        for cluster, found in by_cluster.items():
            epoch, arm, _ = homes[cluster]
            means.setdefault(metric, {}).setdefault(epoch, {}).setdefault(arm, {})[cluster] = found.mean
    strata = {
        metric: {
            epoch: {arm: summary_of(list(of.values())) for arm, of in arms.items()} for epoch, arms in found.items()
        }
        for metric, found in means.items()
    }
    blocks = means if design.randomize == "switchback" else {}
    return Look(units, exposed, assigned, {}, _pooled(means), strata, blocks)


def _pooled(means: dict[str, dict[int, dict[str, dict[str, float]]]]) -> dict[str, dict[str, Summary]]:
    pooled: dict[str, dict[str, list[float]]] = {}
    for metric, by_epoch in means.items():
        for by_arm in by_epoch.values():
            for arm, of in by_arm.items():
                pooled.setdefault(metric, {}).setdefault(arm, []).extend(of.values())
    return {metric: {arm: summary_of(found) for arm, found in arms.items()} for metric, arms in pooled.items()}


def _homes(exposures: Mapping[Exposed, int]) -> dict[str, tuple[int, str, bool]]:
    """Cluster -> its first epoch, its arm then, and whether it has seen others."""
    found: dict[str, tuple[int, str, bool]] = {}
    for epoch, arm, cluster in sorted(exposures, key=lambda key: (key[0], -exposures[key], key[1])):
        if cluster:
            known = found.get(cluster)
            found[cluster] = (epoch, arm, False) if known is None else (known[0], known[1], True)
    return found
