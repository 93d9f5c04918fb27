"""Errors of off-policy estimates, and the share of logs for which their lower bound holds.

    .venv/bin/python -m benchmarks.experiments.off_policy

A team of two plays a small chain of states whose value is computed exactly; logs of its play are judged by the estimators
of the product. Writes `benchmarks/results/off_policy.{json,md}`; takes a minute on one core.
"""

import argparse
import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks.records import machine, store
from marl_ray.evaluation.off_policy.estimates import cross_fit
from marl_ray.experiments.statistics.off_policy import PolicyValue, doubly_robust, snips

STATES, AGENTS, MOVES = 3, 2, 0.8
"""States, agents with two actions each, and the chance that a joint action moves the state."""
REWARDS = np.random.default_rng(5).normal(size=(STATES, 2, 2))
START = np.array([0.0, 3.0, -3.0])
"""The part of a unit's outcome that is due to its first state."""
UNITS, ALPHA = 1_000, 0.05
"""Units of a log, and the error of the lower bound."""
CASES = ((3, 0.1), (3, 0.3), (6, 0.3), (12, 0.3), (6, 0.8), (12, 0.8))
"""Steps of a unit, and the deviation of the logits by which the judged policy differs from the logged one."""


class Policy(NamedTuple):
    """The policy that both agents play."""

    chances: np.ndarray
    """Chance of the second action by state (states,)."""

    def log_probs(self, states: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Return the log-probability of actions of 0 and 1, one per state."""
        chances = self.chances[states]
        logs: np.ndarray = np.log(np.where(actions == 1, chances, 1 - chances))
        return logs


class Log(NamedTuple):
    """Units that a policy was served in."""

    first_states: np.ndarray
    """(units,)"""
    outcomes: np.ndarray
    """(units,)"""
    log_weights: np.ndarray
    """Log importance weights of the judged policy (units,)."""


def make_policy(rng: np.random.Generator, logits: np.ndarray | float, deviation: float) -> Policy:
    """Draw a policy around these logits."""
    return Policy(1 / (1 + np.exp(-(logits + deviation * rng.standard_normal(STATES)))))


def true_value(policy: Policy, steps: int) -> float:
    """Return the mean outcome, by dynamic programming over states and joint actions."""
    value = np.zeros(STATES)
    for _ in range(steps):
        before, value = value, np.zeros(STATES)
        for state in range(STATES):
            chances = (1 - policy.chances[state], policy.chances[state])
            for left in range(2):
                for right in range(2):
                    after = MOVES * before[(state + 1 + left + right) % STATES] + (1 - MOVES) * before[state]
                    value[state] += chances[left] * chances[right] * (REWARDS[state, left, right] + after)
    return float((value + START).mean())


def play(rng: np.random.Generator, served: Policy, judged: Policy, steps: int) -> Log:
    """Play units with the served policy, and weigh them for the judged one; outcomes have noise of their own."""
    first = state = rng.integers(STATES, size=UNITS)
    outcomes, log_weights = START[state] + rng.normal(size=UNITS), np.zeros(UNITS)
    for _ in range(steps):
        left, right = ((rng.random(UNITS) < served.chances[state]).astype(int) for _ in range(AGENTS))
        for actions in (left, right):
            log_weights += judged.log_probs(state, actions) - served.log_probs(state, actions)
        outcomes += REWARDS[state, left, right]
        state = np.where(rng.random(UNITS) < MOVES, (state + 1 + left + right) % STATES, state)
    return Log(first, outcomes, log_weights)


def estimates(log: Log) -> dict[str, PolicyValue]:
    """Return what the product's two estimators say of a log."""
    predicted = cross_fit(np.eye(STATES)[log.first_states], log.outcomes, log.log_weights)
    return {
        "importance sampling": snips(log.log_weights, log.outcomes, ALPHA),
        "doubly robust": doubly_robust(log.log_weights, log.outcomes, predicted, predicted, ALPHA),
    }


def judge(steps: int, deviation: float, logs: int, seed: int) -> dict[str, Any]:
    """Return the errors of the estimators over many logs, each of a served and a judged policy of its own."""
    errors: dict[str, list[float]] = {"importance sampling": [], "doubly robust": []}
    held: dict[str, list[bool]] = {name: [] for name in errors}
    effective = []
    for number in range(logs):
        rng = np.random.default_rng([seed, number])
        served = make_policy(rng, 0.0, 0.5)
        judged = make_policy(rng, np.log(served.chances / (1 - served.chances)), deviation)
        truth, values = true_value(judged, steps), estimates(play(rng, served, judged, steps))
        effective.append(values["importance sampling"].effective)
        for name, value in values.items():
            errors[name].append(value.estimate - truth)
            held[name].append(value.low <= truth)
    return {
        "steps": steps,
        "deviation": deviation,
        "effective": [float(q) for q in np.quantile(effective, [0.1, 0.5, 0.9])],
        **{
            name: {
                "bias": float(np.mean(errors[name])),
                "root_mean_square": math.sqrt(float(np.mean(np.square(errors[name])))),
                "held": float(np.mean(held[name])),
            }
            for name in errors
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Off-policy estimates beside the truth",
        "",
        f"{result['logs']:,} logs per row, of {UNITS:,} units each; a team of two, whose value is computed exactly. The",
        "judged policy's logits differ from the served one's by the deviation. Effective units: median (10th to 90th",
        "percentile). Error: root mean square (bias). Bound: how often the lower bound is below the truth, which is to be",
        f"the case for {1 - ALPHA:.0%} of the logs.",
        "",
        "| steps | deviation | effective units | importance sampling: error | bound | doubly robust: error | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        low, middle, high = row["effective"]
        cells = [f"{row['steps']}", f"{row['deviation']}", f"{middle:.0f} ({low:.0f} to {high:.0f})"]
        for name in ("importance sampling", "doubly robust"):
            part = row[name]
            cells += [f"{part['root_mean_square']:.2f} ({part['bias']:.2f})", f"{100 * part['held']:.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Simulate, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--logs", type=int, default=2_000, help="logs per row; fewer store nothing")
    logs = parser.parse_args().logs
    rows = [judge(steps, deviation, logs, seed) for seed, (steps, deviation) in enumerate(CASES)]
    result = {"machine": machine("numpy", "scipy"), "logs": logs, "alpha": ALPHA, "rows": rows}
    if logs < 2_000:
        print(table(result))
        return
    store("off_policy", result, table(result))


if __name__ == "__main__":
    main()
