"""Exported decisions become the trajectories that a collector would have gathered, or one line says why not."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from toy_serving.logged_acts import SCHEMA, sequence, write

from marl_ray.errors import MarlRayError
from marl_ray.rollout.served.acts import LoggedUnits, read_logged

CATEGORIES = spaces.MultiDiscrete([4, 3])
AGENTS = {"a": "p", "b": "p", "c": "q"}
SPACES = {
    "p": (CATEGORIES, spaces.Discrete(3, start=5)),
    "q": (spaces.Box(-1, 1, (2, 2), np.float32), spaces.Box(-1, 1, (2,), np.float32)),
}


def p_row(unit: int, agent: str = "a", steps: int = 2, outcome: float = 1.0, **other: Any) -> dict[str, Any]:
    seen, done = [(t % 4, unit % 3) for t in range(steps)], [5 + t % 3 for t in range(steps)]
    return sequence(unit, agent, outcome, seen, done, [-0.1 * t for t in range(steps)]) | other


def q_row(unit: int, steps: int = 2, outcome: float = 1.0, **other: Any) -> dict[str, Any]:
    seen = [(t, 0.5, -1.0, unit) for t in range(steps)]
    return sequence(unit, "c", outcome, seen, [(0.25, -0.5)] * steps, [0.7] * steps) | other


def read(path: str) -> LoggedUnits:
    return read_logged(path, AGENTS, SPACES)


def test_rows_become_padded_trajectories_of_each_policy(tmp_path):
    rows = [q_row(1, 3, 2.0), p_row(1, "b", 1, 2.0), p_row(1, "a", 3, 2.0), p_row(0, "b", 2, -1.0, greedy=True)]
    logged = read(write(tmp_path / "x.parquet", rows))
    assert logged.units == ("e/u000000", "e/u000001") and logged.outcomes.tolist() == [-1.0, 2.0]
    p, q = logged.policies["p"], logged.policies["q"]
    assert p.episode.tolist() == [0, 1, 1] and p.agent.tolist() == [1, 0, 1]
    assert p.greedy.tolist() == [True, False, False] and logged.lengths["p"].tolist() == [2, 3, 1]
    assert p.mask.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert p.actions.tolist() == [[0, 1, 0], [0, 1, 2], [0, 0, 0]], "choices count from zero"
    assert p.observations.dtype == torch.int8 and p.observations[1].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert p.rewards.tolist() == [[0, -1, 0], [0, 0, 2], [2, 0, 0]]
    assert p.terminated.tolist() == [[False, True, False], [False, False, True], [True, False, False]]
    assert p.action_masks is None and p.states is None and p.costs.shape == (3, 3, 0)
    assert q.observations.shape == (1, 3, 4) and q.actions.shape == (1, 3, 2)
    assert q.log_probs[0].tolist() == pytest.approx([0.7] * 3), "a density may be above 1"


def test_what_was_allowed_is_kept_and_rows_without_masks_allow_everything(tmp_path):
    masked = p_row(0, action_masks=[[True, False, True], [False, True, False]], mask=[True, False])
    logged = read(write(tmp_path / "x.parquet", [masked, p_row(1, steps=1)]))
    batch = logged.policies["p"]
    assert batch.action_masks is not None
    assert batch.action_masks.tolist() == [
        [[True, False, True], [False, True, False]],
        [[True, True, True], [True, True, True]],
    ]
    assert batch.mask.tolist() == [[True, False], [True, False]], "a forced move is no decision"


def test_costs_are_read_and_those_that_were_not_measured_are_not_zero(tmp_path):
    write(tmp_path / "x.parquet", [p_row(0, costs=[[1.0, 0.0], [0.5, 2.0]]), p_row(1, steps=1)])
    write(tmp_path / "y.parquet", [p_row(2, steps=1)])
    costs = read(str(tmp_path)).policies["p"].costs
    assert costs[0].tolist() == [[1, 0], [0.5, 2]]
    assert costs[1:, 0].isnan().all() and costs[1:, 1].tolist() == [[0, 0], [0, 0]]


def test_row_groups_are_read_as_one_file(tmp_path):
    rows = [p_row(n, steps=1 + n % 3) for n in range(10)]
    table = read(write(tmp_path / "x.parquet", rows))
    parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "x.parquet", row_group_size=3)
    parts = read(str(tmp_path / "x.parquet"))
    assert torch.equal(parts.policies["p"].observations, table.policies["p"].observations)
    rows[7]["actions"] = [[9], [9]]
    parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "x.parquet", row_group_size=3)
    with pytest.raises(
        MarlRayError, match=r"/x\.parquet: row 7, column actions: expected actions of Discrete\(3, start=5\)$"
    ):
        read(str(tmp_path))


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=8), st.randoms())
def test_neither_order_nor_files_change_what_is_read(tmp_path_factory, units, random):
    folder = tmp_path_factory.mktemp("log")
    rows = [row for n, (steps, _) in enumerate(units) for row in (p_row(n, steps=steps), q_row(n, steps))]
    single = read(write(folder / "whole.parquet", rows))
    parts = [place for _, place in units for _ in range(2)]
    mixed = list(zip(parts, rows, strict=True))
    random.shuffle(mixed)
    for part in set(parts):
        write(folder / "parts" / f"day={part}" / "x.parquet", [row for place, row in mixed if place == part])
    write(folder / "parts" / "_unfinished.parquet", rows)
    again = read(f"file://{folder}/parts")
    assert again.units == single.units and np.array_equal(again.outcomes, single.outcomes)
    for name, batch in single.policies.items():
        for key, value in vars(batch).items():
            assert value is None or torch.equal(value, getattr(again.policies[name], key)), key


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (p_row(1, agent="z"), "row 1, column agent: expected one of a, b, c"),
        (p_row(1, observations=[[0, 1], [4, 0]]), "row 1, column observations: expected categories of"),
        (p_row(1, observations=[[0, 1], [0.5, 0]]), "row 1, column observations: expected categories of"),
        (p_row(1, observations=[[0, 1], [1]]), "row 1, column observations: expected 2 numbers per step"),
        (p_row(1, observations=None), "row 1, column observations: expected a value, not null"),
        (p_row(1, observations=[[0, 1], None]), "row 1, column observations: expected no nulls"),
        (p_row(1, observations=[[0, 1], [None, 1]]), "row 1, column observations: expected no nulls"),
        (p_row(1, observations=[]), "row 1, column observations: expected at least one step"),
        (q_row(1, observations=[[float("nan")] * 4] * 2), "row 1, column observations: expected finite numbers"),
        (p_row(1, actions=[[4], [5]]), "row 1, column actions: expected actions of Discrete"),
        (p_row(1, actions=[[5], [8]]), "row 1, column actions: expected actions of Discrete"),
        (p_row(1, actions=[[5]]), "row 1, column actions: expected as many entries as observations"),
        (p_row(1, log_probs=[0.0, 0.5]), "row 1, column log_probs: expected logarithms of probabilities"),
        (p_row(1, log_probs=[0.0, float("-inf")]), "row 1, column log_probs: expected finite numbers"),
        (p_row(1, rewards=[0.0, float("nan")]), "row 1, column rewards: expected finite numbers"),
        (p_row(1, outcome=float("nan")), "row 1, column outcome: expected a finite number"),
        (p_row(1) | {"outcome": None}, "row 1, column outcome: expected a value, not null"),
        (p_row(1, mask=[True]), "row 1, column mask: expected as many entries as observations"),
        (p_row(1, action_masks=[[True] * 3, [True, False, True]]), "row 1, column action_masks: expected the taken"),
        (p_row(1, action_masks=[[True] * 2] * 2), "row 1, column action_masks: expected 3 numbers per step"),
        (q_row(1, action_masks=[[True]] * 2), "row 1, column action_masks: expected null"),
        (p_row(0, "b", outcome=7.0), "column outcome: expected the same outcome in all rows of a unit"),
        (p_row(0), "row 1, column turn: expected one row per unit, agent and turn"),
        (p_row(1, costs=[[1.0], [1.0, 2.0]]), "row 1, column costs: expected 2 numbers per step, or none"),
        (p_row(1, costs=[[1.0], [float("nan")]]), "row 1, column costs: expected finite numbers"),
    ],
)
def test_what_does_not_fit_is_named_by_file_row_and_column(tmp_path, row, message):
    path = write(tmp_path / "x.parquet", [p_row(0), row])
    with pytest.raises(MarlRayError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: row ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_export_are_refused(tmp_path):
    with pytest.raises(MarlRayError, match="expected a Parquet file or a folder"):
        read(str(tmp_path))
    (tmp_path / "x.parquet").write_text("hello, this is no Parquet")
    with pytest.raises(MarlRayError, match="cannot be read"):
        read(str(tmp_path))
    with pytest.raises(MarlRayError, match="cannot be read"):
        read("nothing://x")
    short = SCHEMA.remove(SCHEMA.get_field_index("mask"))
    with pytest.raises(MarlRayError, match=r"/x\.parquet: expected a column 'mask'$"):
        read(write(tmp_path / "x.parquet", [p_row(0)], short))
    other = SCHEMA.set(SCHEMA.get_field_index("turn"), pa.field("turn", pa.string()))
    with pytest.raises(MarlRayError, match=r"/x\.parquet: column turn: expected int64, got string$"):
        read(write(tmp_path / "x.parquet", [p_row(0, turn="first")], other))
    with pytest.raises(MarlRayError, match=r"/x\.parquet: expected at least one logged decision sequence$"):
        read(write(tmp_path / "x.parquet", []))
