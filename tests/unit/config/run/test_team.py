"""The team of a run: which policy plays which agent, what it learns with, and which are frozen."""

import re

import pytest
from toy_runs.run_configs import refusal, run


def test_policy_hyper_lies_over_the_runs():
    config = run(hyper={"lr": 1e-3, "gamma": 0.9}, team={"a": {"hyper": {"lr": 5e-4}}})
    assert (config.hyper_of("a").lr, config.hyper_of("a").gamma) == (5e-4, 0.9)


def test_a_frozen_policy_needs_a_bundle_beside_one_that_learns():
    assert "team.a: frozen: true needs `bundle`" in refusal(team={"a": {"frozen": True}})
    frozen = {"frozen": True, "bundle": "/b"}
    assert "every policy is frozen" in refusal(team={"a": frozen, "b": frozen})
    assert run(team={"a": frozen, "b": {}}).team["a"].frozen


def test_every_agent_has_one_policy_by_its_pattern():
    config = run(team={"chiefs": {"agents": ["agent_0"]}, "others": {"agents": ["agent_*"]}})
    assert config.policy_of(["agent_0", "agent_1"]) == {"agent_0": "chiefs", "agent_1": "others"}
    with pytest.raises(ValueError, match=r"^team: no policy plays agent 'x' \(agents: agent_0, x\)$"):
        config.policy_of(["agent_0", "x"])
    with pytest.raises(ValueError, match=r"^team\.others: plays no agent \(agents: agent_0\)$"):
        config.policy_of(["agent_0"])


def test_an_agent_that_is_misspelt_in_the_team_is_named():
    config = run(team={"all": {"agents": ["painter", "callr"]}})
    message = "'caller' (agents: caller, painter); 'callr' of team.all.agents matches no agent; did you mean caller?"
    with pytest.raises(ValueError, match=re.escape(message)):
        config.policy_of(["caller", "painter"])
    config = run(team={"painter": {"agents": ["paintr"]}, "others": {}})
    with pytest.raises(
        ValueError, match=r"team.painter: plays no agent .*; 'paintr' of team.painter.agents matches no"
    ):
        config.policy_of(["painter"])
