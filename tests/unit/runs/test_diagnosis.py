"""The diagnosis of a run that does not learn."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runs.runs import config

from marl_ray.runs.diagnosis import diagnose

CONFIG = config("hyper.lr=10", "hyper.entropy_coef=0.01", "hyper.epochs=4").resolve()
STEPS = 1024
METRICS = ["entropy", "kl", "grad_norm", "value_loss", "explained_variance", "return", "eval/return"]


def rows(evaluations: dict[int, float], **metrics: list[float]) -> list[dict[str, float]]:
    """A row per iteration, with an interval of 0.1 around each evaluation."""
    made: list[dict[str, float]] = [{"iteration": 0, "steps": 0}]
    count = max(map(len, metrics.values()), default=max(evaluations))
    made += [{"iteration": n + 1, "steps": STEPS * (n + 1)} for n in range(count)]
    for name, values in metrics.items():
        for row, value in zip(made[1:], values, strict=True):
            row[name.replace("__", "/")] = value
    for n, value in evaluations.items():
        made[n] |= {"eval/return": value, "eval/return_low": value - 0.1, "eval/return_high": value + 0.1}
    return made


def test_a_rate_that_is_too_high_is_named_with_what_it_did():
    bad = rows(
        {0: -0.5, 4: -0.5},
        entropy=[0.35, 0.001, 0.0, 0.0],
        kl=[10.85, 0.5, 0.0, 0.0],
        value_loss=[0.5, 2024.66, 408.4, 700.0],
        grad_norm=[0.27, 0.1, 0.0, 0.0],
    )
    assert diagnose(CONFIG, bad) == [
        "eval/return did not rise: -0.500 at step 0, -0.500 at step 4,096",
        "entropy fell to 0.00 by step 2,048: the policy no longer explores, hyper.lr=10 may be too high or "
        "hyper.entropy_coef=0.01 too low",
        "kl was 10.850 at step 1,024: an update changed too much, hyper.lr=10 may be too high",
        "value_loss was 2,024.660 at step 2,048: the critic diverged, hyper.lr=10 may be too high",
        "grad_norm is 0 since step 3,072: nothing is learned any more",
    ]


def test_a_policy_that_knows_more_than_it_draws_has_too_great_a_bonus():
    bad = rows({0: -0.5, 4: -0.5}, entropy=[1.386, 1.386, 1.385, 1.385], kl=[0.0004, 0.0, 0.0, 0.0])
    bad[-1]["eval/greedy_return"] = 0.58
    _, sentence = diagnose(config("hyper.entropy_coef=1").resolve(), bad)
    assert sentence.startswith("eval/greedy_return is 0.580, though eval/return is -0.500: the policy has learned")
    assert sentence.endswith("(entropy 1.39), hyper.entropy_coef=1 may be too high")


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"kl": [1e-9, 1e-8]}, "kl is at most 1e-08: the policy stands still, hyper.lr=10 may be too low"),
        ({"informative_groups": [0.5, 0.0]}, "informative_groups is 0 since step 2,048: all members of a group score"),
    ],
)
def test_a_policy_that_stands_still_is_named(metrics, expected):
    _, sentence = diagnose(CONFIG, rows({0: 1.0, 2: 1.0}, **metrics))
    assert sentence.startswith(expected)


def test_one_gradient_step_of_a_batch_has_no_divergence_and_is_not_blamed_for_it():
    once = config("hyper.lr=10", "hyper.epochs=1", "hyper.minibatches=1").resolve()
    assert len(diagnose(once, rows({0: 1.0, 2: 1.0}, kl=[1e-9, 1e-8]))) == 1


def test_returns_that_cancel_or_are_never_met_are_told_from_those_that_do_not_rise():
    played = rows({0: 0.0, 2: 0.0})
    assert diagnose(CONFIG, played) == ["eval/return did not rise: 0.000 at step 0, 0.000 at step 2,048"]
    for row in played:
        row |= {key: 0.0 for key in row if key.startswith("eval/")}
    (sentence,) = diagnose(CONFIG, played)
    assert sentence.startswith("eval/return is 0 in every evaluated episode: no reward was met, or those of opponents")


def test_a_reward_that_is_the_same_in_every_episode_is_said():
    played = rows({0: 10.0, 2: 10.0})
    for row in played:
        row |= {key: 10.0 for key in row if key.startswith("eval/")}
    assert diagnose(CONFIG, played) == [
        "every episode returned 10.000: the reward does not depend on what the policies do, or no episode met another"
    ]
    (sentence,) = diagnose(CONFIG | {"resume_from": "solved"}, played)
    assert sentence.startswith(
        "every episode returned 10.000: the weights of the other run earn all there is, the reward"
    )
    played[-1]["eval/greedy_return"] = 12.0
    assert diagnose(CONFIG, played) == ["eval/return did not rise: 10.000 at step 0, 10.000 at step 2,048"]


def test_of_several_policies_each_has_its_own_keys():
    team: Any = "team={first: {agents: [a]}, second: {agents: [b], hyper: {lr: 7}}}"
    metrics = {"first__kl": [0.01, 0.01], "second__kl": [0.01, 3.0]}
    _, sentence = diagnose(config(team).resolve(), rows({0: 1.0, 2: 1.0}, **metrics))
    assert (
        sentence
        == "second/kl was 3.000 at step 2,048: an update changed too much, team.second.hyper.lr=7 may be too high"
    )


def test_a_return_that_rises_within_its_interval_has_not_risen_for_certain():
    assert diagnose(CONFIG, rows({0: -0.5, 4: -0.45})) == [
        "eval/return rose no more than chance explains: -0.500 at step 0, whose 95 % interval ends at -0.400, "
        "-0.450 at step 4,096"
    ]


def test_a_return_that_falls_again_is_said_with_its_best():
    assert diagnose(CONFIG, rows({0: 0.0, 2: 0.9, 4: 0.3})) == [
        "eval/return fell again: 0.900 at step 2,048, 0.300 at step 4,096"
    ]


def test_a_run_that_learns_or_has_hardly_begun_is_not_blamed():
    # The entropy of a good policy falls too.
    assert diagnose(CONFIG, rows({0: -0.5, 4: 0.9}, entropy=[1.4, 0.8, 0.2, 0.01])) == []
    assert diagnose(CONFIG, rows({0: -0.5})) == diagnose(CONFIG, []) == []
    assert diagnose(CONFIG, [{"iteration": -1, "steps": 0, "kl": 9.0, "return": 0.0}] * 2) == []


def test_a_policy_that_collapsed_is_named_though_the_return_happened_to_rise():
    bad = rows(
        {0: -0.5, 8: 0.9},
        entropy=[0.35] + [0.0] * 7,
        kl=[10.85] + [0.0] * 7,
        value_loss=[0.5, 300.0, 1400.0, 400.0, 500.0, 600.0, 700.0, 800.0],
        explained_variance=[-1.0, -50.0, -112.0, -60.0, -60.0, -60.0, -60.0, -60.0],
        grad_norm=[0.27] + [0.0] * 7,
    )
    assert [sentence.split(" ")[0] for sentence in diagnose(CONFIG, bad)] == [
        "entropy",
        "kl",
        "value_loss",
        "grad_norm",
    ]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"grad_norm": [0.3, 0.0]}, "grad_norm is 0 since step 2,048: nothing is learned any more"),
        ({"value_loss": [0.5, 70.0]}, "value_loss was 70.000 at step 2,048: the critic diverged, hyper.lr=10 may"),
        ({"explained_variance": [0.5, -30.0]}, "explained_variance is -30.000 at step 8,192: the critic is far worse"),
    ],
)
def test_one_sign_that_no_healthy_run_shows_is_enough(metrics, expected):
    course = {name: [first] + [then] * 7 for name, (first, then) in metrics.items()}
    (sentence,) = diagnose(CONFIG, rows({0: -0.5, 8: 0.9}, **course))
    assert sentence.startswith(expected)


@pytest.mark.parametrize(
    "metrics",
    [
        {"grad_norm": [0.3] * 6 + [0.0] * 2},
        {"grad_norm": [0.0] * 8, "informative_groups": [0.0] * 8},
        {"value_loss": [900.0] * 3 + [0.1] * 5},
        {"explained_variance": [-90.0] * 3 + [0.5] * 5},
    ],
)
def test_a_run_that_learned_is_not_blamed_for_what_passed_or_for_having_finished(metrics):
    assert diagnose(CONFIG, rows({0: -0.5, 8: 0.9}, **metrics)) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(METRICS), st.floats(-99, 99))))
def test_any_rows_give_sentences_of_one_line(metrics):
    played = [{"iteration": n, "steps": n * STEPS} | row for n, row in enumerate(metrics)]
    assert all(sentence and "\n" not in sentence for sentence in diagnose(CONFIG, played))
