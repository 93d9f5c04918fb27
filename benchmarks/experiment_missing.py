"""Simulated experiments for `experiments.py` whose outcomes come late, or do not come.

Units are judged in the order in which they came, since all windows are equally long: a look sees the first n of each arm,
and of these the ones that have reported in time. So blocks of units between looks are drawn as wholes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from experiment_streams import CHUNK, Looks
from scipy.special import ndtri

from marl_ray.experiments.reporting import ALARM, allowance
from marl_ray.experiments.sequential import harm
from marl_ray.experiments.statistics import Summary

LOOKS = 200
Evidence = Callable[..., np.ndarray]
"""`experiments.log_evidence`."""


class Arm(NamedTuple):
    """How an arm's units report: the chances of one whose outcome is 1 and of one whose outcome is 0."""

    of_ones: float
    of_zeros: float
    ones: float = 0.5
    """Share of units whose outcome is 1."""


class Missing(NamedTuple):
    """An experiment whose arms differ in nothing but their reports."""

    treatment: Arm
    control: Arm
    block: int = 10
    """Units per arm between looks."""
    value: float | None = None
    """What stands for a missing outcome; None if it does not count."""
    margin: float = 0.1
    """Of promotion, in units of what counts."""
    as_they_come: tuple[float, float] | None = None
    """Mean delays of ones in treatment and control, in looks, to be judged without any window; zeros come at once."""

    def at_margin(self) -> "Missing":
        """With a treatment that is worse by the margin."""
        arm = self.treatment
        loss = self.margin if self.value is None else self.margin / arm.of_ones
        return self._replace(treatment=arm._replace(ones=arm.ones - loss))


class MissingErrors(NamedTuple):
    """Shares of experiments in which any look erred."""

    name: str
    reported: tuple[float, float]
    """Shares of units that report, in treatment and control."""
    false_rollbacks: float
    false_promotions: float
    alarms: float
    """Shares of experiments in which reporting is ever found unequal."""
    careless: float
    """False rollbacks if nothing watched the reports nor allowed for them."""
    as_they_come: float | None
    """False rollbacks if outcomes counted as soon as they come, where simulated."""


def late(mean: float, window: float = 1.0) -> float:
    """Chance that an exponential delay ends within the window."""
    return 1 - math.exp(-window / mean)


def _arm(rng: np.random.Generator, arm: Arm, case: Missing, runs: int) -> tuple[np.ndarray, ...]:
    """(runs, looks): units judged, units that have reported, and what counts: number, mean, variance."""
    ones = rng.binomial(case.block, arm.ones, (runs, LOOKS))
    told_ones, told_zeros = rng.binomial(ones, arm.of_ones), rng.binomial(case.block - ones, arm.of_zeros)
    high, low = told_ones.cumsum(1).astype(float), told_zeros.cumsum(1).astype(float)
    judged = np.broadcast_to(np.arange(1.0, LOOKS + 1) * case.block, high.shape)
    reported = high + low
    filled = judged - reported if case.value is not None else np.zeros_like(high)
    value = 0.0 if case.value is None else case.value
    n = np.maximum(reported + filled, 1e-9)
    mean = (high + filled * value) / n
    squares = high + filled * value**2 - n * mean**2
    return judged, reported, reported + filled, mean, np.maximum(squares, 0) / np.maximum(n - 1, 1e-9)


def looks_at(case: Missing, rng: np.random.Generator, runs: int) -> tuple[Looks, Looks]:
    """What is seen of the outcomes, and of the reports (1 for a unit that has reported)."""
    (judged, told_t, n_t, mean_t, var_t), (_, told_c, n_c, mean_c, var_c) = (
        _arm(rng, arm, case, runs) for arm in (case.treatment, case.control)
    )
    shares = told_t / judged, told_c / judged
    bernoulli = [share * (1 - share) for share in shares]
    return Looks(n_t, n_c, mean_t, mean_c, var_t, var_c), Looks(judged, judged, *shares, *bernoulli)


