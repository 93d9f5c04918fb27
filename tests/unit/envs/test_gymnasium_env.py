"""Gymnasium environments as teams of one."""

import gymnasium
import numpy as np
import pytest

from marl_ray.envs.gymnasium_env import single_agent
from marl_ray.errors import MarlRayError


@pytest.mark.parametrize("balanced", [True, False])
def test_cartpole_equals_gymnasium(balanced):
    """Step for step; a balancing controller is truncated at exactly 500 steps, a careless one terminates early."""
    env, peer = single_agent("CartPole-v1"), gymnasium.make("CartPole-v1")
    assert env.possible_agents == ["agent"] and env.observation_space("agent") == peer.observation_space
    observations, infos = env.reset(seed=3)
    row, info = peer.reset(seed=3)
    for t in range(1, 501):
        np.testing.assert_array_equal(observations["agent"], row)
        assert infos["agent"] == info and env.agents == ["agent"]
        action = int(row[2] + 0.5 * row[3] > 0) if balanced else t // 3 % 2
        observations, rewards, terminated, truncated, infos = env.step({"agent": action})
        row, reward, *ends, info = peer.step(action)
        assert [rewards["agent"], terminated["agent"], truncated["agent"]] == [reward, *ends]
        if any(ends):
            break
    np.testing.assert_array_equal(observations["agent"], row)
    assert env.agents == []
    assert (t, terminated["agent"], truncated["agent"]) == (500, False, True) if balanced else terminated["agent"]
    env.close()


def test_gymnasium_kwargs_and_infos():
    env = single_agent("CartPole-v1", max_episode_steps=7, render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().ndim == 3 and env.render_mode == "rgb_array" and env.metadata["name"] == "CartPole-v1"
    for t in range(7):
        truncated = env.step({"agent": t % 2})[3]
    assert truncated == {"agent": True}
    lake = single_agent("FrozenLake-v1")
    assert lake.reset(seed=0)[1]["agent"].keys() == gymnasium.make("FrozenLake-v1").reset(seed=0)[1].keys() != set()


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPol-v1", r"env.id: 'gymnasium.CartPol-v1' is unknown; did you mean gymnasium.CartPole-v1"),
        ("CartPole-v9", r"env.id: 'gymnasium.CartPole-v9' is unknown; did you mean gymnasium.CartPole-v1"),
        ("zzzz", r"env.id: 'gymnasium.zzzz' is unknown \("),
        ("no_such_module:Thing-v0", r"env.id: cannot make 'gymnasium.no_such_module:Thing-v0' \("),
    ],
)
def test_unknown_gymnasium_ids_are_refused_in_one_line(env_id, message):
    with pytest.raises(MarlRayError, match=message) as caught:
        single_agent(env_id)
    assert "\n" not in str(caught.value)
