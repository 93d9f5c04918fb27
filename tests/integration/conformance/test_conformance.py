"""Every algorithm on the tiny games, and the games and the check themselves."""

import itertools
import re

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from typer.testing import CliRunner

from marl_ray.cli import app
from marl_ray.config import SPECS
from marl_ray.conformance.algorithm import constraints, learning, truth
from marl_ray.conformance.algorithm.check import check_algorithm
from marl_ray.conformance.algorithm.comparing import first_update
from marl_ray.conformance.algorithm.game_run import GridPoint
from marl_ray.conformance.algorithm.games import SIGNAL_COUNT, STATE_COUNT, GameRules, TinyGame
from marl_ray.conformance.algorithm.learner_access import nudge_policy
from marl_ray.training.single_process import process_group

UNEVEN = [[[0.3, 0.7], [0.6, 0.4], [0.2, 0.8], [0.5, 0.5], [0.5, 0.5]], [[0.1, 0.9], *[[0.5, 0.5]] * 4]]


ALIKE = (
    *("mappo", "ippo", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo", "rloo", "gspo", "cispo", "dapo"),
    *("ppo_lagrangian", "pid_lagrangian", "cpo", "map3o"),
)
"""Algorithms whose parts others have too, as `mappo_lagrangian` has multipliers; the command checks `reinforce_pp`."""


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=[pytest.mark.long] * (name in ALIKE)) for name, spec in SPECS.items() if not spec.pairs],
)
def test_every_algorithm_does_what_its_formulas_say(algorithm):
    assert [each for each in check_algorithm(algorithm) if each.failure] == []


@pytest.mark.parametrize(
    ("name", "check", "case", "failure"),
    [
        ("HOPEFUL", learning.no_drift, GridPoint(below=True), r"a log-probability moved by 0\.\d+ in iteration 1, .*"),
        ("HOPEFUL", learning.no_drift_of_texts, GridPoint(), r"a log-probability moved by 0\.\d+ in iteration 1, .*"),
        ("BY_LENGTH", learning.uneven_lengths, GridPoint(), r"with fixed-length and one ratio a token .* 0\.99\d+ .*"),
        ("CLIPPED_AROUND_ZERO", learning.value_clip, GridPoint(), r"in iteration 1 the clip takes away \d+% of .*"),
        ("BACKWARDS", learning.reward_gradient, GridPoint(2, 3), r"the gradient of J has cosine -1\.0000 with .*"),
        ("BACKWARDS", constraints.cost_gradient, GridPoint(1, 3), r"the gradient of J_c has cosine -1\.0000 with .*"),
        (
            "SHORT_SIGHTED",
            learning.reward_gradient,
            GridPoint(2, 1, below=True),
            r"the gradient of J .* 0\.99\d+ with .*",
        ),
    ],
)
def test_a_mistake_is_found(name, check, case, failure):
    with process_group():
        assert re.fullmatch(failure, check(f"toys.broken_algorithms:{name}", case))


def test_the_command_prints_a_line_for_every_property_and_fails_where_one_differs():
    good = CliRunner().invoke(app, ["check", "plugin", "algorithm", "reinforce_pp"])
    assert good.exit_code == 0
    assert all(line.startswith("ok  ") for line in good.output.splitlines())
    bad = CliRunner().invoke(app, ["check", "plugin", "algorithm", "toys.broken_algorithms:RAISES"])
    assert bad.exit_code == 1
    assert "failed  reward gradient: TypeError: unsupported operand\n" in bad.output
    assert "ok      refusals: " in bad.output


def test_the_smallest_game_has_the_truth_that_is_computed_by_hand():
    """Probabilities 1/2: the first move earns 0.125 and costs 0.75, the second 0.1875 and 1; the other signal likewise."""
    uniform = [[[0.5, 0.5]] * STATE_COUNT]
    j, first, second = truth.expected_returns(GameRules(), uniform, truth.zero_sums())
    assert (j, first, second) == pytest.approx((0.3125, 1.75, 2.15))
    assert truth.decisions(GameRules(), uniform, 0) == 2
    assert truth.values(GameRules(), uniform, truth.zero_sums())[0] == pytest.approx([j, first, second])


@pytest.mark.parametrize(("is_terminated", "max_steps"), list(itertools.product((True, False), (1, 2))))
def test_gradients_are_those_of_the_expectations(is_terminated, max_steps):
    """dJ / d logit_1 = p_0 p_1 (dJ / dp_1 - dJ / dp_0), by differences of the probabilities."""
    rules = GameRules(policies=2, is_terminated=is_terminated)
    after = {state: (0.1 * state, 1.0, 0.5 * state) for state in range(STATE_COUNT)}
    for kind in range(1 + SIGNAL_COUNT):
        exact = truth.gradient(rules, UNEVEN, kind, after, max_steps)
        for agent, state in ((0, 0), (0, 1), (0, 2), (1, 0)):
            sides = []
            for step in (1e-5, -1e-5):
                tables = [[list(row) for row in agent_rows] for agent_rows in UNEVEN]
                p_zero, p_one = tables[agent][state]
                tables[agent][state] = [p_zero - step * p_zero * p_one, p_one + step * p_zero * p_one]
                sides.append(truth.expected_returns(rules, tables, after, max_steps)[kind])
            assert exact[agent][state][1] == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=1e-8)


@pytest.mark.parametrize(
    ("policies", "agents", "is_terminated", "early"),
    list(itertools.product((1, 2), (1, 3), (True, False), (True, False))),
)
def test_the_environment_plays_the_rules(policies, agents, is_terminated, early):
    env = TinyGame(policies=policies, agents=agents, is_terminated=is_terminated, early=early)
    for path in itertools.islice(env.rules.paths(), 0, None, 7):
        env.reset(seed=0)
        for step in path:
            assert env.agents == env.possible_agents
            actions = dict(zip(env.possible_agents, step.actions, strict=True))
            _, rewards, terminated, truncated, infos = env.step(actions)
            assert set(rewards.values()) == {step.moved.reward}
            costs = [sum(info["cost"][k] for info in infos.values()) for k in range(SIGNAL_COUNT)]
            assert costs == pytest.approx(step.moved.costs)
        assert not env.agents
        ended = truth.has_ended(env.rules, path)
        assert set(terminated.values()) == {ended} and set(truncated.values()) == {not ended}


def test_an_error_of_a_users_part_leaves_the_weights_of_a_cached_run_as_they_were():
    with process_group():
        game_run, _ = first_update("mappo", GridPoint())
        actor = game_run.learners[0].policy.rollout_model.actor
        before = parameters_to_vector(actor.parameters()).clone()
        with pytest.raises(ZeroDivisionError), nudge_policy(game_run, 0, torch.ones_like(before), 0.5):
            raise ZeroDivisionError
        assert torch.equal(parameters_to_vector(actor.parameters()), before)