def alarms_of(reports: Looks, evidence: Evidence) -> np.ndarray:
    """`reporting.unequal_reporting` at every look."""
    n_t, n_c, mean_t, mean_c, var_t, var_c = reports
    other = Looks(n_c, n_t, mean_c, mean_t, var_c, var_t)
    limit = -math.log(ALARM / 2)
    found = [evidence(one, 0.0, -1, True, ALARM / 2) for one in (reports, other)]
    for at in ((0, 3), (1, LOOKS - 1)):
        arms = [Summary(int(n[at]), float(mean[at]), 0.0) for n, mean in ((n_t, mean_t), (n_c, mean_c))]
        test = harm(*arms, alpha=ALARM / 2, margin=0.0, min_outcomes=50, binary=True)
        assert test.proven == (found[0][at] > limit), at
    return np.maximum(*found) > limit


def watched(case: Missing, reports: Looks, evidence: Evidence) -> np.ndarray:
    """The alarms, where what is missing does not count; else nothing is missing."""
    alarms = alarms_of(reports, evidence)
    return alarms if case.value is None else np.zeros_like(alarms)


def _as_they_come(case: Missing, rng: np.random.Generator, runs: int, evidence: Evidence, limit: float) -> np.ndarray:
    """Whether harm is ever proven by the outcomes that have come so far."""
    arms = []
    for delay in case.as_they_come or ():
        seen = np.zeros((2, runs, LOOKS))
        for _ in range(case.block):
            ones = rng.random((runs, LOOKS)) < case.control.ones
            # A unit of look i is seen at look i plus its delay.
            at = np.arange(LOOKS) + np.where(ones, rng.exponential(delay, ones.shape), 0.0).astype(int)
            for outcome in (0, 1):
                inside = (ones == outcome) & (at < LOOKS)
                rows, _ = np.nonzero(inside)
                np.add.at(seen[outcome], (rows, at[inside]), 1)
        low, high = seen.cumsum(2)
        n = np.maximum(low + high, 1)
        mean = high / n
        arms.append((low + high, mean, mean * (1 - mean)))
    (n_t, mean_t, var_t), (n_c, mean_c, var_c) = arms
    return (evidence(Looks(n_t, n_c, mean_t, mean_c, var_t, var_c), 0.0, -1) > limit).any(1)


def allowed(case: Missing, looks: Looks, reports: Looks, sign: int) -> Looks:
    """The treatment's mean moved against the claim by `reporting.allowance`."""
    if case.value is not None:
        return looks
    r_t, r_c = reports.mean_t, reports.mean_c
    least, most = np.minimum(r_t, r_c), np.maximum(r_t, r_c)
    q = np.where(least > 0, 1 - least / np.maximum(most, 1e-9), 0.0)
    more = np.sqrt(np.where(r_t > r_c, looks.var_t, looks.var_c))
    moved = more * np.exp(-(ndtri(1 - q) ** 2) / 2) / math.sqrt(2 * math.pi) / (1 - q)
    for at in ((0, 30), (1, LOOKS - 1)):
        arms = [Summary(2, float(looks[k][at]), float(looks[k + 2][at])) for k in (2, 3)]
        told = [Summary(2, float(share[at]), 0.0) for share in (r_t, r_c)]
        assert math.isclose(allowance(*arms, *told), moved[at], rel_tol=1e-6, abs_tol=1e-9), at
    return looks._replace(mean_t=looks.mean_t - sign * moved)


