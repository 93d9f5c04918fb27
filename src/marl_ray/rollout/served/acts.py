"""Read served acts as trajectories, from the Parquet files that an experiment's decisions are exported to.

One row is one decision sequence of one agent in one unit (a session, an episode). The files hold flattened observations
and actions of the environment; the reader turns them into what a collector would have gathered.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from gymnasium import spaces
from torch import Tensor

from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.distributions import Categorical, distribution_of
from marl_ray.policies.actor_critic.spaces import CATEGORICAL_SPACES, cardinalities, row_dtype, row_size, to_row
from marl_ray.rollout.served.parquet_rows import ParquetRows, read_tables
from marl_ray.trajectories import Trajectories

NUMBER_LIST, FLAG_LIST = pa.list_(pa.float64()), pa.list_(pa.bool_())
COLUMNS: dict[str, pa.DataType] = {
    "experiment": pa.string(),
    "unit": pa.string(),
    "agent": pa.string(),
    "group": pa.int64(),
    "turn": pa.int64(),
    "greedy": pa.bool_(),
    "outcome": pa.float64(),
    "observations": pa.list_(NUMBER_LIST),
    "actions": pa.list_(NUMBER_LIST),
    "log_probs": NUMBER_LIST,
    "action_masks": pa.list_(FLAG_LIST),
    "rewards": NUMBER_LIST,
    "costs": pa.list_(NUMBER_LIST),
    "mask": FLAG_LIST,
    "terminated": FLAG_LIST,
    "truncated": FLAG_LIST,
}
"""The columns that are read; a file may have more."""
PER_ROW = ("group", "turn", "greedy", "outcome")
"""The columns with one number per row."""
LOG_PROB_ROUNDING = 1e-6
"""Excess over 0, in nats, that rounding may give the log-probability of a categorical action."""

Spaces = tuple[spaces.Space[Any], spaces.Space[Any]]
"""(observation space, action space)."""


@dataclass(frozen=True)
class LoggedUnits:
    """Logged units and the decisions in them."""

    policies: dict[str, Trajectories]
    """Policy -> one row per sequence, ordered by unit, agent and turn; `episode` is the unit's index, `states` is None.
    Padded at the end (mask False); costs that were not measured are NaN. A policy without logged rows is not there."""
    lengths: dict[str, Tensor]
    """Policy -> (B,) int64: steps of each row before its padding."""
    units: tuple[str, ...]
    """`experiment/unit`, sorted."""
    outcomes: np.ndarray
    """(units,) float64."""


def read_logged(path: str, agents: Mapping[str, str], spaces: Mapping[str, Spaces]) -> LoggedUnits:
    """Read a file, all `*.parquet` of a folder and the folders in it, or either of them as a URI (`s3://...`).

    `agents` says which policy plays which agent (its order is the agents' order), `spaces` what each policy sees and does.
    Actions are clipped on their way to a Box; what is logged, and read here, is the clipped action.
    Raises MarlRayError naming the file, the row (from 0) and the column of what does not fit.
    """
    parts: dict[str, list[_PolicyRows]] = {name: [] for name in spaces}
    for name, begin, table in read_tables(path, COLUMNS):
        rows = ParquetRows(name, table, begin + np.arange(len(table)))
        played_by = np.array([agents.get(agent, "") for agent in rows.column("agent")], object)
        rows.check("agent", played_by != "", f"one of {', '.join(agents)}")
        for policy, parts_of_policy in parts.items():
            numbers = np.flatnonzero(played_by == policy)
            if len(numbers):
                members = [agent for agent, player in agents.items() if player == policy]
                parts_of_policy.append(_read_policy_rows(rows.select(numbers), members, spaces[policy]))
    all_parts = [part for parts_of_policy in parts.values() for part in parts_of_policy]
    if not all_parts:
        raise MarlRayError(f"{path}: expected at least one logged decision sequence")
    keys = np.concatenate([part.keys for part in all_parts])
    outcomes = np.concatenate([part.columns["outcome"] for part in all_parts])
    units, first = np.unique(keys, return_index=True)
    unit_numbers = {unit: number for number, unit in enumerate(units)}
    policies, lengths = {}, {}
    for policy, parts_of_policy in parts.items():
        for part in parts_of_policy:
            number = np.array([unit_numbers[key] for key in part.keys])
            expected = outcomes[first][number]
            part.rows.check("outcome", part.columns["outcome"] == expected, "the same outcome in all rows of a unit")
            part.columns["episode"] = number
        if parts_of_policy:
            policies[policy], lengths[policy] = _join_rows(parts_of_policy)
    return LoggedUnits(policies, lengths, tuple(units), outcomes[first])


@dataclass(frozen=True)
class _PolicyRows:
    """One policy's part of one file."""

    rows: ParquetRows
    """The rows without their columns; errors take the file and the row from here."""
    keys: np.ndarray
    """(rows,) names of the units."""
    lengths: np.ndarray
    """(rows,) steps."""
    columns: dict[str, np.ndarray]
    """(rows,) each."""
    steps: dict[str, np.ndarray]
    """(all steps, ...) each."""


def _read_policy_rows(rows: ParquetRows, members: Sequence[str], spaces: Spaces) -> _PolicyRows:
    """Read and check the rows of one policy, which plays the agents `members`."""
    lengths = rows.lengths("observations")
    rows.check("observations", lengths > 0, "at least one step")
    columns = {name: rows.column(name) for name in PER_ROW}
    rows.check("outcome", np.isfinite(columns["outcome"]), "a finite number")
    columns["agent"] = np.array([members.index(agent) for agent in rows.column("agent")])
    steps = {name: rows.steps(name, lengths) for name in ("log_probs", "rewards", "mask", "terminated", "truncated")}
    for name in ("log_probs", "rewards"):
        rows.check(name, np.isfinite(steps[name]), "finite numbers", lengths)
    steps["observations"] = _read_observations(rows, lengths, spaces[0])
    steps["actions"] = _read_actions(rows, lengths, spaces[1])
    if isinstance(spaces[1], CATEGORICAL_SPACES):
        is_log_prob = steps["log_probs"] < LOG_PROB_ROUNDING
        rows.check("log_probs", is_log_prob, "logarithms of probabilities, at most 0", lengths)
    allowed = _read_masks(rows, lengths, spaces[1], steps["actions"])
    if allowed is not None:
        steps["action_masks"] = allowed
    steps["costs"] = _read_costs(rows, lengths)
    keys = np.array([f"{e}/{u}" for e, u in zip(rows.column("experiment"), rows.column("unit"), strict=True)], object)
    without_columns = ParquetRows(rows.file, rows.table.schema.empty_table(), rows.numbers)  # frees their memory
    return _PolicyRows(without_columns, keys, lengths, columns, steps)


def _read_observations(rows: ParquetRows, lengths: np.ndarray, space: spaces.Space[Any]) -> np.ndarray:
    """Return the flat rows (steps, D)."""
    values = to_row(space, rows.steps("observations", lengths, row_size(space)))
    if isinstance(space, CATEGORICAL_SPACES):
        good = (values >= 0) & (values < np.array(cardinalities(space))) & (values == np.round(values))
        rows.check("observations", good.all(1), f"categories of {space}", lengths)
    elif space.dtype == np.uint8:
        good = (values >= 0) & (values <= 255) & (values == np.round(values))
        rows.check("observations", good.all(1), "integers from 0 to 255", lengths)
    else:
        rows.check("observations", np.isfinite(values.astype(np.float32)).all(1), "finite numbers", lengths)
    return values.astype(row_dtype(space))


def _read_actions(rows: ParquetRows, lengths: np.ndarray, space: spaces.Space[Any]) -> np.ndarray:
    """Return the actions (steps, *shape) as a distribution takes them: choices count from zero."""
    distribution = distribution_of(space)
    values = rows.steps("actions", lengths, math.prod(distribution.shape))
    if isinstance(distribution, Categorical):
        values = values - distribution.start
        good = (values >= 0) & (values < np.array(distribution.sizes)) & (values == np.round(values))
        rows.check("actions", good.all(1), f"actions of {space}", lengths)
        return values.astype(np.int64).reshape(-1, *distribution.shape)
    rows.check("actions", np.isfinite(values).all(1), "finite numbers", lengths)
    return values.astype(np.float32).reshape(-1, *distribution.shape)


def _read_masks(
    rows: ParquetRows, lengths: np.ndarray, space: spaces.Space[Any], actions: np.ndarray
) -> np.ndarray | None:
    """Return the allowed actions, (steps, choices), or None if no row has masks.

    A row without masks allows all actions.
    """
    has_mask = ~rows.is_null("action_masks")
    if not has_mask.any():
        return None
    numbers = np.flatnonzero(has_mask)
    if not isinstance(space, spaces.Discrete):
        rows.refuse("action_masks", int(numbers[0]), f"null: {space} is not masked")
    masked_rows, at = rows.select(numbers), np.repeat(has_mask, lengths)
    allowed = np.ones((int(lengths.sum()), int(space.n)), bool)
    allowed[at] = masked_rows.steps("action_masks", lengths[numbers], int(space.n))
    rows.check("action_masks", allowed[np.arange(len(allowed)), actions], "the taken action to be allowed", lengths)
    return allowed


def _read_costs(rows: ParquetRows, lengths: np.ndarray) -> np.ndarray:
    """Return (steps, K) costs; NaN at the steps of a unit whose costs were not measured."""
    widths, values = rows.ragged_rows("costs", lengths)
    signals = int(widths.max(initial=0))
    rows.check("costs", (widths == signals) | (widths == 0), f"{signals} numbers per step, or none", lengths)
    costs = np.full((len(widths), signals), np.nan)
    costs[widths > 0] = values.reshape(-1, signals) if signals else 0.0
    rows.check("costs", np.isfinite(costs).all(1) | (widths == 0), "finite numbers", lengths)
    return costs


def _join_rows(parts: Sequence[_PolicyRows]) -> tuple[Trajectories, Tensor]:
    """Join the rows of one policy from all files, in order and padded, and return them and their lengths."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    lengths = np.concatenate([part.lengths for part in parts])
    order = np.lexsort((columns["turn"], columns["agent"], columns["episode"]))
    columns = {name: values[order] for name, values in columns.items()}
    identity = np.stack([columns[name] for name in ("episode", "agent", "turn")])
    is_repeated = np.append((identity[:, 1:] == identity[:, :-1]).all(0), False)
    if is_repeated.any():
        number = int(order[np.argmax(is_repeated) + 1])
        part_numbers = np.repeat(np.arange(len(parts)), [len(p.keys) for p in parts])
        part = parts[part_numbers[number]]
        row = number - int(np.argmax(part_numbers == part_numbers[number]))
        part.rows.refuse("turn", row, "one row per unit, agent and turn, but there is another")
    begin, lengths = (lengths.cumsum() - lengths)[order], lengths[order].astype(np.int64)
    time = np.arange(lengths.max())
    taken = time[None] < lengths[:, None]
    source = (begin[:, None] + time[None])[taken]

    def pad(name: str, blank: bool | float = 0) -> Tensor:
        flat = np.concatenate([part.steps[name] for part in parts])
        array = np.full((*taken.shape, *flat.shape[1:]), blank, np.float32 if flat.dtype == np.float64 else flat.dtype)
        array[taken] = flat[source]
        return torch.from_numpy(array)

    if any("action_masks" in part.steps for part in parts):
        choices = next(part.steps["action_masks"].shape[1] for part in parts if "action_masks" in part.steps)
        for part in parts:
            part.steps.setdefault("action_masks", np.ones((int(part.lengths.sum()), choices), bool))
    signals = max(part.steps["costs"].shape[1] for part in parts)
    for part in parts:
        count = part.steps["costs"].shape[1]
        if count not in (0, signals):
            part.rows.refuse("costs", 0, f"{signals} numbers per step, as in other rows, or none")
        if count < signals:
            part.steps["costs"] = np.full((int(part.lengths.sum()), signals), np.nan)
    zeros, costs = torch.zeros(taken.shape), pad("costs")
    trajectories = Trajectories(
        observations=pad("observations"),
        states=None,
        actions=pad("actions"),
        log_probs=pad("log_probs"),
        action_masks=pad("action_masks", True) if "action_masks" in parts[0].steps else None,
        values=zeros,
        bootstrap=zeros,
        cost_values=torch.zeros_like(costs),
        cost_bootstrap=torch.zeros_like(costs),
        rewards=pad("rewards"),
        costs=costs,
        mask=pad("mask"),
        terminated=pad("terminated"),
        truncated=pad("truncated"),
        **{name: torch.from_numpy(columns[name]) for name in ("greedy", "group", "episode", "agent", "turn")},
    )
    return trajectories, torch.from_numpy(lengths)
