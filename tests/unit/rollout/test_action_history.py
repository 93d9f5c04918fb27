"""The actions of running episodes as text: they come back as they were, and take little room."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from marl_ray.rollout.actor_critic.action_history import pack_actions, unpack_actions

TYPES = st.sampled_from([np.int64, np.int32, np.uint8, np.float32, np.bool_])


@given(st.data())
def test_actions_come_back_as_they_were(data):
    dtype = np.dtype(data.draw(TYPES))
    actions = data.draw(arrays(dtype, array_shapes(min_dims=2, max_dims=3, max_side=5)))
    back = unpack_actions(pack_actions(list(actions)), actions.shape[1:], dtype)
    assert back.dtype == dtype and back.shape == actions.shape
    assert back.tobytes() == actions.tobytes()


def test_an_episode_without_steps_has_none():
    assert unpack_actions(pack_actions([]), (2, 3), np.dtype(np.float32)).shape == (0, 2, 3)


@pytest.mark.parametrize("low", [0, -2])
def test_a_long_episode_takes_half_a_byte_per_action(low):
    actions = np.random.default_rng(0).integers(low, low + 5, (100_000, 2))
    assert len(pack_actions(list(actions))[1]) < 0.6 * actions.size