def missing_errors(name: str, case: Missing, runs: int, seed: int, evidence: Evidence, alpha: float) -> MissingErrors:
    """Rollback under no difference and margin 0; promotion under a loss of exactly the margin."""
    limit = -math.log(alpha)
    rollbacks, promotions, alarmed, careless, coming = [], [], [], [], []
    for k in range(runs // CHUNK):
        rng = np.random.default_rng([seed, k])
        looks, reports = looks_at(case, rng, CHUNK)
        alarm = watched(case, reports, evidence)
        proven = evidence(allowed(case, looks, reports, -1), 0.0, -1) > limit
        rollbacks.append((proven & ~alarm).any(1))
        alarmed.append(alarm.any(1))
        careless.append((evidence(looks, 0.0, -1) > limit).any(1))
        if case.as_they_come is not None:
            coming.append(_as_they_come(case, rng, CHUNK, evidence, limit))
        looks, reports = looks_at(case.at_margin(), rng, CHUNK)
        proven = evidence(allowed(case, looks, reports, 1), case.margin, 1) > limit
        promotions.append((proven & ~watched(case, reports, evidence)).any(1))
    shares = tuple(arm.ones * arm.of_ones + (1 - arm.ones) * arm.of_zeros for arm in (case.treatment, case.control))

    def share(found: list[np.ndarray]) -> float:
        return float(np.concatenate(found).mean())

    return MissingErrors(
        *(name, shares, share(rollbacks), share(promotions), share(alarmed), share(careless)),
        share(coming) if coming else None,
    )


def _cases() -> dict[str, Missing]:
    cases = {}
    for times in (1.5, 2.0, 3.0):
        slow = 20 * times, 20.0
        name = f"ones {times:g} times as late as the control's"
        cases[f"{name}, all within the window"] = Missing(Arm(1, 1), Arm(1, 1), as_they_come=slow)
        cut = Arm(late(0.5 * times), 1), Arm(late(0.5), 1)
        cases[f"{name}, beyond the window in part"] = Missing(*cut)
    for share in (0.01, 0.05, 0.2, 0.5):
        both, block = Arm(share, share), round(10 / share)
        cases[f"{share:.0%} report"] = Missing(both, both, block)
        cases[f"{share:.0%} report, `missing: 0`"] = Missing(both, both, block, 0.0, 0.1 * share)
    for share in (0.45, 0.25, 0.05, 0.01):
        cases[f"{share:.0%} report, 50% of the control"] = Missing(Arm(share, share), Arm(0.5, 0.5), round(5 / share))
    for share in (0.25, 0.05, 0.01):
        arms = Arm(2 * share, 0.3, 0.5), Arm(0.5 + share, 0.8, share / (0.5 + share))
        cases[f"{share:.0%} report a one in both arms, zeros unequally, `missing: 0`"] = Missing(
            *arms, round(5 / share), 0.0, 0.2 * share
        )
    cases["a tenth reports, ones only; all of the control"] = Missing(Arm(0.2, 0), Arm(1, 1))
    cases["a tenth reports, zeros only; all of the control"] = Missing(Arm(0, 0.2), Arm(1, 1))
    cases["45% of ones report, 50% of all others"] = Missing(Arm(0.45, 0.5), Arm(0.5, 0.5), 100)
    rare = Arm(late(1.0), 0.5, 0.05), Arm(late(0.5), 0.5, 0.05)
    name = "wrong: 5% ones, 2 times as late, beyond the window in part, and half of the zeros"
    cases[name] = Missing(*rare, 100, margin=0.02)
    return cases


MISSING = _cases()
"""The last is against the advice to count what is missing (`missing: 0`) where an outcome is rare: shown, not promised."""


def missing_table(rows: list[dict[str, Any]], rate: Callable[[float], str]) -> list[str]:
    """As Markdown."""
    lines = [
        "",
        "## Late and missing outcomes",
        "",
        "Arms whose units all have outcome 1 with a chance of a half, unless the row says otherwise, and differ in when or",
        f"whether they report; {LOOKS} looks at units whose windows are over. An outcome that is missing does not count,",
        "unless the row has `missing: 0`. Delays are exponential, that of the control with a mean of half the window where",
        "they go beyond it.",
        "",
        "- False rollback and promotion: as above, with the alarm on unequal reporting and the allowance for what is",
        "  missing (`reporting.py`).",
        "- Careless: false rollbacks by the same windows, if nothing watched the reports.",
        "- As they come: false rollbacks if outcomes counted as soon as they come, without windows.",
        "- Alarm: experiments in which reporting is ever found unequal.",
        "",
        "| outcomes | reported % | false rollbacks % | false promotions % | careless % | as they come % | alarm % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        reported = " / ".join(f"{100 * share:.3g}" for share in row["reported"])
        coming = "" if row["as_they_come"] is None else rate(row["as_they_come"])
        shares = " | ".join(rate(row[key]) for key in ("false_rollbacks", "false_promotions", "careless"))
        lines.append(f"| {row['name']} | {reported} | {shares} | {coming} | {rate(row['alarms'])} |")
    return lines
