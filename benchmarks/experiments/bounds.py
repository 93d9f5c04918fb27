"""Outcomes with bounds, for `error_rates.py`: how often the exact test errs and how soon it decides."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.experiments.streams import CHUNK, STEP, Looks
from marl_ray.experiments.statistics.bets import EFFECTS, MAX_STAKE, PRIOR_WEIGHT, BettingTest, Claim

Evidence = Callable[[Looks, float, int, bool], np.ndarray]
"""`log_evidence` of `benchmarks/experiments/error_rates.py`."""
UNITS = 6_000
"""Units of both arms together, in each experiment."""


class Stream(NamedTuple):
    """The units of simulated experiments, in order.

    `values` (runs, units) are raw outcomes (NaN where a unit reports none), `treated` (runs, units) says whether a unit
    is in the treatment, and `share` (units,) is the chance of that.
    """

    values: np.ndarray
    treated: np.ndarray
    share: np.ndarray


class Case(NamedTuple):
    """Experiments to err or to decide in."""

    draw: Callable[[np.random.Generator, tuple[int, int]], tuple[np.ndarray, np.ndarray]]
    """Outcomes of every unit in the treatment, and in the control."""
    margin: float
    low: float
    high: float
    share: float | np.ndarray = 0.5
    scale: float = 1.0
    """The factor on control's values that a relative margin gives."""
    better: int = 1
    """-1 where smaller is better."""
    reports: tuple[tuple[float, float], tuple[float, float]] | None = None
    """Chances to report of a unit whose outcome is 0 and of one whose is 1, in treatment and control; None if all do."""

    def claim(self, side: int, margin: float, missing: Any = None) -> Claim:
        return Claim(side, self.low, self.high, margin, self.better > 0, self.scale, missing)


def stream(case: Case, rng: np.random.Generator, runs: int) -> Stream:
    treatment, control = case.draw(rng, (runs, UNITS))
    share = np.broadcast_to(case.share, UNITS)
    treated = rng.random((runs, UNITS)) < share
    values = np.where(treated, treatment, control).astype(float)
    if case.reports is not None:
        chances = np.where(
            values > 0, *(np.where(treated, *chance) for chance in list(zip(*case.reports, strict=True))[::-1])
        )
        values[rng.random(values.shape) >= chances] = np.nan
    return Stream(values, treated, share)


def bets(stream: Stream, case: Case, side: int, margin: float) -> np.ndarray:
    """Return ln E after every unit (runs, units); where units report nothing, at the end that proves less."""
    if case.reports is None:
        return bets_on(stream, case.claim(side, margin))
    low, high = (bets_on(stream, case.claim(side, margin, end)) for end in ("low", "high"))
    cautious: np.ndarray = np.minimum(low, high)
    return cautious


def bets_on(stream: Stream, claim: Claim) -> np.ndarray:
    """Return ln E of `BettingTest` after every unit (runs, units), vectorised over experiments."""
    side, (low, high), q = claim.side, claim.range, stream.share
    moved = np.clip(stream.values, claim.low, claim.high)
    y = (np.where(stream.treated, moved + claim.shift, claim.scale * moved) - low) / (high - low)
    if claim.missing is not None:
        y[np.isnan(y)] = 0.0 if claim.missing == "low" else 1.0
    y = y if claim.higher_is_better else 1 - y
    count, none = PRIOR_WEIGHT + np.arange(UNITS), np.zeros((len(y), 1))
    m = (PRIOR_WEIGHT / 2 + np.concatenate([none, y.cumsum(1)[:, :-1]], 1)) / count
    s = np.sqrt((PRIOR_WEIGHT / 4 + np.concatenate([none, ((y - m) ** 2).cumsum(1)[:, :-1]], 1)) / count)
    null = side * claim.null
    gains = side * (y - m) * np.where(stream.treated, 1 / q, -1 / (1 - q)) - null
    worst = np.maximum(m / q, (1 - m) / (1 - q)) if side > 0 else np.maximum((1 - m) / q, m / (1 - q))
    caps = MAX_STAKE / np.maximum(worst + null, worst / 2)
    logs = np.full(y.shape, -np.inf)
    for effect in EFFECTS:
        np.logaddexp(logs, np.log1p(np.minimum(effect * q * (1 - q) / s, caps) * gains).cumsum(1), out=logs)
    return logs - math.log(len(EFFECTS))


def check(stream: Stream, case: Case, margin: float) -> None:
    """Check that the vectorised formula is `BettingTest`'s, after the last unit of one experiment."""
    for side in (1, -1):
        logs = []
        for end in (None,) if case.reports is None else ("low", "high"):
            test = BettingTest(case.claim(side, margin, end))
            test.add(stream.values[0], stream.treated[0], stream.share)
            logs.append(test.evidence().log_e)
        assert math.isclose(min(logs), bets(stream, case, side, margin)[0, -1], rel_tol=1e-6, abs_tol=1e-6)


