"""Seconds that the shared maths of the algorithms takes on one batch: 4,096 sequences of 512 steps, groups of 8.

    .venv/bin/python -m benchmarks.learning.algorithms

Two threads, and one beside it: with two, an operation waits where another program holds a core. The peer is the loop
reference of the tests (`tests/support/slow_references.py`), measured in the same run on a few of the same sequences and
scaled by their number. Writes `benchmarks/results/algorithms.{json,md}`.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.records import ROOT, load_before, machine, store
from marl_ray.algorithms.advantages.gae import gae
from marl_ray.algorithms.advantages.groups import (
    center_scores,
    group_index,
    leave_one_out,
    standardize_scores,
    subtract_greedy_score,
)
from marl_ray.algorithms.advantages.normalization import moments, standardize
from marl_ray.algorithms.advantages.returns import reward_to_go, sequence_scores
from marl_ray.algorithms.losses.aggregation import count_tokens_and_sequences, loss_weights
from marl_ray.algorithms.losses.kl import kl_estimate
from marl_ray.algorithms.losses.ratios import (
    gspo_token_log_ratio,
    sequence_log_ratio,
    token_ratio,
    truncated_importance,
)

sys.path.insert(0, str(ROOT / "tests/support"))
import slow_references as references

BATCH, STEPS, GROUP, SIGNALS = 4096, 512, 8, 2
"""Sequences of the batch, steps of each, sequences of a group, and costs of a step."""
LOOP_ROWS, LOOP_RUNS = 16, 3
"""Sequences that the references get; a multiple of the group size."""
RUNS, TARGET_MS = 15, 50
"""Measurements of each formula, and the goal of their median, in milliseconds."""
Case = tuple[str, Callable[[], object], Callable[[], object] | None]


def batch(rows: int) -> dict[str, Any]:
    """Return the first rows of one batch.

    They are ragged responses, some with gaps (tool output), and actor-critic rows beside.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, BATCH, STEPS, generator=generator)
    chance = torch.rand(3, BATCH, STEPS, generator=generator)
    lengths = torch.randint(0, STEPS + 1, (BATCH, 1), generator=generator)
    scores = torch.randint(0, 2, (BATCH,), generator=generator).float()
    number = torch.arange(BATCH)
    tensors = {
        "rewards": x[0],
        "values": x[1],
        "bootstrap": x[2],
        "new": -x[3].abs(),
        "old": -x[3].abs() + 0.1 * x[4],
        "mask": (torch.arange(STEPS) < lengths) & (chance[0] < 0.9),
        "terminated": chance[1] < 0.01,
        "truncated": chance[2] < 0.01,
        "scores": scores,
        "prompt": number // GROUP,
        "greedy": number % GROUP == 0,
        "include": number % GROUP > 0,
    }
    return {name: tensor[:rows].contiguous() for name, tensor in tensors.items()}


