"""The export joins the act log with the outcomes and writes trajectories as Parquet, which runs can train on.

A row is one decision sequence of `marl_ray.trajectories`: one agent's decisions in one unit (session), T steps. All
lists but those about the agent as a whole have T entries. For language models a row is one response (`text_rows`).
"""

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from marl_ray.errors import MarlRayError, did_you_mean, one_line
from marl_ray.experiments.store.experiments import ExperimentStore
from marl_ray.experiments.store.units import Outcome, UnitStore
from marl_ray.json_types import JsonObject
from marl_ray.serving.logs import text_rows
from marl_ray.serving.logs.act_reader import read_logged, sorted_by_unit
from marl_ray.serving.logs.acts import (
    LoggedAct,
    LoggedRequest,
    LoggedText,
    upload,
)
from marl_ray.stored_files.storages import open_storage
from marl_ray.temporary_folders import temporary_folder

SCHEMA_VERSION = "1"
"""Version of the columns, in the file's metadata."""
COST = "cost"
"""The metric that becomes the constraint cost."""
GROUP_ROWS = 5_000
"""Number of rows at which a row group is written, however few numbers it has."""
GROUP_NUMBERS = 1_000_000
"""Approximate number of numbers in a row group, 8 MB of them."""
STEP_NUMBERS = 12
"""Number of numbers in a step besides its observation."""

_STEPS = pa.list_(pa.float64())
_ROWS = pa.list_(_STEPS)
SCHEMA = pa.schema(
    [
        *text_rows.UNIT_FIELDS,
        ("exposed_at", pa.float64()),  # seconds since 1970
        ("outcome", pa.float64()),
        ("outcome_at", pa.float64()),
        ("observations", _ROWS),  # (T, D), flat as by `policies.actor_critic.spaces.to_row`
        ("actions", _ROWS),  # (T, A), A = 1 for Discrete
        ("log_probs", _STEPS),
        ("action_masks", pa.list_(pa.list_(pa.bool_()))),  # (T, choices), null where the agent gave none
        ("rewards", _STEPS),  # the outcome at the last step, else 0
        ("costs", _ROWS),  # (T, K): K = 1 for units with the metric, at the last step, else 0
        ("mask", pa.list_(pa.bool_())),  # False where one action alone was allowed
        ("terminated", pa.list_(pa.bool_())),
        ("truncated", pa.list_(pa.bool_())),
    ]
)

T = TypeVar("T")


@dataclass(frozen=True)
class ExportSummary:
    """Counts of what an export wrote and left out."""

    units: int
    """Units written."""
    sequences: int
    """Rows: one per unit and agent, or one per response."""
    decisions: int
    """Logged requests (acts, or responses) of the units written."""
    censored: int
    """Units without an outcome, left out."""
    mixed: int
    """Units left out because some requests were answered by another bundle than that of the arm for which the outcome
    counts: several policies made such a sequence, or an earlier experiment of this name."""
    path: str
    """Path or URI of the file."""


def export(experiments: ExperimentStore, units: UnitStore, experiment: str, decisions: str, out: str) -> ExportSummary:
    """Join the act log in `decisions` with the experiment's outcomes and costs, and write `OUT/EXPERIMENT.parquet`.

    Both are local folders or URIs (`s3://bucket/prefix`). Rows are in the order of (episode, agent); episodes are the
    units, numbered by name. Memory is bounded but for the longest unit; sorting uses the folder for temporary files, which
    needs about the log's uncompressed size. The file appears when it is complete.

    Requests that are not in the log (dropped; or not yet uploaded) are missing from their sequences. Raises
    MarlRayError for an unknown experiment, a log without requests of it, and an `out` that cannot be written.
    """
    record = experiments.read(experiment)
    if record is None:
        names = experiments.names()
        instead = did_you_mean(experiment, names) if names else ""
        raise MarlRayError(f"experiment: unknown experiment {experiment!r}{instead}")
    digests = {name: arm["digest"] for name, arm in record.config["arms"].items()}
    filesystem, root = open_storage(out, "out")
    remote = "://" in out
    name = f"{experiment}.parquet"
    try:
        if not remote:
            Path(root).mkdir(parents=True, exist_ok=True)
        # In the same folder as the file, so that the last step is a rename.
        local = None if remote else tempfile.TemporaryDirectory(dir=root, prefix=".export-")
        with local or temporary_folder("export") as folder:
            file = Path(folder) / f"{name}.tmp"  # readers of the folder only take *.parquet
            counts = _write(units, experiment, digests, decisions, file)
            if remote:
                upload(file, filesystem, f"{root}/{name}")
            else:
                os.replace(file, f"{root}/{name}")
    except (OSError, pa.ArrowException) as error:
        raise MarlRayError(f"out: {out!r} cannot be written: {one_line(error)}") from error
    return ExportSummary(**counts, path=f"{out.partition('?')[0].rstrip('/')}/{name}" if remote else f"{root}/{name}")


