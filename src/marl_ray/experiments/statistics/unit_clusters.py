"""Statistics of clusters of units and of blocks of time.

One observation is the mean of a cluster's units, whatever their number. Units of one cluster share a match, a server,
an hour. Counted one by one they look like far more evidence than they are, and one bad evening would roll back an arm
that is no worse. Clusters are independent: chance assigns them.

Blocks of time (a switchback) are correlated among themselves, but the coin that gave them their arms is not: what
matters is how the difference varies over draws of the assignment (Bojinov, Simchi-Levi, Zhao, arXiv 2009.00148). A
long-run variance along each arm would add drift that both arms share and that the assignment has balanced. The draws are
independent between groups of consecutive blocks (`assignment`), so the difference's variance is that of independent groups.
With b's share in the difference

    psi_b = (y_b - mean_t) / n_t in the treatment, -(y_b - mean_c) / n_c in the control,

(times its stratum's weight) it is the sum over groups of squared group totals of psi (in pairs with one block of each
arm: the paired test's). This variance is smaller than the two-sample variance where neighbours are alike, and larger
where one is high because the other was low.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.sequential import BORROWED_WEIGHT

Blocks = Mapping[tuple[int, int], float]
"""(Group, place in it) -> the block's mean."""
MIN_GROUPS = 16
"""Below this many groups their variance is not believed to be small."""


def summary_of(means: list[float]) -> Summary:
    """Return the summary (count, mean, variance) of observations."""
    n = len(means)
    if not n:
        return Summary(0, math.nan, 0.0)
    mean = math.fsum(means) / n
    return Summary(n, mean, math.fsum((x - mean) ** 2 for x in means) / (n - 1) if n > 1 else 0.0)


def pool_strata(strata: Iterable[tuple[Summary, Summary]]) -> tuple[Summary, Summary]:
    """Return one pair of summaries, treatment and control, whose difference is the one within strata.

    Every test takes it. Outcomes drift, and when the treatments' share is raised, more of the treatment's units than of
    the control's are late: means over all units then differ although no stratum's do. Strata (epochs) weigh w = n_t n_c
    / (n_t + n_c), which is best where variances are equal and depends on no outcome; one without both arms weighs
    nothing. The means are weighted ones, counts the effective ones, and variances such that s_t^2 / n_t + s_c^2 / n_c
    is the variance of the difference, to which each stratum adds its own: outcomes may vary more in one epoch than in
    another, and one with equal shares adds more per unit. An arm's variance in a stratum carries `BORROWED_WEIGHT`
    outcomes' worth of the largest of both arms' there and of both over all strata: the few outcomes of a short epoch
    may be alike by luck. Of one stratum the summaries are the plain ones.
    """
    usable = [(left, right) for left, right in strata if left.n and right.n]
    if len(usable) < 2:
        return usable[0] if usable else (Summary(0, math.nan, 0.0), Summary(0, math.nan, 0.0))
    weights = [left.n * right.n / (left.n + right.n) for left, right in usable]
    shares = [weight / math.fsum(weights) for weight in weights]
    arms = [left for left, _ in usable], [right for _, right in usable]
    overall = max(_variance_within(parts) for parts in arms)
    largest_variances = [max(left.variance, right.variance, overall) for left, right in usable]
    first, second = (
        _combine_strata(
            shares,
            parts,
            [_mixed_variance(part, largest) for part, largest in zip(parts, largest_variances, strict=True)],
        )
        for parts in arms
    )
    return first, second


def _variance_within(parts: list[Summary]) -> float:
    """Return the variance of an arm within its strata."""
    freedom = sum(part.n - 1 for part in parts)
    return math.fsum((part.n - 1) * part.variance for part in parts) / freedom if freedom else 0.0


def _mixed_variance(part: Summary, larger: float) -> float:
    return (part.n * part.variance + BORROWED_WEIGHT * larger) / (part.n + BORROWED_WEIGHT)


def _combine_strata(shares: list[float], parts: list[Summary], variances: list[float]) -> Summary:
    effective = 1 / math.fsum(share**2 / part.n for share, part in zip(shares, parts, strict=True))
    means = [part.mean for part in parts]
    # However the sum rounds, the mean lies between those of the strata: a share of failures is never above 1.
    mean = math.fsum(share * mean for share, mean in zip(shares, means, strict=True))
    mean = min(max(mean, min(means)), max(means))
    squared = math.fsum(
        share**2 / part.n * variance for share, part, variance in zip(shares, parts, variances, strict=True)
    )
    # Rounding of the sum must not make the count of a single stratum one less.
    return Summary(int(effective * (1 + 1e-12)), mean, squared * effective)


def block_summaries(strata: Sequence[tuple[Blocks, Blocks]]) -> tuple[Summary, Summary]:
    """Apply `pool_strata` to both arms' blocks, with the variance of a difference computed by groups.

    The variances are scaled so that s_t^2 / n_t + s_c^2 / n_c is that variance. This variance is raised by one of its
    standard errors, so that its noise spends no alpha. With fewer than `MIN_GROUPS` groups it is never below the
    two-sample variance: so few groups cannot show that neighbours are alike.
    """
    usable = [(left, right) for left, right in strata if left and right]
    summaries = [(summary_of(list(left.values())), summary_of(list(right.values()))) for left, right in usable]
    first, second = pool_strata(summaries)
    two_sample = first.variance / first.n + second.variance / second.n if first.n and second.n else 0.0
    total = math.fsum(left.n * right.n / (left.n + right.n) for left, right in summaries)
    groups: dict[int, float] = {}
    for blocks, (left, right) in zip(usable, summaries, strict=True):
        weight = left.n * right.n / (left.n + right.n) / total
        for sign, values, arm in ((weight, blocks[0], left), (-weight, blocks[1], right)):
            for (group, _), value in values.items():
                groups[group] = groups.get(group, 0.0) + sign * (value - arm.mean) / arm.n
    k = len(groups)
    if not two_sample > 0 or k < 2:
        return first, second
    within_groups = k / (k - 1) * math.fsum(total**2 for total in groups.values())
    scale = within_groups / two_sample * (1 + math.sqrt(2 / (k - 1)))
    scale = max(scale, 1.0) if k < MIN_GROUPS else scale
    return replace(first, variance=first.variance * scale), replace(second, variance=second.variance * scale)
