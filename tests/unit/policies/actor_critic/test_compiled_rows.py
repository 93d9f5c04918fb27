"""Rows of categories as the codes that compiled networks read."""

import numpy as np
import pytest

from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.compiled.rows import Categories

SIZES = [5, 3, 600, 2]


@pytest.fixture
def categories() -> Categories:
    return Categories.from_offsets(np.array([0, 5, 8, 608]), 610)


@pytest.mark.parametrize(
    ("entry", "value", "dtype"), [(0, 5, np.uint8), (0, -1, np.int64), (2, 600, np.int32), (3, 2**40, np.int64)]
)
def test_an_entry_that_is_no_category_is_named(categories, entry, value, dtype):
    rows = np.zeros((3, 4), dtype)
    rows[1, entry] = value
    with pytest.raises(MarlRayError, match=rf"entry {entry} is category {value}, expected 0 to {SIZES[entry] - 1}$"):
        categories.inputs(rows)


def test_codes_stand_for_the_rows_of_their_entries(categories):
    rng = np.random.default_rng(0)
    rows = np.stack([rng.choice([0, size - 1], 40) for size in SIZES], 1)  # the limits, with duplicates
    inputs, offsets = categories.inputs(rows), np.array([0, 5, 8, 608])
    for row, number in zip(rows, inputs.numbers, strict=True):
        bounds = [(inputs.bounds[code], inputs.bounds[code + 1]) for code in inputs.codes[number]]
        assert sorted(part for low, high in bounds for part in inputs.parts[low:high]) == (row + offsets).tolist()
