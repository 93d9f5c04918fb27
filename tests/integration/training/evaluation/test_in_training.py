"""Scores of whole episodes from fixed starts: what is reported of a bundle is what it is worth."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import t
from toy_runs.runs import config, short, team_of

from marl_ray.algorithms.constraints.budgets import (
    budget_score,
    certified_rate,
    mean_costs,
    violation,
    within_budget_metrics,
)
from marl_ray.config import RunConfig, parse_config
from marl_ray.envs.copies import make_batch
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError
from marl_ray.rollout.actor_critic.fixed_episodes import EvaluationCopies, FixedStart
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.evaluation.copies_player import CopiesPlayer
from marl_ray.training.evaluation.fixed_starts import Evaluator, StartSet
from marl_ray.training.evaluation.play_bundle import play_bundle
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.run_evaluation import UNKNOWN_SCORE, is_better
from marl_ray.training.loop.start import RunStart
from marl_ray.training.single_process import train_alone
from marl_ray.training.tracking.progress_bar import iteration_line
from marl_ray.training.tracking.summary import run_summary

pytestmark = pytest.mark.usefixtures("alone")

CHANCE = 0.25
"""The return of an untrained team in the sprint."""


def sprint(*overrides: str) -> RunConfig:
    base = {
        "name": "sprint",
        "env": {"id": "toys.envs:sprint"},
        "train": {"total_steps": 1024, "env_copies": 32, "horizon": 4},
        "hyper": {"lr": 1e-4, "epochs": 1},
        "checkpoint": {"every": 2},
    }
    return parse_config(RunConfig, base, overrides)


def test_numbers_that_an_environment_reports_are_metrics_of_the_run_and_of_its_evaluations(tmp_path):
    run = config("env.id=toys.envs:Reporting", "evaluation.every=2")
    rows = train_alone(run, tmp_path)
    assert "env/right" not in rows[0] and rows[0]["eval/env/length"] == 6.0
    last = rows[-1]
    for prefix in ("", "eval/"):  # agent a decides in six steps, agent b in three
        assert last[f"{prefix}env/right"] == pytest.approx(last[f"{prefix}return"] * 2 / 9)
        assert last[f"{prefix}env/length"] == last[f"{prefix}episode_length"] == 6.0
    # Four steps of an episode have been played before this checkpoint.
    resumed = train_alone(run, resume=tmp_path / "2")
    assert [row["env/right"] for row in resumed] == [row["env/right"] for row in rows[3:]]


def test_what_is_reported_of_the_best_bundle_is_what_it_is_worth(tmp_path):
    """The quick successes of a team that does not learn once made its second checkpoint the best, at four times that."""
    run = sprint("evaluation.episodes=200")
    rows = train_alone(run, tmp_path)
    best = max(tmp_path.glob("*/bundle"), key=lambda path: int(path.parent.name))
    reported = json.loads((best / "bundle.json").read_text())["lineage"]["metrics"]
    true = [episode.episode_return for episode in play_bundle(run, best, 2000, 77, 100)]
    error = 4 * math.sqrt(CHANCE * (1 - CHANCE) * (1 / 200 + 1 / 2000))
    assert np.mean(true) == pytest.approx(CHANCE, abs=error)
    assert reported["best/return"] == pytest.approx(np.mean(true), abs=error)
    # The baseline before training is the first point of the curve.
    assert rows[0]["steps"] == 0 and rows[0]["eval/return"] == pytest.approx(CHANCE, abs=error)
    assert {"eval/greedy_return", "eval/episode_length", "best/return"} <= set(rows[0])
    low, value, high = (rows[0][f"eval/return{part}"] for part in ("_low", "", "_high"))
    half = t.ppf(0.975, 199) * math.sqrt(value * (1 - value) / 199)  # of 200 returns that are 0 or 1
    assert (value - low, high - value) == pytest.approx((half, half))


def test_the_training_curve_begins_when_slow_failures_have_ended_too():
    rows = train_alone(sprint("evaluation.every=0", "train.total_steps=6400"))
    reported = {row["steps"] // 32: row["return"] for row in rows if "return" in row}
    assert min(reported) == 32  # the first failures end after 30 steps; a batch has 4
    # Of some hundreds of episodes, weighed by their starts.
    assert reported[200] == pytest.approx(CHANCE, abs=0.09)
    # Successes began 30 times as often in the same time, so by their ends the mean was far above.
    assert rows[-1]["episode_length"] == pytest.approx(1 * CHANCE + 30 * (1 - CHANCE), abs=3)


def test_the_weights_that_were_scored_are_those_that_are_kept(tmp_path):
    run = config("evaluation.every=3", "evaluation.episodes=8", "checkpoint.every=4", "hyper.lr=0.03")
    rows = train_alone(run, tmp_path)
    scored = {row["iteration"]: row["eval/return"] for row in rows if "eval/return" in row}
    assert list(scored) == [0, 3, 6]
    bundles = sorted(int(path.parent.name) for path in tmp_path.glob("*/bundle"))
    best = [k for k in scored if all(scored[k] > v for j, v in scored.items() if j < k)]
    assert bundles == best
    for number in bundles:
        again = play_bundle(run, tmp_path / str(number) / "bundle", 8, run.seed, 100)
        assert np.mean([episode.episode_return for episode in again]) == pytest.approx(scored[number])


def test_of_equal_scores_the_earliest_weights_are_the_best(tmp_path):
    """A policy that had collapsed once took the place of one that scored as much before."""
    rows = train_alone(config("evaluation.every=1", "hyper.lr=1e-30"), tmp_path)
    assert len({row["eval/return"] for row in rows}) == 1
    assert [path.parent.name for path in tmp_path.glob("*/bundle")] == ["0"]
    assert [row["steps"] for row in rows if "best/return" in row] == [0]


def test_where_nothing_is_scored_the_newest_weights_are_the_best():
    assert is_better(UNKNOWN_SCORE, float("-inf")) and is_better(UNKNOWN_SCORE, UNKNOWN_SCORE)
    assert is_better(-1.0, UNKNOWN_SCORE) and not is_better(UNKNOWN_SCORE, -1.0) and not is_better(1.0, 1.0)


def test_an_evaluation_changes_nothing_of_training_and_is_the_same_after_a_resume(tmp_path):
    def plain(rows: list[dict[str, float]]) -> list[dict[str, float]]:
        left_out = ("time/", "steps_per", "eval/", "best/")
        return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows if row["iteration"]]

    often = train_alone(config("evaluation.every=1"), tmp_path)
    assert plain(often) == plain(train_alone(config("evaluation.every=0")))
    resumed = train_alone(config("evaluation.every=1"), None, tmp_path / "2")
    timeless = [{k: v for k, v in row.items() if not k.startswith(("time/", "steps_per"))} for row in often + resumed]
    assert timeless[3 : len(often)] == timeless[len(often) :]


def evaluation_copies(copies: int, cap: int = 100, **kwargs) -> tuple:
    run = config(f"env={json.dumps({'id': 'toys.envs:countdown', 'kwargs': kwargs})}")
    env = make_env(run.env)
    team = team_of(run)
    envs = make_batch(run.env, copies, list(team.agents.values()))
    return EvaluationCopies(env, envs, team.agents, copies, 3, 1, cap), team.players()


def test_an_episode_depends_on_its_number_and_on_nothing_beside_it():
    torch.manual_seed(0)
    many, players = evaluation_copies(7)
    starts = [
        FixedStart(number, start_set, greedy) for start_set in (0, 1) for greedy in (False, True) for number in range(5)
    ]
    played = many.play(players, starts)
    few, _ = evaluation_copies(2)
    assert few.play(players, starts[::-1])[::-1] == played
    assert played[:5] != played[10:15]  # the sets share no start
    assert [episode.length for episode in played] == [6] * 20 and not any(episode.truncated for episode in played)


def test_an_episode_that_never_ends_is_truncated_and_said_to_be():
    game, players = evaluation_copies(2, cap=4, length=100)
    assert [(e.length, e.truncated) for e in game.play(players, [FixedStart(k, 0, False) for k in range(3)])] == [
        (4, True)
    ] * 3


@pytest.mark.long
def test_without_a_schedule_evaluations_are_few_where_episodes_are_long():
    long = ("train.total_steps=10240", "train.horizon=64", "hyper.lr=1e-5", "hyper.epochs=1", "hyper.minibatches=1")
    rows = train_alone(config(*long, "evaluation.episodes=4"))
    at = [row["steps"] for row in rows if "eval/return" in row]
    assert len(at) in (11, 12) and at[0] == 0 and at[-1] == rows[-1]["steps"]
    spent = 4 * 6 * 3  # steps of an evaluation and of its confirmation
    assert spent * 10 < 1024
    rows = train_alone(config(*long, "evaluation.episodes=32"))
    at = [row["steps"] for row in rows if "eval/return" in row]
    # Before, in the middle, and at the end; and once more if the middle needed no confirmation.
    assert at[:2] == [0, 5120] and at[-1] == rows[-1]["steps"] and len(at) in (3, 4)


def test_numbers_that_are_not_finite_stop_an_evaluation():
    from marl_ray.training.errors import DivergedError

    poison = "env={id: 'toys.envs:poisoned', kwargs: {after: 0}}"
    place = r"the reward of a is nan at step 1 of the episode of reset\(seed=\d+\)$"
    with pytest.raises(DivergedError, match=f"evaluation at step 0: returns or costs are not finite: {place}"):
        train_alone(config(poison))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluation.tasks=9", "evaluation.tasks: expected a text environment"),
        ("evaluation.samples=2", "evaluation.samples: expected a text environment"),
    ],
)
def test_keys_that_are_not_read_are_refused(override, message):
    with pytest.raises(MarlRayError, match=message):
        config(override)


def test_shares_within_the_budgets_and_what_is_certain_of_them():
    values = within_budget_metrics((30.0,), [(30.0,), (31.0,), (31.5,), (33.0,)])
    assert values["within_budget"] == 0.25 and values["within_budget_105"] == 0.75
    # P(k or more of n at rate p) = 5 % at the bound (Clopper-Pearson).
    for key, count in (("within_budget", 1), ("within_budget_105", 3)):
        p = values[f"{key}_certified"]
        assert sum(math.comb(4, j) * p**j * (1 - p) ** (4 - j) for j in range(count, 5)) == pytest.approx(0.05)
    assert certified_rate(0, 10) == 0 and certified_rate(299, 299) > 0.99 > certified_rate(298, 298)
    assert within_budget_metrics((1.0, 2.0), [(1.0, 2.0), (0.0, 2.5)])["within_budget"] == 0.5


def test_whatever_is_within_its_budgets_scores_more_and_else_the_nearest():
    within, near, far = (
        budget_score((30.0,), 1.0, [30.0]),
        budget_score((30.0,), 9.0, [30.5]),
        budget_score((30.0,), 99.0, [40.0]),
    )
    assert within > near > far and budget_score((30.0,), 2.0, [12.0]) > within


def test_a_cost_that_is_the_budget_but_for_rounding_is_within_it():
    costs = [[float(np.float32(0.05))]] * 4  # 0.05000000075
    assert within_budget_metrics((0.05,), costs)["within_budget"] == 1 and violation((0.05,), mean_costs(costs)) == 0
    assert budget_score((0.05,), 1.0, mean_costs(costs)) == 1.0 and violation((30.0,), [30.0001]) > 0


def test_a_constrained_run_says_its_costs_against_the_budget_of_the_best_and_of_the_last():
    run = short("ppo_lagrangian", "evaluation={every: 1}", "constraints=[{budget: 4.4}]")
    rows = train_alone(run)
    assert {"eval/episode_cost_0", "eval/within_budget", "eval/within_budget_105_certified"} <= set(rows[0])
    # Every episode of the toy costs 4.5: none is within 4.4, all are within 1.05 times that.
    assert rows[-1]["eval/within_budget"] == 0 and rows[-1]["eval/within_budget_105"] == 1
    assert rows[-1]["eval/within_budget_105_certified"] == pytest.approx(0.05 ** (1 / 128))
    text = "\n".join(run_summary(run, rows[0], rows[-1]))
    assert text.count("cost 4.50 of 4.4") == 2 and "best" in text and "last" in text
    assert "100.0% of episodes within 1.05 times the budget (at least 97.7% with 95 % confidence)" in text
    assert "no evaluated policy was within the budgets; the best is the one nearest to them" in text
    assert "cost 4.50 of 4.4" in iteration_line(run, rows[-1], rows[-1]) and "cost 4.50 of 4.4" in iteration_line(
        run, rows[0], rows[0]
    )
    within = short("ppo_lagrangian", "constraints=[{budget: 5}]")
    assert not any("no evaluated policy" in line for line in run_summary(within, rows[0], rows[-1]))


def test_confirmation_plays_other_starts_than_the_choice():
    run = config("evaluation.episodes=16")
    env = make_env(run.env)
    team = team_of(run)
    judge = Evaluator(run, CopiesPlayer(run, env, team.agents))
    chosen, confirmed = (judge.evaluate(team.players(), start_set, 0) for start_set in StartSet)
    assert chosen == judge.evaluate(team.players(), StartSet.SELECTION, 0)
    assert chosen.metrics["return"] != confirmed.metrics["return"] and "greedy_return" not in confirmed.metrics
    judge.close()


def test_every_policy_of_several_has_its_own_return(tmp_path):
    """That of opponents says nothing where their rewards cancel."""
    team = "team={wolves: {agents: [wolf]}, flock: {agents: [sheep_*]}}"
    rows = train_alone(config("env.id=toys.envs:chase", team, "train.total_steps=32"))
    for prefix in ("eval/return", "best/return"):
        assert (rows[0][prefix], rows[0][f"{prefix}/wolves"], rows[0][f"{prefix}/flock"]) == (0, 12, -6)
    assert not any("/return/" in key for key in train_alone(config("train.total_steps=32"))[0])  # one plays all agents


def test_group_algorithms_report_how_their_groups_differ():
    rows = train_alone(short("grpo", "train.total_steps=32"))
    assert 0 < rows[-1]["informative_groups"] <= 1 and rows[-1]["group_std"] > 0
    assert "group_std" not in train_alone(short("ippo", "train.total_steps=32"))[-1]


def test_multipliers_go_by_the_costs_of_released_episodes_also_after_a_resume(tmp_path):
    """Quick successes cost 1 and slow failures 30; the first to end are all quick."""
    run = build_run(
        sprint("algorithm=ppo_lagrangian", "constraints=[{budget: 5}]", "evaluation.every=0"), torch.device("cpu")
    )
    rows = [run.step() for _ in range(7)]
    assert run.state.costs["shared"].means is None and not any("return" in row for row in rows)
    held = len(run.recent.held_back)
    assert held > 0
    run.save(local_stored_folder(tmp_path))
    run.saver.wait()
    again = build_run(run.config, torch.device("cpu"), RunStart([local_stored_folder(tmp_path)]))
    for result in (run, again):
        result.step()
        assert result.state.costs["shared"].means is not None and result.state.costs["shared"].means[0] > 15
        assert len(result.recent.episodes) > 0
        result.close()
    assert run.state.costs == again.state.costs and run.recent.state() == again.recent.state()
    # The first 32 episodes, one of each copy, are all that is whole.
    first = [episode for episode in run.recent.episodes if episode.start == 0]
    assert len(first) == 32 and {episode.decisions["shared"] for episode in first} == {1, 30}