def cases() -> list[Case]:
    """Return the cases: a name, the estimator on the whole batch, and the reference on a few rows."""
    a, b = batch(BATCH), batch(LOOP_ROWS)
    zeros = torch.zeros(BATCH, dtype=torch.int64)
    index, count = group_index(a["prompt"], zeros, zeros)
    few, few_zeros = index[:LOOP_ROWS], zeros[:LOOP_ROWS]
    episodes = ("mask", "terminated", "truncated")
    signals = ("rewards", "values", "bootstrap")
    keys, discounts = (*signals, *episodes), (0.99, 0.95)
    columns: Any = (*(a[key] for key in keys), *discounts)
    few_columns: Any = (*(b[key] for key in keys), *discounts)
    stacked: Any = (*(torch.stack([a[key]] * SIGNALS, 2) for key in signals), *(a[key] for key in episodes), *discounts)
    tokens, sequences = count_tokens_and_sequences(a["mask"])
    total = moments(a["rewards"], a["mask"])
    grouped = (a["scores"], index, count)
    include, greedy = a["include"], a["greedy"]

    def loop(formula: Callable[..., float]) -> Callable[[], object]:
        return lambda: references.score_groups(b["scores"], few, b["include"], formula)

    def weights(mode: Any) -> Case:
        return (
            f"loss_weights, {mode}",
            lambda: loss_weights(a["mask"], mode, tokens, sequences, STEPS),
            lambda: references.aggregate(b["rewards"], b["mask"], mode, STEPS),
        )

    def kl(kind: Any) -> Case:
        return (
            f"kl_estimate, {kind}",
            lambda: kl_estimate(a["new"], a["old"], kind),
            lambda: references.kl_estimate(b["new"], b["old"], kind),
        )

    return [
        ("gae", lambda: gae(*columns), lambda: references.gae(*few_columns)),
        (f"gae, {SIGNALS} signals", lambda: gae(*stacked), None),
        (
            "reward_to_go",
            lambda: reward_to_go(a["rewards"], a["mask"], a["terminated"], 0.99),
            lambda: references.reward_to_go(b["rewards"], b["mask"], b["terminated"], 0.99),
        ),
        ("sequence_scores", lambda: sequence_scores(a["rewards"]), lambda: [sum(r) for r in b["rewards"].tolist()]),
        (
            "group_index",
            lambda: group_index(a["prompt"], zeros, zeros, zeros[:, None]),
            lambda: references.group_index(b["prompt"], few_zeros, few_zeros, few_zeros[:, None]),
        ),
        ("centred", lambda: center_scores(*grouped, include), loop(references.center_scores)),
        ("standardised", lambda: standardize_scores(*grouped, include), loop(references.standardize_scores(1e-6, 1))),
        ("leave_one_out", lambda: leave_one_out(*grouped, include), loop(references.leave_one_out)),
        ("greedy_baseline", lambda: subtract_greedy_score(*grouped, include, greedy), None),
        ("counts", lambda: count_tokens_and_sequences(a["mask"]), None),
        *(weights(mode) for mode in ("token-mean", "seq-mean-token-mean", "fixed-length")),
        *(kl(kind) for kind in ("k1", "k2", "k3", "k3+")),
        ("moments", lambda: moments(a["rewards"], a["mask"]), None),
        (
            "standardise",
            lambda: standardize(a["rewards"], a["mask"], total),
            lambda: references.standardize(b["rewards"], b["mask"], 0, 1e-8, True, True),
        ),
        (
            "token_ratio",
            lambda: token_ratio(a["new"], a["old"]),
            lambda: references.token_ratio(b["new"], b["old"]),
        ),
        (
            "sequence_log_ratio",
            lambda: sequence_log_ratio(a["new"], a["old"], a["mask"]),
            lambda: references.sequence_log_ratio(b["new"], b["old"], b["mask"]),
        ),
        (
            "gspo_token_log_ratio",
            lambda: gspo_token_log_ratio(a["new"], a["old"], a["mask"]),
            lambda: references.gspo_token_log_ratio(b["new"], b["old"], b["mask"]),
        ),
        (
            "truncated_importance",
            lambda: truncated_importance(a["new"], a["old"], 2.0),
            lambda: references.truncated_importance(b["new"], b["old"], 2.0),
        ),
    ]


def milliseconds(function: Callable[[], object], runs: int) -> list[float]:
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# The shared maths of the algorithms: milliseconds per batch",
        "",
        f"{BATCH:,} sequences of {STEPS} steps, float32, ragged masks, groups of {GROUP}; {RUNS} runs each.",
        f"The loop is the tests' reference on {LOOP_ROWS} of these sequences, scaled by {BATCH // LOOP_ROWS}: an estimate.",
        "",
        "| estimator | two threads, median ms | least-most ms | one thread, median ms | loop, scaled, ms |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["milliseconds"].items():
        pair, alone, loop = row["two_threads"], statistics.median(row["one_thread"]), row["loop_scaled"]
        loop_rate = f"{statistics.median(loop):,.0f}" if loop else ""
        lines.append(
            f"| {name} | {statistics.median(pair):.2f} | {min(pair):.2f}-{max(pair):.2f} | {alone:.2f} | {loop_rate} |"
        )
    medians = {name: statistics.median(row["two_threads"]) for name, row in result["milliseconds"].items()}
    slow = [name for name, median in medians.items() if median >= TARGET_MS]
    verdict = f"Not below {TARGET_MS} ms: {'; '.join(slow)}." if slow else f"All are below {TARGET_MS} ms."
    lines += ["", f"{verdict} Two threads, median. Load before: {result['load_before']:.1f}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and store."""
    result: dict[str, Any] = {"machine": machine("torch"), "load_before": load_before(), "milliseconds": {}}
    for name, formula, loop in cases():
        row = {"loop_scaled": [BATCH / LOOP_ROWS * t for t in milliseconds(loop, LOOP_RUNS)] if loop else []}
        for threads, label in ((2, "two_threads"), (1, "one_thread")):
            torch.set_num_threads(threads)
            row[label] = milliseconds(formula, RUNS)
        result["milliseconds"][name] = row
    store("algorithms", result, table(result))


if __name__ == "__main__":
    main()
