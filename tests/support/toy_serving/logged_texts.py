"""Exported texts as Parquet files; a module of its own so that other processes can import it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from marl_ray.config.run.model import GenerationConfig
from marl_ray.serving.logs.text_rows import SCHEMA


def served_row(
    unit: str,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    log_probs: Sequence[float],
    outcome: float,
    tokenizer: Any,
    generation: GenerationConfig,
    **other: Any,
) -> dict[str, Any]:
    """One row; `other` replaces columns."""
    settings = {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    row = {
        "experiment": "e",
        "unit": unit,
        "arm": "a",
        "digest": "d",
        "epoch": 0,
        "propensity": 1.0,
        "agent": "writer",
        "group": 0,
        "episode": 0,
        "turn": 0,
        "greedy": False,
        "sampled": True,
        "at": 1.0,
        "exposed_at": 0.0,
        "outcome": outcome,
        "outcome_at": 2.0,
        "costs": [],
        "messages": None,
        "tools": None,
        "seed": 0,
        "asked": [],
        "prompt": tokenizer.decode(list(prompt_ids)),
        "prompt_ids": list(prompt_ids),
        "text": tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False),
        "ids": list(ids),
        "log_probs": list(log_probs),
        "finish": "length",
    }
    return row | settings | other


def write_served(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows), SCHEMA), path)
    return str(path)
