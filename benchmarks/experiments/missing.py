"""Simulated experiments for `error_rates.py` whose outcomes come late, or do not come.

Units are judged in the order in which they came, since all windows are equally long: a look sees the first n of each arm,
and of these the ones that have reported in time. So blocks of units between looks are drawn as wholes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.experiments.streams import CHUNK, Looks
from marl_ray.experiments.evidence.looks import look_at
from marl_ray.experiments.evidence.running_sums import LookSettings, Totals
from marl_ray.experiments.lifecycle import RampPlan
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.missing_outcomes import ALARM_LEVEL
from marl_ray.experiments.statistics.moments import Moments
from marl_ray.experiments.statistics.sequential import judge_harm
from marl_ray.serving.ramp_decisions.questions import Measure, run_test

LOOKS = 200
"""Looks at an experiment."""
MIN_OUTCOMES = 50
"""Outcomes of each arm before anything is decided, as by default."""
Evidence = Callable[..., np.ndarray]
"""`log_evidence` of `benchmarks/experiments/error_rates.py`."""


class Arm(NamedTuple):
    """The reporting of an arm's units: the chances of one whose outcome is 1 and of one whose outcome is 0."""

    of_ones: float
    of_zeros: float
    ones: float = 0.5
    """Share of units whose outcome is 1."""


class Missing(NamedTuple):
    """An experiment whose arms differ in nothing but their reports."""

    treatment: Arm
    control: Arm
    block: int = 10
    """Units of an arm (of the treatment, where `ratio` is not 1) between looks."""
    value: float | None = None
    """The value that stands for a missing outcome; None if it does not count."""
    margin: float = 0.1
    """The margin of promotion, in units of the value that counts."""
    as_they_come: tuple[float, float] | None = None
    """Mean delays of ones in treatment and control, in looks, to be judged without any window; zeros come at once."""
    ratio: int = 1
    """Units of the control for each of the treatment."""

    def at_margin(self) -> "Missing":
        """Return the experiment with a treatment that is worse by the margin."""
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
    """Return the chance that an exponential delay ends within the window."""
    return 1 - math.exp(-window / mean)


class Seen(NamedTuple):
    """Counts of an arm at every look (runs, looks): units judged, and of these those that have reported 1, and 0."""

    judged: np.ndarray
    ones: np.ndarray
    zeros: np.ndarray

    def moments(self, shift: float = 0.0, fill: np.ndarray | float | None = None) -> tuple[np.ndarray, ...]:
        """Return number, mean and variance of the reports, moved by `shift`.

        If `fill` is given, all other units count as this value.
        """
        others = 0.0 if fill is None else self.judged - self.ones - self.zeros
        value = 0.0 if fill is None else fill
        n = np.maximum(self.ones + self.zeros + others, 1e-9)
        mean = (self.ones * (1 + shift) + self.zeros * shift + others * value) / n
        squares = self.ones * (1 + shift) ** 2 + self.zeros * shift**2 + others * value**2 - n * mean**2
        return n, mean, np.maximum(squares, 0) / np.maximum(n - 1, 1e-9)


def _arms(rng: np.random.Generator, case: Missing) -> list[Seen]:
    return [_arm(rng, case.treatment, case.block, CHUNK), _arm(rng, case.control, case.ratio * case.block, CHUNK)]


def _arm(rng: np.random.Generator, arm: Arm, block: int, runs: int) -> Seen:
    ones = rng.binomial(block, arm.ones, (runs, LOOKS))
    reported_ones, reported_zeros = rng.binomial(ones, arm.of_ones), rng.binomial(block - ones, arm.of_zeros)
    high, low = reported_ones.cumsum(1).astype(float), reported_zeros.cumsum(1).astype(float)
    return Seen(np.broadcast_to(np.arange(1.0, LOOKS + 1) * block, high.shape), high, low)


def looks_of(arms: Sequence[Seen], shift: float = 0.0, fill: np.ndarray | float | None = None) -> Looks:
    """Return the sums of treatment, moved by `shift`, and control, as a test gets them."""
    (n_t, mean_t, var_t), (n_c, mean_c, var_c) = arms[0].moments(shift, fill), arms[1].moments(0.0, fill)
    return Looks(n_t, n_c, mean_t, mean_c, var_t, var_c)


