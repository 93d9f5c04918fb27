"""Observations that are dicts of numbers, as rows."""

import numpy as np
import pytest
from gymnasium import spaces

from marl_ray.envs.flat_dicts import flat_rows, flat_space
from marl_ray.errors import MarlRayError

NESTED = spaces.Dict(
    {
        "place": spaces.Box(-2, 3, (2, 2), np.float64),
        "inner": spaces.Dict({"side": spaces.Discrete(4, start=1), "flags": spaces.MultiBinary(3)}),
        "cells": spaces.MultiDiscrete([2, 5]),
    }
)


def test_rows_have_all_numbers_in_the_order_of_the_space():
    space = flat_space(NESTED)
    assert isinstance(space, spaces.Box) and space.dtype == np.float32
    drawn = [NESTED.sample() for _ in range(5)]
    together = {
        "place": np.stack([each["place"] for each in drawn]),
        "inner": {key: np.stack([each["inner"][key] for each in drawn]) for key in ("side", "flags")},
        "cells": np.stack([each["cells"] for each in drawn]),
    }
    rows = flat_rows(together, NESTED)
    for row, each in zip(rows, drawn, strict=True):
        inner = each["inner"]
        expected = [each["cells"], inner["flags"], [inner["side"]], each["place"]]  # Gymnasium sorts the entries
        np.testing.assert_array_equal(row, np.concatenate([np.ravel(part) for part in expected]).astype(np.float32))
        assert space.contains(row)


def test_other_spaces_stay_as_they_are():
    box = spaces.Box(0, 1, (3,))
    assert flat_space(box) is box
    with pytest.raises(MarlRayError, match=r"observation space Text.* is not supported in a Dict: expected numbers"):
        flat_space(spaces.Dict({"word": spaces.Text(3)}))
