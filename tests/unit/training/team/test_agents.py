"""The policies that play the agents of a team."""

import re
from typing import Any

import pytest
from gymnasium import spaces
from toy_runs.runs import config
from toys.envs import Countdown

from marl_ray.errors import MarlRayError
from marl_ray.training.team.assembly import team_agents


class TwoSizes(Countdown):
    """Two agents that see different things."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(4 if agent == "guide" else 9)


def test_agents_of_different_spaces_are_refused_with_the_team_that_plays_them():
    env = TwoSizes(agents=("guide", "courier"))
    with pytest.raises(
        MarlRayError, match="agents 'guide' and 'courier' have different observation_spaces "
    ) as refusal:
        team_agents(config(), env)
    expected = "expected policies of their own, such as team: {guide: {agents: [guide]}, courier: {agents: [courier]}}"
    assert str(refusal.value).endswith(expected)
    written = re.sub(".*(?=team: )", "", str(refusal.value))
    assert team_agents(config(written.replace("team: ", "team=")), env) == {
        "guide": ["guide"],
        "courier": ["courier"],
    }