def reports_of(arms: Sequence[Seen]) -> Looks:
    """Return the sums of 1 for a unit that has reported and 0 for one that has not."""
    shares = [(arm.ones + arm.zeros) / arm.judged for arm in arms]
    return Looks(arms[0].judged, arms[1].judged, *shares, *(share * (1 - share) for share in shares))


def proof(case: Missing, arms: Sequence[Seen], sign: int, evidence: Evidence) -> np.ndarray:
    """Return ln E at every look, as `questions.run_test` has it.

    It is of all units where what is missing has a value, else at both ends of what has been reported, the margin being
    a part of what the treatment's units report.
    """
    margin = case.margin if sign > 0 else 0.0
    if case.value is not None:
        return evidence(looks_of(arms, 0.0, case.value), margin, sign)
    low = np.where(arms[0].zeros + arms[1].zeros > 0, 0.0, 1.0)
    high = np.where(arms[0].ones + arms[1].ones > 0, 1.0, 0.0)
    ends = np.minimum(low, low + margin), np.maximum(high, high + margin)
    log_e = np.minimum(*(evidence(looks_of(arms, margin, end), 0.0, sign, plain=True) for end in ends))
    # All of them are 0 or 1, so the test of such is run too; before both have come nothing is proven.
    shift = margin * (arms[0].ones + arms[0].zeros) / arms[0].judged
    events = np.minimum(*(evidence(looks_of(arms, 0.0, end), shift, sign, True) for end in (0.0, 1.0)))
    log_e = np.where(low < high, np.minimum(log_e, events), -np.inf)
    enough = np.minimum(*(arm.ones + arm.zeros for arm in arms)) >= MIN_OUTCOMES
    log_e = np.where(enough, log_e, -np.inf)
    for at in ((0, 30), (1, LOOKS - 1)):
        check(case, [Seen(*(part[at] for part in arm)) for arm in arms], sign, margin, float(log_e[at]))
    return log_e


def check(case: Missing, arms: Sequence[Seen], sign: int, margin: float, log_e: float) -> None:
    """Check that the vectorised formula is what the gateway's own look and test find of the same units."""
    judged = {(1, name, "", True): int(arm.judged) for name, arm in zip("tc", arms, strict=True)}
    values = {}
    for name, arm in zip("tc", arms, strict=True):
        ones, zeros = int(arm.ones), int(arm.zeros)
        mean = ones / max(ones + zeros, 1)
        moments = Moments(ones + zeros, mean, ones * (1 - mean), *((0.0 if zeros else 1.0), (1.0 if ones else 0.0)))
        if ones + zeros:
            values["outcome", 1, name, "", True] = moments
    exposed = {key[:3]: n for key, n in judged.items()}
    look = look_at(Totals(exposed, judged, values), LookSettings(), 0.0)
    plan = RampPlan("c", {"c": 1.0, "t": 1.0})
    measure = Measure("outcome", "higher", margin, False, None, None)
    answer = run_test(sign, look, measure, "t", plan, alpha=0.05, min_outcomes=MIN_OUTCOMES, excludes_missing=True)
    test = answer.test
    if math.isfinite(log_e):
        exact = math.log(test.e_value)
        assert (
            math.isclose(exact, log_e, rel_tol=1e-6 if log_e > 0 else 1e-2, abs_tol=1e-6) or min(exact, log_e) >= 700
        ), case
    else:
        assert not test.proven and test.e_value == 1.0, case


def alarms_of(reports: Looks, evidence: Evidence) -> np.ndarray:
    """Return True at every look (runs, looks) where `missing_outcomes.judge_reporting` raises an alarm."""
    n_t, n_c, mean_t, mean_c, var_t, var_c = reports
    other = Looks(n_c, n_t, mean_c, mean_t, var_c, var_t)
    limit = -math.log(ALARM_LEVEL / 2)
    alarms = [evidence(side, 0.0, -1, True, ALARM_LEVEL / 2) for side in (reports, other)]
    for at in ((0, 3), (1, LOOKS - 1)):
        arms = [Summary(int(n[at]), float(mean[at]), 0.0) for n, mean in ((n_t, mean_t), (n_c, mean_c))]
        test = judge_harm(*arms, alpha=ALARM_LEVEL / 2, margin=0.0, min_outcomes=50, binary=True)
        assert test.proven == (alarms[0][at] > limit), at
    return np.maximum(*alarms) > limit


