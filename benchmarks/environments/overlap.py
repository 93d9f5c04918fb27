"""A slow environment whose next batch is played while the team learns.

It is measured against the same run without overlap, in turn.

    .venv/bin/python -m benchmarks.environments.overlap

CartPole waits 5 ms in every step, as for a simulator beside it. The number of epochs is chosen so that an update takes about
as long as the rollout. The weights do not depend on the clock, so returns are compared without the waiting, on more
steps and several seeds. Writes `benchmarks/results/overlap.{json,md}`.
"""

import argparse
import statistics
import time
from typing import Any

import gymnasium
import torch

from benchmarks.records import load_before, machine, store
from benchmarks.tables import median_range
from marl_ray.config import RunConfig, parse_config
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.single_process import process_group

STEP_S = 0.005
"""Seconds that a step of the environment waits."""
COPIES, HORIZON, WARM_UP = 8, 32, 2
"""Environment copies, steps of each in a batch, and first iterations that are not counted."""
KEYS = {"in turn": "train.overlap=false", "overlapped": "train.overlap=true"}
NETWORK = "team={all: {network: {hidden: [256, 256], normalize: false}}}"


class SlowCartPole(gymnasium.Wrapper):
    """CartPole whose steps wait `seconds`."""

    def __init__(self, seconds: float):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


def make_slow_cart_pole(**options: Any) -> SlowCartPole:
    return SlowCartPole(**options)


gymnasium.register("SlowCartPole-v0", make_slow_cart_pole, disable_env_checker=True)


def run_config(seconds: float, iterations: int, epochs: int, *more: str) -> RunConfig:
    base = {
        "name": "overlap",
        "algorithm": "ppo",
        "env": {"id": "gymnasium.SlowCartPole-v0", "kwargs": {"seconds": seconds}},
        "train": {"total_steps": iterations * COPIES * HORIZON, "env_copies": COPIES, "horizon": HORIZON},
        "hyper": {"lr": 3e-4, "epochs": epochs, "minibatches": 4, "entropy_coef": 0.01},
        "evaluation": {"every": 0},
    }
    return parse_config(RunConfig, base, (NETWORK, *more))


def measure_iterations(config: RunConfig) -> list[dict[str, float]]:
    """Return the metrics of a run's iterations in this process."""
    run = build_run(config, torch.device("cpu"))
    rows = []
    while not run.done:
        rows.append(run.step())
    run.close()
    return rows


def rate(rows: list[dict[str, float]]) -> float:
    return statistics.median(row["steps_per_second"] for row in rows[WARM_UP:])


def find_balanced_epochs() -> int:
    """Return the number of epochs with which an update takes as long as the rollout."""
    rows = measure_iterations(run_config(STEP_S, WARM_UP + 4, 8))[WARM_UP:]
    ratio = statistics.median(row["time/rollout"] / row["time/update"] for row in rows)
    return max(1, round(8 * ratio))


def table(result: dict[str, Any]) -> str:
    lines = [
        "# Learning while the next batch is played",
        "",
        f"CartPole with steps of {STEP_S * 1000:g} ms, {COPIES} copies x {HORIZON} steps, PPO with two layers of 256 and",
        f"{result['epochs']} epochs of 4 minibatches; one process. Median (least-most) of the rounds.",
        "",
        "| | steps/s | ratio | rollout / update |",
        "|---|---|---|---|",
    ]
    plain = result["rates"]["in turn"]
    for kind, rates in result["rates"].items():
        ratios = [overlapped / plain_rate for overlapped, plain_rate in zip(rates, plain, strict=True)]
        shares = " / ".join(f"{share:.0%}" for share in result["shares"][kind])
        lines.append(f"| {kind} | {median_range(rates)} | {median_range(ratios, 2)} | {shares} |")
    lines += [
        "",
        "The rollout's share of an overlapped iteration is the time that the update waited for the batch.",
        "",
        f"Mean return of the last tenth of {result['learning_steps']:,} steps, without the waiting; "
        f"{result['learning_epochs']} epochs:",
        "",
        "| | by seed | mean |",
        "|---|---|---|",
    ]
    for kind, returns in result["returns"].items():
        lines.append(f"| {kind} | {', '.join(f'{ret:.0f}' for ret in returns)} | {statistics.mean(returns):.0f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--learning-iterations", type=int, default=200)
    parser.add_argument("--learning-epochs", type=int, default=4)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "load_before": load_before()}
    with process_group():
        result["epochs"] = find_balanced_epochs()
        rates: dict[str, list[float]] = {kind: [] for kind in KEYS}
        shares: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for kind, key in KEYS.items():
                rows = measure_iterations(run_config(STEP_S, options.iterations, result["epochs"], key))
                rates[kind].append(rate(rows))
                shares[kind] = [
                    statistics.median(r[f"time/{part}"] for r in rows[WARM_UP:]) for part in ("rollout", "update")
                ]
            print(rates, flush=True)
        result |= {"rates": rates, "shares": shares, "learning_epochs": options.learning_epochs}
        result["learning_steps"] = options.learning_iterations * COPIES * HORIZON
        returns: dict[str, list[float]] = {kind: [] for kind in KEYS}
        for seed in range(options.seeds):
            for kind, key in KEYS.items():
                config = run_config(0.0, options.learning_iterations, options.learning_epochs, key, f"seed={seed}")
                last = [row["return"] for row in measure_iterations(config)[-options.learning_iterations // 10 :]]
                returns[kind].append(statistics.mean(last))
            print(returns, flush=True)
        result["returns"] = returns
    store("overlap", result, table(result))


if __name__ == "__main__":
    main()
