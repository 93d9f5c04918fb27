"""Sample ratio mismatch: a test, valid at any time, that arms get the shares that weights promise.

Lindon and Malek, arXiv 2011.03567: under shares p each unit is a draw from a multinomial; the alternative is a
Dirichlet mixture around p. The ratio of both likelihoods,

    E = B(a + counts) / B(a) / prod_j p_j^counts_j,   a = concentration * p,   B the multivariate beta function,

is a martingale under p, so it ever reaches 1 / alpha with probability alpha at most, however often one looks. A
mismatch means that outcomes cannot be trusted: units get lost, counted twice, or the table is not the one configured.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from marl_ray.errors import MarlRayError

CONCENTRATION = 1000.0
"""The alternative's shares lie around sqrt(p (1 - p) / 1000) from p: mismatches of a few per cent are found soonest."""
ALARM_LEVEL = 0.001
"""Probability of a false alarm, over all looks at an experiment; a false one holds it until a person looks."""


class Mismatch(NamedTuple):
    """Result of the test that the counts agree with the shares."""

    log_e: float
    """Natural logarithm of the evidence against the shares."""
    p_value: float
    """Valid at all times."""
    alarm: bool


def sample_ratio(counts: Mapping[str, int], shares: Mapping[str, float], alpha: float = ALARM_LEVEL) -> Mismatch:
    """Test the number of units per arm against expected relative shares that never changed. Returns a `Mismatch`."""
    return sample_ratio_of_epochs([(counts, shares)], alpha)


def sample_ratio_of_epochs(
    epochs: Iterable[tuple[Mapping[str, int], Mapping[str, float]]], alpha: float = ALARM_LEVEL
) -> Mismatch:
    """Test (counts, shares) of several epochs together.

    Each epoch has its own alternative, and their evidence multiplies.
    """
    log_e = math.fsum(_log_evidence(counts, shares) for counts, shares in epochs)
    p_value = math.exp(-max(log_e, 0.0))
    return Mismatch(log_e, p_value, p_value <= alpha)


def _log_evidence(counts: Mapping[str, int], shares: Mapping[str, float]) -> float:
    total = math.fsum(shares.values())
    if not all(0 <= share < math.inf for share in shares.values()) or not 0 < total < math.inf:
        raise MarlRayError(f"shares: expected finite numbers, not negative and not all zero, got {dict(shares)}")
    if any(count < 0 for count in counts.values()):
        raise MarlRayError(f"counts: expected no negative number, got {dict(counts)}")
    if any(count and not shares.get(arm) for arm, count in counts.items()):
        # A unit is in an arm that gets none.
        return math.inf
    n = sum(counts.values())
    terms = [math.lgamma(CONCENTRATION), -math.lgamma(CONCENTRATION + n)]
    for arm, count in counts.items():
        if count:
            prior = CONCENTRATION * shares[arm] / total
            terms += [math.lgamma(prior + count), -math.lgamma(prior), -count * math.log(shares[arm] / total)]
    return math.fsum(terms)