def watch_reports(case: Missing, reports: Looks, evidence: Evidence) -> np.ndarray:
    """Return the alarms, where what is missing does not count; else nothing is missing."""
    alarms = alarms_of(reports, evidence)
    return alarms if case.value is None else np.zeros_like(alarms)


def _judge_as_they_come(
    case: Missing, rng: np.random.Generator, runs: int, evidence: Evidence, limit: float
) -> np.ndarray:
    """Return True where (runs,) harm is ever proven by the outcomes that have come so far."""
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
    proven: np.ndarray = evidence(Looks(n_t, n_c, mean_t, mean_c, var_t, var_c), 0.0, -1) > limit
    return np.asarray(proven.any(1))


def missing_errors(name: str, case: Missing, runs: int, seed: int, evidence: Evidence, alpha: float) -> MissingErrors:
    """Simulate rollback under no difference and margin 0, and promotion under a loss of exactly the margin."""
    limit = -math.log(alpha)
    rollbacks: list[Any] = []
    promotions, alarmed, careless, coming = (list[Any]() for _ in range(4))
    for k in range(runs // CHUNK):
        rng = np.random.default_rng([seed, k])
        arms = _arms(rng, case)
        alarm = watch_reports(case, reports_of(arms), evidence)
        rollbacks.append(((proof(case, arms, -1, evidence) > limit) & ~alarm).any(1))
        alarmed.append(alarm.any(1))
        careless.append((evidence(looks_of(arms, 0.0, case.value), 0.0, -1) > limit).any(1))
        if case.as_they_come is not None:
            coming.append(_judge_as_they_come(case, rng, CHUNK, evidence, limit))
        arms = _arms(rng, case.at_margin())
        proven = proof(case, arms, 1, evidence) > limit
        promotions.append((proven & ~watch_reports(case, reports_of(arms), evidence)).any(1))
    treatment, control = (
        arm.ones * arm.of_ones + (1 - arm.ones) * arm.of_zeros for arm in (case.treatment, case.control)
    )

    def share(times: list[Any]) -> float:
        return float(np.concatenate(times).mean())

    return MissingErrors(
        name,
        (treatment, control),
        share(rollbacks),
        share(promotions),
        share(alarmed),
        share(careless),
        share(coming) if coming else None,
    )


def missing_delays(runs: int, seed: int, evidence: Evidence, alpha: float) -> list[dict[str, Any]]:
    """Return the reports per arm until a harm is found, if a share of all units report.

    The harm is 40 % ones against 50 %. A row has the median and the 90th percentile by both ends, by those who report
    alone, and with `missing: 0`; None if not within 2,000.
    """
    rows = []
    for share in (1.0, 0.9, 0.5, 0.2, 0.1, 0.05, 0.01):
        case = Missing(Arm(share, share, 0.4), Arm(share, share, 0.5), round(10 / share))
        times: dict[str, list[np.ndarray]] = {"both": [], "reports": [], "zero": []}
        for k in range(runs // CHUNK):
            rng = np.random.default_rng([seed, round(100 * share), k])
            arms = _arms(rng, case)
            delays = {
                "both": proof(case, arms, -1, evidence),
                "reports": evidence(looks_of(arms), 0.0, -1),
                "zero": proof(case._replace(value=0.0), arms, -1, evidence),
            }
            for name, logs in delays.items():
                hit = logs > -math.log(alpha)
                times[name].append(np.where(hit.any(1), (hit.argmax(1) + 1.0) * case.block * share, np.inf))
        row: dict[str, Any] = {"share": share}
        for name, parts in times.items():
            ends = np.quantile(np.concatenate(parts), [0.5, 0.9], method="inverted_cdf")
            row[name] = [int(x) if math.isfinite(x) else None for x in ends]
        rows.append(row)
    return rows


def _cases() -> dict[str, Missing]:
    cases = {}
    for times in (1.5, 2.0, 3.0):
        slow = 20 * times, 20.0
        name = f"ones {times:g} times as late as the control's"
        cases[f"{name}, all within the window"] = Missing(Arm(1, 1), Arm(1, 1), as_they_come=slow)
        late_arms = Arm(late(0.5 * times), 1), Arm(late(0.5), 1)
        cases[f"{name}, beyond the window in part"] = Missing(*late_arms)
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5):
        both, block = Arm(share, share), round(10 / share)
        cases[f"{share:.0%} report"] = Missing(both, both, block)
        cases[f"{share:.0%} report, `missing: 0`"] = Missing(both, both, block, 0.0, 0.1 * share)
    for share in (0.45, 0.25, 0.2, 0.1, 0.05, 0.02, 0.01):
        cases[f"{share:.0%} report, 50% of the control"] = Missing(Arm(share, share), Arm(0.5, 0.5), round(5 / share))
    for share in (0.25, 0.05, 0.01):
        arms = Arm(2 * share, 0.3, 0.5), Arm(0.5 + share, 0.8, share / (0.5 + share))
        cases[f"{share:.0%} report a one in both arms, zeros unequally, `missing: 0`"] = Missing(
            *arms, round(5 / share), 0.0, 0.2 * share
        )
    cases["a tenth reports, ones only; all of the control"] = Missing(Arm(0.2, 0), Arm(1, 1))
    cases["a tenth reports, zeros only; all of the control"] = Missing(Arm(0, 0.2), Arm(1, 1))
    cases["45% of ones report, 50% of all others"] = Missing(Arm(0.45, 0.5), Arm(0.5, 0.5), 100)
    for times in (1.5, 2.0, 3.0):
        rare = Arm(late(0.5 * times), 0.5, 0.05), Arm(late(0.5), 0.5, 0.05)
        name = f"5% ones, {times:g} times as late, beyond the window in part, and half of the zeros"
        cases[name] = Missing(*rare, 100, margin=0.02)
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5):
        less = Arm(0.7 * share, share, 0.05), Arm(share, share, 0.05)
        cases[f"5% ones, {share:.0%} report, of the treatment's ones 30% less"] = Missing(
            *less, round(20 / share), margin=0.02
        )
    for share in (0.99, 0.9, 0.5):
        cases[f"canary 1:9, 99% ones, {share:.0%} report, of the treatment's zeros half as many"] = Missing(
            Arm(share, share / 2, 0.99), Arm(share, share, 0.99), ratio=9, margin=0.02
        )
    cases["wrong: one arm loses ones, the other as many zeros"] = Missing(Arm(0.4, 0.6), Arm(0.6, 0.4))
    return cases


