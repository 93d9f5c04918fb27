"""Read served acts as trajectories, from the Parquet files that an experiment's decisions are exported to.

One row is one decision sequence of one agent in one unit (a session, an episode). The files hold flattened observations
and actions of the environment; the reader turns them into what a collector would have gathered.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import torch
from gymnasium import spaces
from pyarrow import fs, parquet
from torch import Tensor

from marl_ray.errors import MarlRayError, one_line_without
from marl_ray.policies.actor_critic.distributions import Categorical, distribution_of
from marl_ray.policies.actor_critic.spaces import CATEGORICAL_SPACES, cardinalities, row_dtype, row_size, to_row
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
    parts: dict[str, list[_Part]] = {name: [] for name in spaces}
    for name, begin, table in tables(path, COLUMNS):
        rows = _Rows(name, table, begin + np.arange(len(table)))
        played_by = np.array([agents.get(agent, "") for agent in rows.plain("agent")], object)
        rows.check("agent", played_by != "", f"one of {', '.join(agents)}")
        for policy, parts_of_policy in parts.items():
            numbers = np.flatnonzero(played_by == policy)
            if len(numbers):
                members = [agent for agent, player in agents.items() if player == policy]
                parts_of_policy.append(_read_part(rows.only(numbers), members, spaces[policy]))
    everything = [part for parts_of_policy in parts.values() for part in parts_of_policy]
    if not everything:
        raise MarlRayError(f"{path}: expected at least one logged decision sequence")
    keys = np.concatenate([part.keys for part in everything])
    outcomes = np.concatenate([part.columns["outcome"] for part in everything])
    units, first = np.unique(keys, return_index=True)
    place = {unit: number for number, unit in enumerate(units)}
    policies, lengths = {}, {}
    for policy, parts_of_policy in parts.items():
        for part in parts_of_policy:
            number = np.array([place[key] for key in part.keys])
            expected = outcomes[first][number]
            part.rows.check("outcome", part.columns["outcome"] == expected, "the same outcome in all rows of a unit")
            part.columns["episode"] = number
        if parts_of_policy:
            policies[policy], lengths[policy] = _trajectories(parts_of_policy)
    return LoggedUnits(policies, lengths, tuple(units), outcomes[first])


def tables(path: str, columns: Mapping[str, pa.DataType]) -> Iterator[tuple[str, int, pa.Table]]:
    """Yield row groups: the file, the number of the group's first row in it, and these columns in these types.

    Groups are read one by one, because numbers take eight times as much space in a file's types as in a policy's.
    """
    try:
        filesystem, root = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
        info = filesystem.get_file_info(root)
        names = [root]
        if info.type == fs.FileType.Directory:
            inside = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
            names = sorted(f.path for f in inside if f.extension == "parquet" and f.base_name[0] not in "._")
        if info.type == fs.FileType.NotFound or not names:
            raise MarlRayError(f"{path}: expected a Parquet file or a folder of *.parquet files")
        for name in names:
            with filesystem.open_input_file(name) as source:
                file, begin = parquet.ParquetFile(source), 0
                for group in range(file.num_row_groups):
                    table = _read_columns(name, file, group, columns)
                    yield name, begin, table
                    begin += len(table)
    except (OSError, pa.ArrowException, ValueError) as error:  # no such file, not a Parquet file, or not a URI
        raise MarlRayError(f"{path}: cannot be read: {one_line_without(error, path)}") from error


def _read_columns(name: str, file: parquet.ParquetFile, group: int, kinds: Mapping[str, pa.DataType]) -> pa.Table:
    missing = [column for column in kinds if column not in file.schema_arrow.names]
    if missing:
        raise MarlRayError(f"{name}: expected a column {missing[0]!r}")
    table, columns = file.read_row_group(group, list(kinds)), {}
    for column, kind in kinds.items():
        try:
            columns[column] = table.column(column).cast(kind).combine_chunks()
        except pa.ArrowException as error:
            raise MarlRayError(f"{name}: column {column}: expected {kind}, got {table.column(column).type}") from error
    return pa.table(columns)


@dataclass(frozen=True)
class _Rows:
    """Rows of one file."""

    file: str
    table: pa.Table
    numbers: np.ndarray
    """(rows,) number of each row in the file."""

    def refuse(self, column: str, row: int, expected: str) -> NoReturn:
        raise MarlRayError(f"{self.file}: row {self.numbers[row]}, column {column}: expected {expected}")

    def check(self, column: str, good: Any, expected: str, lengths: np.ndarray | None = None) -> None:
        """Refuse the first row whose flag in `good` is False; with `lengths` there is one flag per step."""
        if good.all():
            return
        position = int(np.argmin(good))
        row = position if lengths is None else int(np.searchsorted(lengths.cumsum(), position, side="right"))
        self.refuse(column, row, expected)

    def plain(self, column: str) -> np.ndarray:
        """Read a column with one value per row."""
        array = self._without_nulls(column)
        return np.array(array.to_pylist(), object) if array.type == pa.string() else _numpy(array)

    def lengths(self, column: str) -> np.ndarray:
        """Return the length of each row's list in a list column, (rows,)."""
        return _numpy(self._without_nulls(column).value_lengths())

    def steps(self, column: str, lengths: np.ndarray, width: int | None = None) -> np.ndarray:
        """Return all steps of a list column one after another, (sum of lengths,).

        With `width` they are (sum of lengths, width).
        """
        if width is None:
            return _numpy(self._steps(column, lengths))
        widths, values = self.ragged_rows(column, lengths)
        self.check(column, widths == width, f"{width} numbers per step", lengths)
        return values.reshape(len(widths), width)

    def ragged_rows(self, column: str, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the count of numbers at each step of a list column of lists, and all the numbers one after another."""
        steps = self._steps(column, lengths)
        widths, values = _numpy(steps.value_lengths()), steps.flatten()
        if values.null_count:
            step = int(np.searchsorted(widths.cumsum(), np.argmin(_numpy(values.is_valid())), side="right"))
            self.check(column, np.arange(len(widths)) != step, "no nulls", lengths)
        return widths, _numpy(values)

    def _steps(self, column: str, lengths: np.ndarray) -> pa.Array:
        array = self._without_nulls(column)
        self.check(column, _numpy(array.value_lengths()) == lengths, "as many entries as observations")
        values = array.flatten()
        self.check(column, _numpy(values.is_valid()), "no nulls", lengths)
        return values

    def missing(self, column: str) -> np.ndarray:
        """Return (rows,) bool: True where the value is null."""
        return ~_numpy(self.table.column(column).combine_chunks().is_valid())

    def only(self, numbers: np.ndarray) -> "_Rows":
        return _Rows(self.file, self.table.take(numbers), self.numbers[numbers])

    def _without_nulls(self, column: str) -> pa.Array:
        self.check(column, ~self.missing(column), "a value, not null")
        return self.table.column(column).combine_chunks()


@dataclass(frozen=True)
class _Part:
    """One policy's part of one file."""

    rows: _Rows
    """The rows without their columns; errors take the file and the row from here."""
    keys: np.ndarray
    """(rows,) names of the units."""
    lengths: np.ndarray
    """(rows,) steps."""
    columns: dict[str, np.ndarray]
    """(rows,) each."""
    steps: dict[str, np.ndarray]
    """(all steps, ...) each."""


def _read_part(rows: _Rows, members: Sequence[str], spaces: Spaces) -> _Part:
    lengths = rows.lengths("observations")
    rows.check("observations", lengths > 0, "at least one step")
    columns = {name: rows.plain(name) for name in PER_ROW}
    rows.check("outcome", np.isfinite(columns["outcome"]), "a finite number")
    columns["agent"] = np.array([members.index(agent) for agent in rows.plain("agent")])
    steps = {name: rows.steps(name, lengths) for name in ("log_probs", "rewards", "mask", "terminated", "truncated")}
    for name in ("log_probs", "rewards"):
        rows.check(name, np.isfinite(steps[name]), "finite numbers", lengths)
    steps["observations"] = _observations(rows, lengths, spaces[0])
    steps["actions"] = _actions(rows, lengths, spaces[1])
    if isinstance(spaces[1], CATEGORICAL_SPACES):
        rows.check("log_probs", steps["log_probs"] < 1e-6, "logarithms of probabilities, at most 0", lengths)
    allowed = _masks(rows, lengths, spaces[1], steps["actions"])
    if allowed is not None:
        steps["action_masks"] = allowed
    steps["costs"] = _costs(rows, lengths)
    keys = np.array([f"{e}/{u}" for e, u in zip(rows.plain("experiment"), rows.plain("unit"), strict=True)], object)
    where = _Rows(rows.file, rows.table.schema.empty_table(), rows.numbers)  # frees the memory of the file's columns
    return _Part(where, keys, lengths, columns, steps)


def _observations(rows: _Rows, lengths: np.ndarray, space: spaces.Space[Any]) -> np.ndarray:
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


def _actions(rows: _Rows, lengths: np.ndarray, space: spaces.Space[Any]) -> np.ndarray:
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


def _masks(rows: _Rows, lengths: np.ndarray, space: spaces.Space[Any], actions: np.ndarray) -> np.ndarray | None:
    """Return the allowed actions, (steps, choices), or None if no row has masks.

    A row without masks allows all actions.
    """
    has_mask = ~rows.missing("action_masks")
    if not has_mask.any():
        return None
    numbers = np.flatnonzero(has_mask)
    if not isinstance(space, spaces.Discrete):
        rows.refuse("action_masks", int(numbers[0]), f"null: {space} is not masked")
    masked_rows, at = rows.only(numbers), np.repeat(has_mask, lengths)
    allowed = np.ones((int(lengths.sum()), int(space.n)), bool)
    allowed[at] = masked_rows.steps("action_masks", lengths[numbers], int(space.n))
    rows.check("action_masks", allowed[np.arange(len(allowed)), actions], "the taken action to be allowed", lengths)
    return allowed


def _costs(rows: _Rows, lengths: np.ndarray) -> np.ndarray:
    """Return (steps, K) costs; NaN at the steps of a unit whose costs were not measured."""
    widths, values = rows.ragged_rows("costs", lengths)
    signals = int(widths.max(initial=0))
    rows.check("costs", (widths == signals) | (widths == 0), f"{signals} numbers per step, or none", lengths)
    costs = np.full((len(widths), signals), np.nan)
    costs[widths > 0] = values.reshape(-1, signals) if signals else 0.0
    rows.check("costs", np.isfinite(costs).all(1) | (widths == 0), "finite numbers", lengths)
    return costs


def _trajectories(parts: Sequence[_Part]) -> tuple[Trajectories, Tensor]:
    """Join the rows of one policy from all files, in order and padded, and return them and their lengths."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    lengths = np.concatenate([part.lengths for part in parts])
    order = np.lexsort((columns["turn"], columns["agent"], columns["episode"]))
    columns = {name: values[order] for name, values in columns.items()}
    identity = np.stack([columns[name] for name in ("episode", "agent", "turn")])
    same = np.append((identity[:, 1:] == identity[:, :-1]).all(0), False)
    if same.any():
        number, file_of = (
            int(order[np.argmax(same) + 1]),
            np.repeat(np.arange(len(parts)), [len(p.keys) for p in parts]),
        )
        part = parts[file_of[number]]
        row = number - int(np.argmax(file_of == file_of[number]))
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
    nothing, costs = torch.zeros(taken.shape), pad("costs")
    trajectories = Trajectories(
        observations=pad("observations"),
        states=None,
        actions=pad("actions"),
        log_probs=pad("log_probs"),
        action_masks=pad("action_masks", True) if "action_masks" in parts[0].steps else None,
        values=nothing,
        bootstrap=nothing,
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


def _numpy(array: pa.Array) -> np.ndarray:
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
