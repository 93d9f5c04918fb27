"""Simulated experiments for `error_rates.py`: outcomes of every kind, summarised as they would be looked at."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.signal import lfilter

from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.sequential import BORROWED_WEIGHT
from marl_ray.experiments.statistics.unit_clusters import MIN_GROUPS, block_summaries, pool_strata

HORIZON, STEP = 2_000, 10
"""Outcomes per arm, and between looks."""
CHUNK = 500
"""Experiments simulated at a time."""
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
ArmSums = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Counts, means and sums of squared deviations of one arm, (runs, looks) each."""


class Looks(NamedTuple):
    """Per experiment and look (runs, looks): counts, means and variances of treatment and control."""

    n_t: np.ndarray
    n_c: np.ndarray
    mean_t: np.ndarray
    mean_c: np.ndarray
    var_t: np.ndarray
    var_c: np.ndarray


class Scenario(NamedTuple):
    """Experiments to err in."""

    same: Any
    """Both arms alike."""
    at_margin: Any = None
    """A loss of exactly the margin; None where that is `same`, moved."""
    margin: float = 0.1
    binary: bool = False


def prefix(values: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return count (looks,), mean and variance (runs, looks) after every `step` of values (runs, n)."""
    blocks = values.reshape(len(values), -1, step)
    n = np.arange(1, blocks.shape[1] + 1) * step
    mean = blocks.sum(2).cumsum(1) / n
    return n, mean, np.maximum((blocks**2).sum(2).cumsum(1) - n * mean**2, 0) / (n - 1)


def two_arms(draw_t: Draw, draw_c: Draw | None = None, *, ratio: int = 1, horizon: int = HORIZON) -> Any:
    """Return a scenario with `ratio` control outcomes for each of the treatment."""

    def simulate(rng: np.random.Generator, runs: int) -> Looks:
        t, c = draw_t(rng, (runs, horizon)), (draw_c or draw_t)(rng, (runs, ratio * horizon))
        (n_t, mean_t, var_t), (n_c, mean_c, var_c) = prefix(t, STEP), prefix(c, ratio * STEP)
        return Looks(n_t, n_c, mean_t, mean_c, var_t, var_c)

    return simulate


def ar1(correlation: float) -> Draw:
    """Return a function that draws a stationary process of variance 1 with this correlation between neighbours."""

    def draw(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
        noise = rng.standard_normal(size)
        noise[:, 1:] *= math.sqrt(1 - correlation**2)
        correlated: np.ndarray = lfilter([1.0], [1.0, -correlation], noise, axis=1)
        return correlated

    return draw


def traffic(noise: Draw, shares: np.ndarray) -> Any:
    """Return a simulation of one stream of units (N,) with a look every 2 STEP units.

    Each unit is assigned at random with the share (N,) of its time.
    """

    def simulate(rng: np.random.Generator, runs: int) -> Looks:
        values = noise(rng, (runs, len(shares)))
        treated = rng.random(values.shape) < shares
        summaries = []
        for arm in (treated, ~treated):
            blocks = [(arm * values**k).reshape(runs, -1, 2 * STEP).sum(2).cumsum(1) for k in range(3)]
            n = np.maximum(blocks[0], 1)
            mean = blocks[1] / n
            summaries.append((blocks[0], mean, np.maximum(blocks[2] - n * mean**2, 0) / np.maximum(n - 1, 1)))
        (n_t, mean_t, var_t), (n_c, mean_c, var_c) = summaries
        return Looks(n_t, n_c, mean_t, mean_c, var_t, var_c)

    return simulate


def epochs(parts: Sequence[tuple[int, float, float]]) -> Any:
    """Simulate epochs of Gaussian units, compared within epochs as `unit_clusters.pool_strata` does.

    A part is (number of units, the treatment's share, the outcomes' deviation). There is a look every 2 STEP units.
    """
    spans = np.cumsum([0, *(units for units, *_ in parts)])
    shares, deviations = (np.repeat([part[k] for part in parts], np.diff(spans)) for k in (1, 2))

    def simulate(rng: np.random.Generator, runs: int) -> Looks:
        values = rng.standard_normal((runs, len(shares))) * deviations
        treated = rng.random(values.shape) < shares
        strata: list[list[ArmSums]] = []
        for start, end in pairwise(spans):
            inside = slice(start, end)
            strata.append([])
            for arm in (treated, ~treated):
                sums = np.zeros((3, runs, len(shares) // (2 * STEP)))
                for k in range(3):
                    powers = np.zeros_like(values)
                    powers[:, inside] = arm[:, inside] * values[:, inside] ** k
                    sums[k] = powers.reshape(runs, -1, 2 * STEP).sum(2).cumsum(1)
                n = np.maximum(sums[0], 1e-9)
                mean = sums[1] / n
                strata[-1].append((sums[0], mean, np.maximum(sums[2] - n * mean**2, 0)))
        looks = _pool_at_looks(strata)
        for at in ((0, -1), (1, len(shares) // (4 * STEP))):
            pairs = [(_summary(treatment, at), _summary(control, at)) for treatment, control in strata]
            for summary, arm in zip(pool_strata(pairs), (0, 1), strict=True):
                if summary.n > 1:
                    assert math.isclose(summary.mean, looks[2 + arm][at], rel_tol=1e-6, abs_tol=1e-9), at
                    assert math.isclose(summary.variance, looks[4 + arm][at], rel_tol=1e-6), at
        return looks

    return simulate


def _summary(sums: ArmSums, at: tuple[int, int]) -> Summary:
    n, mean, squares = (float(part[at]) for part in sums)
    return Summary(int(n), mean, squares / (n - 1) if n > 1 else 0.0)


def _pool_at_looks(strata: Sequence[Sequence[ArmSums]]) -> Looks:
    """Apply `unit_clusters.pool_strata` at every look.

    Strata have both arms' counts, means and squared deviations.
    """
    both = np.stack([(first[0] > 0) & (other[0] > 0) for first, other in strata])
    n, mean, squares = (np.stack([[arm[k] for arm in arms] for arms in strata]) for k in range(3))
    n, several = np.where(both[:, None], n, 0.0), both.sum(0) > 1
    safe = np.maximum(n, 1e-9)
    weights = n[:, 0] * n[:, 1] / np.maximum(n.sum(1), 1e-9)
    share = (weights / np.maximum(weights.sum(0), 1e-9))[:, None]
    variances = np.where(n > 1, squares / np.maximum(n - 1, 1e-9), 0.0)
    freedom = np.maximum(n - 1, 0).sum(0)
    overall = (np.where(n > 0, squares, 0.0).sum(0) / np.maximum(freedom, 1e-9)).max(0)
    larger = np.maximum(variances.max(1), overall)[:, None]
    mixed = np.where(several, (n * variances + BORROWED_WEIGHT * larger) / (n + BORROWED_WEIGHT), variances)
    effective = 1 / np.maximum((share**2 / safe * both[:, None]).sum(0), 1e-300)
    means = (share * mean).sum(0)
    variances = (share**2 / safe * mixed * both[:, None]).sum(0) * effective
    counts = np.floor(effective * (1 + 1e-12)) * both.any(0)
    return Looks(counts[0], counts[1], means[0], means[1], variances[0], variances[1])


def sessions(rng: np.random.Generator, size: tuple[int, int], players: int = 20) -> np.ndarray:
    """Draw sessions in time order, each `players` of them in one match with luck of its own."""
    luck = rng.standard_normal((size[0], size[1] // players)).repeat(players, axis=1)
    return luck + rng.standard_normal(size)


def matches(rng: np.random.Generator, size: tuple[int, int], players: int = 20) -> np.ndarray:
    """Draw the means of matches such as those of `sessions`."""
    return rng.standard_normal(size) + rng.standard_normal(size) / math.sqrt(players)


def switchback(noise: Draw, share: float, grouped: bool = True) -> Any:
    """Return a simulation of HORIZON blocks of time whose arms are drawn by pairs as `assignment` does.

    A look follows every 2 STEP blocks. Variances are by groups, as `unit_clusters.block_summaries` has them, or else as if
    blocks were drawn one by one.
    """

    def simulate(rng: np.random.Generator, runs: int) -> Looks:
        values = noise(rng, (runs, HORIZON))
        first = rng.integers(0, 2, (runs, HORIZON // 2))
        strata = np.stack([first, 1 - first], 2).reshape(runs, HORIZON)
        treated = (strata + rng.random(strata.shape)) / 2 > 1 - share
        summaries = []
        for k in range(2 * STEP, HORIZON + 1, 2 * STEP):
            y, parts, signed = values[:, :k], [], np.zeros((runs, k))
            for sign, arm in ((1, treated[:, :k]), (-1, ~treated[:, :k])):
                n = arm.sum(1)
                mean = (y * arm).sum(1) / np.maximum(n, 1)
                gaps = (y - mean[:, None]) * arm
                signed += sign * gaps / np.maximum(n, 1)[:, None]
                parts.append((n, mean, (gaps**2).sum(1) / np.maximum(n - 1, 1)))
            (n_t, mean_t, var_t), (n_c, mean_c, var_c) = parts
            groups = signed.reshape(runs, -1, 2).sum(2)
            apart = var_t / np.maximum(n_t, 1) + var_c / np.maximum(n_c, 1)
            size = groups.shape[1]
            together = size / (size - 1) * (groups**2).sum(1) * (1 + math.sqrt(2 / (size - 1)))
            scale = together / np.maximum(apart, 1e-300) if grouped else np.ones(runs)
            scale = np.maximum(scale, 1) if size < MIN_GROUPS else scale
            summaries.append((n_t, n_c, mean_t, mean_c, var_t * scale, var_c * scale))
            if grouped and k in (HORIZON // 4, HORIZON):
                check_blocks(y[0], treated[0, :k], [float(part[0]) for part in summaries[-1]])
        return Looks(*(np.stack(part, 1) for part in zip(*summaries, strict=True)))

    return simulate


def check_blocks(values: np.ndarray, treated: np.ndarray, measured: Sequence[float]) -> None:
    """Check that the vectorised formula is the gateway's, of the blocks (k,) of one experiment."""
    arms: list[dict[tuple[int, int], float]] = [{}, {}]
    for k, (value, is_treated) in enumerate(zip(values.tolist(), treated.tolist(), strict=True)):
        arms[not is_treated][k // 2, k % 2] = value
    first, other = block_summaries([(arms[0], arms[1])])
    expected = first.n, other.n, first.mean, other.mean, first.variance, other.variance
    assert np.allclose(measured, expected, rtol=1e-6), (measured, expected)


def day_and_night(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Draw noise on a wave of 144 blocks, six times as large."""
    wave = np.sin(np.arange(size[1]) * 2 * math.pi / 144 + rng.random((size[0], 1)) * 2 * math.pi)
    return 2 * wave + rng.standard_normal(size) / 3


def walk(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Draw noise on a walk that is as far from home after a tenth of the blocks as the noise is large."""
    steps = rng.standard_normal(size) / math.sqrt(size[1] / 10)
    return steps.cumsum(1) + rng.standard_normal(size)


def chunks(simulate: Any, runs: int, seed: int) -> Iterator[Looks]:
    for k in range(runs // CHUNK):
        yield simulate(np.random.default_rng([seed, k]), CHUNK)


def bernoulli(p: float) -> Draw:
    return lambda rng, size: (rng.random(size, dtype=np.float32) < p).astype(np.float32)


def gaussian(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(size)


def student(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return rng.standard_t(3, size)


def pareto(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Draw from a Pareto distribution of index 2.5, which has no third moment."""
    return rng.pareto(2.5, size)


def relative(draw: Draw, part: float, higher_is_better: bool, **shape: Any) -> Scenario:
    """Return a scenario whose margin is a part of the control's mean, which the treatment is worse by.

    Outcomes are positive, and both columns have that margin. As `sequential.relative_scale` says: the control times a
    number, turned where smaller is better.
    """
    sign, scale = (1, 1 - part) if higher_is_better else (-1, 1 + part)
    simulate = two_arms(lambda *at: sign * scale * draw(*at), **shape)
    return Scenario(simulate, simulate, 0.0)


def lognormal(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return np.exp(rng.standard_normal(size))


RAMP = np.repeat([0.05, 0.1, 0.25, 0.5], [2_000, 1_000, 1_000, 2_000])
CANARY: Any = {"ratio": 9, "horizon": 1_000}


def rare(p: float, margin: float, **shape: Any) -> tuple[Any, Any, float]:
    """Return the first fields of a scenario of Bernoulli outcomes."""
    return two_arms(bernoulli(p), **shape), two_arms(bernoulli(p - margin), bernoulli(p), **shape), margin


SCENARIOS: dict[str, Scenario] = {
    "Gaussian": Scenario(two_arms(gaussian)),
    "Student t, 3 degrees": Scenario(two_arms(student)),
    "log-normal, sigma 1": Scenario(two_arms(lognormal)),
    "Bernoulli 0.5": Scenario(*rare(0.5, 0.05)),
    "Bernoulli 0.05": Scenario(*rare(0.05, 0.02)),
    "Bernoulli 0.95": Scenario(*rare(0.95, 0.02)),
    "Gaussian, treatment with twice the deviation": Scenario(two_arms(lambda *size: 2 * gaussian(*size), gaussian)),
    "Gaussian, treatment with half the deviation": Scenario(two_arms(lambda *size: gaussian(*size) / 2, gaussian)),
    "AR(1) 0.5 of the traffic, units assigned at random": Scenario(traffic(ar1(0.5), np.full(2 * HORIZON, 0.5))),
    "Gaussian, ramp 5 %, 10 %, 25 %, 50 %": Scenario(traffic(gaussian, RAMP)),
    "Gaussian, a short epoch with 10 times the deviation between uneven ones": Scenario(
        epochs([(2_000, 0.1, 1.0), (200, 0.5, 10.0), (2_000, 0.1, 1.0)])
    ),
    "log-normal, canary 1:9": Scenario(two_arms(lognormal, **CANARY)),
    "Bernoulli 0.05, canary 1:9": Scenario(*rare(0.05, 0.02, **CANARY)),
    "Bernoulli 0.95, canary 1:9": Scenario(*rare(0.95, 0.02, **CANARY)),
    "Bernoulli 0.95, canary 1:9, margin 0.05": Scenario(*rare(0.95, 0.05, **CANARY)),
    "Bernoulli 0.99, canary 1:9": Scenario(*rare(0.99, 0.02, **CANARY)),
    "Bernoulli 0.5, `binary`": Scenario(*rare(0.5, 0.05), binary=True),
    "Bernoulli 0.05, `binary`": Scenario(*rare(0.05, 0.02), binary=True),
    "Bernoulli 0.05, canary 1:9, `binary`": Scenario(*rare(0.05, 0.02, **CANARY), binary=True),
    "Bernoulli 0.95, canary 1:9, `binary`": Scenario(*rare(0.95, 0.02, **CANARY), binary=True),
    "Bernoulli 0.99, canary 1:9, `binary`": Scenario(*rare(0.99, 0.02, **CANARY), binary=True),
    "Bernoulli 0.999, canary 1:9, margin 0.01, `binary`": Scenario(*rare(0.999, 0.01, **CANARY), binary=True),
    "Pareto, index 2.5": Scenario(two_arms(pareto)),
    "log-normal, 10 % of the control's mean worse, larger is better": relative(lognormal, 0.1, True),
    "log-normal, 10 % of the control's mean worse, smaller is better": relative(lognormal, 0.1, False),
    "log-normal, canary 1:9, 10 % of the control's mean worse, smaller is better": relative(
        lognormal, 0.1, False, **CANARY
    ),
    "matches of 20 sessions, assigned and counted as matches": Scenario(two_arms(matches)),
    "switchback, AR(1) 0.9 from block to block": Scenario(switchback(ar1(0.9), 0.5)),
    "switchback, AR(1) -0.8 from block to block": Scenario(switchback(ar1(-0.8), 0.5)),
    "switchback, day and night": Scenario(switchback(day_and_night, 0.5)),
    "switchback, a random walk": Scenario(switchback(walk, 0.5)),
    "switchback 1:9, AR(1) 0.9 from block to block": Scenario(switchback(ar1(0.9), 0.1)),
}
WRONG = {
    "wrong: AR(1) 0.5 within each arm, plain variance": Scenario(two_arms(ar1(0.5))),
    "wrong: matches of 20 sessions, assigned as matches, counted as sessions": Scenario(two_arms(sessions)),
    "wrong: switchback by pairs, AR(1) -0.8, counted block by block": Scenario(switchback(ar1(-0.8), 0.5, False)),
}
"""Streams against the advice of `sequential` and `clusters`: with units that depend on each other, and without the
cluster or the group. Shown, not promised."""