def looks(stream: Stream, case: Case) -> Looks:
    """Return the sums that the normal mixture gets after every 2 STEP units."""
    parts = []
    for arm, factor in ((stream.treated, case.better), (~stream.treated, case.better * case.scale)):
        values = factor * stream.values
        sums = [(arm * values**k).reshape(len(arm), -1, 2 * STEP).sum(2).cumsum(1) for k in range(3)]
        n = np.maximum(sums[0], 1)
        parts.append((sums[0], sums[1] / n, np.maximum(sums[2] - sums[1] ** 2 / n, 0) / np.maximum(n - 1, 1)))
    (n_t, mean_t, var_t), (n_c, mean_c, var_c) = parts
    return Looks(n_t, n_c, mean_t, mean_c, var_t, var_c)


def losses(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Draw a loss of 100 for one unit in a thousand, 0 for the others."""
    return np.where(rng.random(size) < 0.001, 100.0, 0.0)


def rare_losses(rng: np.random.Generator, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal(size) - losses(rng, size), rng.standard_normal(size)


def events(treatment: float, control: float, drift: float = 0.0) -> Any:
    """Return a function that draws 0 or 1, with a day's wave that both arms share."""

    def draw(rng: np.random.Generator, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        wave = drift * np.sin(np.arange(size[1]) / 300 + 6 * rng.random((size[0], 1)))
        return rng.random(size) < treatment + wave, rng.random(size) < control + wave

    return draw


def shares(mean_t: float, mean_c: float) -> Any:
    """Return a function that draws Beta outcomes."""
    return lambda rng, size: (
        rng.beta(20 * mean_t, 20 - 20 * mean_t, size),
        rng.beta(20 * mean_c, 20 - 20 * mean_c, size),
    )


RAMP = np.repeat([0.05, 0.25, 0.5], UNITS // 3)
LOSSES = (-110.0, 10.0)
"""Bounds of an outcome whose rare loss is 100."""
LATE, TENTH = ((0.5, 0.632), (0.5, 0.865)), ((0.1, 0.1), (0.1, 0.1))
"""For treatment and control, the chances that a failure and a success report: successes come late, or a tenth of all."""
AT_MARGIN: dict[str, Case] = {
    "Gaussian, treatment loses 100 with p = 0.001, bounds [-110, 10]": Case(rare_losses, 0.1, *LOSSES),
    "the same with a shift of -0.1, winsorized to [-5, 5]": Case(
        lambda *arguments: (rare_losses(*arguments)[0] - 0.1, rare_losses(*arguments)[1]), 0.1, -5.0, 5.0
    ),
    "Bernoulli 0.5": Case(events(0.45, 0.5), 0.05, 0.0, 1.0),
    "Bernoulli 0.05": Case(events(0.03, 0.05), 0.02, 0.0, 1.0),
    "Bernoulli 0.99, canary 1:9": Case(events(0.97, 0.99), 0.02, 0.0, 1.0, 0.1),
    "Bernoulli 0.5, canary 1:99": Case(events(0.4, 0.5), 0.1, 0.0, 1.0, 0.01),
    "Bernoulli 0.5, drifting by 0.4, ramp 5 %, 25 %, 50 %": Case(events(0.48, 0.5, 0.4), 0.02, 0.0, 1.0, RAMP),
    "Beta of mean 0.25": Case(shares(0.24, 0.25), 0.01, 0.0, 1.0),
    "Beta of mean 0.5, margin 10 % of the control's mean": Case(shares(0.45, 0.5), 0.0, 0.0, 1.0, scale=0.9),
    "Beta of mean 0.5, smaller is better, margin 10 % of the control's mean": Case(
        shares(0.55, 0.5), 0.0, 0.0, 1.0, scale=1.1, better=-1
    ),
    "Bernoulli 0.05, half of the zeros and 63 % of the treatment's ones report, 86 % of the control's": Case(
        events(0.03, 0.05), 0.02, 0.0, 1.0, reports=LATE
    ),
    "Bernoulli 0.5, a tenth reports": Case(events(0.45, 0.5), 0.05, 0.0, 1.0, reports=TENTH),
}
"""The treatment is worse by exactly the margin, in the outcomes that count."""
SAME: dict[str, Case] = {
    "Gaussian, both arms lose 100 with p = 0.001, bounds [-110, 10]": Case(
        lambda *arguments: (rare_losses(*arguments)[0], rare_losses(*arguments)[0]), 0.1, *LOSSES
    ),
    "Bernoulli 0.5": Case(events(0.5, 0.5), 0.05, 0.0, 1.0),
    "Bernoulli 0.99, canary 1:9": Case(events(0.99, 0.99), 0.02, 0.0, 1.0, 0.1),
    "Bernoulli 0.5, drifting by 0.4, ramp 5 %, 25 %, 50 %": Case(events(0.5, 0.5, 0.4), 0.02, 0.0, 1.0, RAMP),
    "Bernoulli 0.05, half of the zeros and 63 % of the treatment's ones report, 86 % of the control's": Case(
        events(0.05, 0.05), 0.02, 0.0, 1.0, reports=LATE
    ),
    "Bernoulli 0.5, a tenth reports": Case(events(0.5, 0.5), 0.05, 0.0, 1.0, reports=TENTH),
}
"""The arms are alike, but for what they report."""
HARMED: dict[str, Case] = {
    "Bernoulli 0.45 against 0.5": Case(events(0.45, 0.5), 0.0, 0.0, 1.0),
    "Bernoulli 0.92 against 0.95": Case(events(0.92, 0.95), 0.0, 0.0, 1.0),
    "Bernoulli 0.9 against 0.99, canary 1:99": Case(events(0.9, 0.99), 0.0, 0.0, 1.0, 0.01),
    "Beta of mean 0.23 against 0.25": Case(shares(0.23, 0.25), 0.0, 0.0, 1.0),
}


def decision_times(
    case: Case, side: int, margin: float, runs: int, seed: int, alpha: float, evidence: Evidence
) -> list[Any]:
    """Return the units at which exact test and normal mixture decide, (runs,) each.

    They are infinite where the test does not decide.
    """
    limit, exact, normal = -math.log(alpha), [], []
    for k in range(max(1, runs // CHUNK)):
        drawn = stream(case, np.random.default_rng([seed, k]), min(runs, CHUNK))
        if not k:
            check(drawn, case, margin)
        hit = bets(drawn, case, side, margin) >= limit
        exact.append(np.where(hit.any(1), hit.argmax(1) + 1.0, np.inf))
        if not shows_normal_mixture(case):
            continue
        with np.errstate(invalid="ignore", divide="ignore"):
            hit = evidence(looks(drawn, case), margin, side, False) > limit
        normal.append(np.where(hit.any(1), (hit.argmax(1) + 1.0) * 2 * STEP, np.inf))
    return [np.concatenate(part) for part in (exact, normal) if part]


def shows_normal_mixture(case: Case) -> bool:
    """Return True if the row shows the normal mixture too.

    It compares within epochs, and other rows have it with missing outcomes.
    """
    return isinstance(case.share, float) and case.reports is None


def errors_of(case: Case, times: list[Any]) -> list[float | None]:
    final_shares: list[float | None] = [float(np.isfinite(hits).mean()) for hits in times]
    return final_shares if shows_normal_mixture(case) else [*final_shares, None]


def simulate_bounded_outcomes(runs: int, alpha: float, evidence: Evidence) -> dict[str, Any]:
    """Simulate all rows and return them as plain data."""
    rows: dict[str, Any] = {"runs": runs, "units": UNITS, "promotions": {}, "rollbacks": {}, "delays": {}}
    for seed, (name, case) in enumerate(AT_MARGIN.items()):
        times = decision_times(case, 1, case.margin, runs, 5_000 + seed, alpha, evidence)
        rows["promotions"][name] = errors_of(case, times)
    for seed, (name, case) in enumerate(SAME.items()):
        times = decision_times(case, -1, 0.0, runs, 5_100 + seed, alpha, evidence)
        rows["rollbacks"][name] = errors_of(case, times)
    for seed, (name, case) in enumerate(HARMED.items()):
        times = decision_times(case, -1, 0.0, runs, 5_200 + seed, alpha, evidence)
        ends = [[float(np.quantile(hits, p, method="inverted_cdf")) for p in (0.5, 0.9)] for hits in times]
        rows["delays"][name] = [[int(x) if math.isfinite(x) else None for x in hit] for hit in ends]
    return rows


def table(result: dict[str, Any], rate: Callable[[float, int], str]) -> list[str]:
    """Return the rows as Markdown."""
    runs = result["runs"]
    lines = [
        "## Outcomes with bounds",
        "",
        f"{runs:,} experiments per row of {result['units']:,} units in both arms together, each unit assigned at random.",
        "The exact test (`betting`) is watched after every unit; the normal mixture, which decides where nothing bounds the",
        f"outcome, after every {2 * STEP} (not where shares change: it compares within epochs). The treatment is worse by",
        "exactly the margin, or (rollbacks) the arms are alike. Per cent, with 95 % intervals. Where units report nothing,",
        "they do not count, and both ends of what they may have been must prove it.",
        "",
        "| outcomes | error | exact test % | normal mixture % |",
        "|---|---|---|---|",
    ]
    for kind, key in (("promotion", "promotions"), ("rollback", "rollbacks")):
        for name, (exact, normal) in result[key].items():
            other = "" if normal is None else rate(normal, runs)
            lines.append(f"| {name} | {kind} | {rate(exact, runs)} | {other} |")
    lines += [
        "",
        "Units of both arms until a harm is found, median / 90th percentile:",
        "",
        "| outcomes | exact test | normal mixture |",
        "|---|---|---|",
    ]
    for name, tests in result["delays"].items():
        cells = (" / ".join("never" if x is None else f"{x:,}" for x in row) for row in tests)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]