def _write(store: UnitStore, experiment: str, digests: Mapping[str, str], decisions: str, file: Path) -> dict[str, int]:
    """Write the file and return the summary's counts. `digests` are the bundles of the experiment's arms."""
    # Both are read before the act log: an outcome that arrives meanwhile would be joined to an incomplete sequence.
    outcome_of = _in_rising_order(sorted_by_unit(map(_encode_line, store.outcomes(experiment)), _parse_outcome))
    cost_of = _in_rising_order(sorted_by_unit(map(_encode_line, store.metric_values(experiment, COST)), _parse_cost))
    counts = dict.fromkeys(("units", "sequences", "decisions", "censored", "mixed"), 0)
    metadata = {"marl_ray.schema_version": SCHEMA_VERSION, "marl_ray.experiment": experiment}
    rows: list[dict[str, object]] = []
    numbers = 0
    logged = read_logged(decisions, experiment)
    first = next(logged, None)
    all_logged = itertools.chain(() if first is None else (first,), logged)

    def of_units() -> Iterator[tuple[list[LoggedRequest], list[dict[str, object]]]]:
        """Yield the log and the rows of each unit that is kept."""
        for unit, of_unit in itertools.groupby(all_logged, key=lambda logged: logged.unit):
            acts = list(of_unit)
            outcome = outcome_of(unit)
            cost = cost_of(unit)
            if outcome is None:
                counts["censored"] += 1
            elif {(act.arm, act.digest) for act in acts} != {(outcome.arm, digests.get(outcome.arm))}:
                counts["mixed"] += 1
            else:
                yield acts, _rows(acts, outcome, cost, counts["units"])

    units = of_units()
    # All arms of an experiment are of one kind, but the log may hold another kind of an earlier experiment of this
    # name.
    first_unit = next(units, None)
    kind = first if first_unit is None else first_unit[0][0]
    schema = text_rows.SCHEMA if isinstance(kind, LoggedText) else SCHEMA
    with pq.ParquetWriter(str(file), schema.with_metadata(metadata), compression="zstd") as writer:
        for acts, unit_rows in itertools.chain(() if first_unit is None else (first_unit,), units):
            counts["units"] += 1
            counts["decisions"] += len(acts)
            counts["sequences"] += len(unit_rows)
            rows += unit_rows
            numbers += sum(map(_count_numbers, unit_rows))
            if len(rows) >= GROUP_ROWS or numbers >= GROUP_NUMBERS:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
                numbers = 0
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema))
    if not any(counts.values()):
        raise MarlRayError(
            f"decisions: expected logged requests of experiment {experiment!r} in {decisions!r}, found none"
        )
    return counts


def _rows(logged: list[LoggedRequest], outcome: Outcome, cost: float | None, episode: int) -> list[JsonObject]:
    """Return a unit's rows; its log is of one kind."""
    texts = [row for row in logged if isinstance(row, LoggedText)]
    if texts:
        return text_rows.text_rows(texts, outcome, cost, episode)
    return _sequences([row for row in logged if isinstance(row, LoggedAct)], outcome, cost, episode)


def _count_numbers(row: JsonObject) -> int:
    """Return the approximate count of numbers in a row."""
    if "observations" in row:
        return sum(len(step) + STEP_NUMBERS for step in row["observations"])
    return len(row["prompt_ids"]) + 2 * len(row["ids"]) + (len(row["text"]) + len(row["messages"] or "")) // 8


def _sequences(acts: list[LoggedAct], outcome: Outcome, cost: float | None, episode: int) -> list[dict[str, object]]:
    """Return a unit's rows, one per agent, by name.

    Each agent's steps are the acts that it took part in.
    """
    rows = []
    for agent in sorted({agent for act in acts for agent in act.actions}):
        steps = [act for act in acts if agent in act.actions]
        before = len(steps) - 1
        masks = _fill_masks([step.masks.get(agent) for step in steps])
        rows.append(
            {
                "experiment": acts[0].experiment,
                "unit": outcome.unit,
                "arm": outcome.arm,
                "digest": acts[0].digest,
                "epoch": outcome.epoch,
                "propensity": outcome.propensity,
                "agent": agent,
                "group": episode,
                "episode": episode,
                "turn": 0,
                "greedy": any(step.greedy for step in steps),
                "exposed_at": outcome.exposed_at,
                "outcome": outcome.value,
                "outcome_at": outcome.at,
                "observations": [_flatten(step.observations[agent]) for step in steps],
                "actions": [_flatten(step.actions[agent]) for step in steps],
                "log_probs": [step.log_probs[agent] for step in steps],
                "action_masks": masks,
                "rewards": [0.0] * before + [outcome.value],
                "costs": [[]] * len(steps) if cost is None else [[0.0]] * before + [[cost]],
                "mask": [True] * len(steps) if masks is None else [sum(allowed) != 1 for allowed in masks],
                "terminated": [False] * before + [True],
                "truncated": [False] * len(steps),
            }
        )
    return rows


def _fill_masks(masks: list[list[object] | None]) -> list[list[bool]] | None:
    """Return one mask per step, where a step without one allows everything; None if no step has one."""
    choices = next((len(mask) for mask in masks if mask is not None), None)
    if choices is None:
        return None
    return [[True] * choices if mask is None else [bool(allowed) for allowed in mask] for mask in masks]


def _flatten(value: Any) -> list[float]:
    """Return the numbers of a (nested) list, row by row."""
    if isinstance(value, list):
        return [number for part in value for number in (_flatten(part) if isinstance(part, list) else (float(part),))]
    return [float(value)]


def _in_rising_order(rows: Iterator[tuple[str, T]]) -> Callable[[str], T | None]:
    """Return a lookup in rows that are sorted by key. The caller must ask for keys in rising order."""
    head = next(rows, None)

    def find_value(key: str) -> T | None:
        nonlocal head
        while head is not None and head[0] < key:
            head = next(rows, None)
        return head[1] if head is not None and head[0] == key else None

    return find_value


def _encode_line(row: object) -> bytes:
    # A copy of the right size, because an object made by orjson keeps some kilobytes alive.
    return bytes(memoryview(orjson.dumps(row)))


def _parse_outcome(line: bytes) -> tuple[str, float, tuple[str, Outcome]]:
    outcome = Outcome(**orjson.loads(line))
    return outcome.unit, outcome.at, (outcome.unit, outcome)


def _parse_cost(line: bytes) -> tuple[str, float, tuple[str, float]]:
    unit, value = orjson.loads(line)
    return unit, 0.0, (unit, value)