MISSING = _cases()
"""The last cannot be told from arms that differ in truth: shown, not promised."""


def missing_table(rows: list[dict[str, Any]], delays: list[dict[str, Any]], rate: Callable[[float], str]) -> list[str]:
    """Return the results as Markdown."""
    lines = [
        "",
        "## Late and missing outcomes",
        "",
        "Arms whose units all have outcome 1 with a chance of a half, unless the row says otherwise, and differ in when or",
        f"whether they report; {LOOKS} looks at units whose windows are over. An outcome that is missing does not count,",
        "unless the row has `missing: 0`. Delays are exponential, that of the control with a mean of half the window where",
        "they go beyond it.",
        "",
        "- False rollback and promotion: as above, with the alarm on unequal reporting, and proven at both ends of what is",
        "  missing (`missing_outcomes.py`).",
        "- Careless: false rollbacks by the same windows, of those who report alone, if nothing watched the reports.",
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
    lines += [
        "",
        "Reports per arm until a harm is found (40 % ones against 50 %), median / 90th percentile, where this share of all",
        "units reports in both arms. The first column decides where missing outcomes do not count; the second one errs as",
        "above.",
        "",
        "| report | both ends | those who report alone | `missing: 0` |",
        "|---|---|---|---|",
    ]
    for row in delays:
        cells = (
            " / ".join("never" if x is None else f"{x:,}" for x in row[key]) for key in ("both", "reports", "zero")
        )
        lines.append(f"| {row['share']:.0%} | {' | '.join(cells)} |")
    return lines
