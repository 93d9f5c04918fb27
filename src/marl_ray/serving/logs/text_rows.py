"""Logged texts as rows of Parquet.

One row is one response, a sequence of `marl_ray.trajectories` whose steps are tokens.
"""

from collections.abc import Sequence

import orjson
import pyarrow as pa

from marl_ray.experiments.store.units import Outcome
from marl_ray.serving.logs.acts import LoggedText

FREE_SETTINGS = frozenset({"temperature", "top_p", "top_k", "max_tokens", "stop"})
"""Settings that a request may change without making `log_probs` differ from the distribution that tokens were drawn from."""

UNIT_FIELDS = [
    ("experiment", pa.string()),
    ("unit", pa.string()),
    ("arm", pa.string()),
    ("digest", pa.string()),
    ("epoch", pa.int64()),
    ("propensity", pa.float64()),  # probability of the unit's arm
    ("agent", pa.string()),
    ("group", pa.int64()),  # each unit is a group of its own
    ("episode", pa.int64()),
    ("turn", pa.int64()),  # for texts, the number of the agent's response in the unit
    ("greedy", pa.bool_()),  # true if any step was greedy
]
"""The first columns, which rows of actor-critics have too."""
SCHEMA = pa.schema(
    [
        *UNIT_FIELDS,
        ("sampled", pa.bool_()),  # true if `log_probs` are of the very distribution that tokens were drawn from
        ("at", pa.float64()),  # seconds since 1970
        ("exposed_at", pa.float64()),
        ("outcome", pa.float64()),
        ("outcome_at", pa.float64()),
        ("costs", pa.list_(pa.float64())),  # (K,): K = 1 for units with the metric
        ("prompt", pa.string()),  # null if the request has messages
        ("messages", pa.string()),  # JSON; null if the request has a prompt
        ("tools", pa.string()),  # JSON; null if there are none
        ("prompt_ids", pa.list_(pa.int64())),
        ("text", pa.string()),
        ("ids", pa.list_(pa.int64())),
        ("log_probs", pa.list_(pa.float64())),
        ("finish", pa.string()),
        ("seed", pa.int64()),
        ("temperature", pa.float64()),  # these four are null if the arm reports no settings
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("max_tokens", pa.int64()),
        ("asked", pa.list_(pa.string())),  # settings that the request chose itself
    ]
)


def text_rows(
    texts: Sequence[LoggedText], outcome: Outcome, cost: float | None, episode: int
) -> list[dict[str, object]]:
    """Return a unit's rows, by agent and in the order of time."""
    rows: list[dict[str, object]] = []
    turns: dict[str, int] = {}
    for text in sorted(texts, key=lambda text: text.agent):  # a stable sort, which keeps the order of time
        turns[text.agent] = turns.get(text.agent, -1) + 1
        rows.append(
            {
                "experiment": text.experiment,
                "unit": outcome.unit,
                "arm": outcome.arm,
                "digest": text.digest,
                "epoch": outcome.epoch,
                "propensity": outcome.propensity,
                "agent": text.agent,
                "group": episode,
                "episode": episode,
                "turn": turns[text.agent],
                "greedy": text.greedy,
                "sampled": _is_sampled(text),
                "at": text.at,
                "exposed_at": outcome.exposed_at,
                "outcome": outcome.value,
                "outcome_at": outcome.at,
                "costs": [] if cost is None else [cost],
                "prompt": text.prompt,
                "messages": _encode_json(text.messages),
                "tools": _encode_json(text.tools),
                "prompt_ids": text.prompt_ids,
                "text": text.text,
                "ids": text.ids,
                "log_probs": text.log_probs,
                "finish": text.finish,
                "seed": text.seed,
                **{name: text.settings.get(name) for name in ("temperature", "top_p", "top_k", "max_tokens")},
                "asked": text.asked,
            }
        )
    return rows


def _is_sampled(text: LoggedText) -> bool:
    """Return True if the log-probabilities are of the very distribution that the tokens were drawn from."""
    is_untruncated = text.settings.get("top_p", 0.0) == 1 and text.settings.get("top_k", 1) == 0
    return is_untruncated and not text.greedy and bool(text.prompt_ids) and FREE_SETTINGS.issuperset(text.asked)


def _encode_json(values: Sequence[object]) -> str | None:
    return orjson.dumps(values).decode() if values else None
