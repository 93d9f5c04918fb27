"""The names of metrics by which a sweep is judged: those that no run reports are refused before anything trains."""

import pytest

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError
from marl_ray.tuning.search.metric_names import unchecked_metrics
from marl_ray.tuning.search.spaces import check_space


def sweep_by(metric, **run):
    keys = {"name": "s", "run": {"env": {"id": "budget_dag"}, **run}, "space": {"hyper.lr": {"grid": [1.0e-4]}}}
    return parse_config(SweepConfig, keys | {"metric": metric})


TEXTS = {
    "algorithm": "reinforce_pp",
    "env": {"id": "math"},
    "team": {"solver": {"model": {"preset": "tiny-0.2m"}}},
    "evaluation": {"every": 1, "samples": 6},
}
TWO = {"team": {"one": {"agents": ["worker_0"]}, "two": {"agents": ["worker_1"]}}}


@pytest.mark.parametrize(
    ("metric", "run", "meant"),
    [
        ("eval/retrun", {}, "'eval/retrun'; did you mean eval/return or"),
        ("retrun", {}, "'retrun'; did you mean return or"),
        ("entropy", TWO, "'entropy'; did you mean two/entropy or one/entropy?"),
        ("eval/return/thre", TWO, "'eval/return/thre'; did you mean eval/return/"),
        ("within_budget", {}, "'within_budget'; "),
        ("solver/rewrd", {}, "'solver/rewrd'; "),
        ("best/greedy_return", {}, "'best/greedy_return'; "),  # episodes that choose nothing are all sampled
        ("best/greedy", TEXTS, "'best/greedy'; "),
        ("eval/truncated", TEXTS, "'eval/truncated'; "),
        ("eval/pass_at_3", TEXTS, "'eval/pass_at_3'; "),
        ("eval/return_low", {"evaluation": {"episodes": 1}}, "'eval/return_low'; "),
    ],
)
def test_a_metric_that_no_run_reports_is_refused_with_those_that_are_close(metric, run, meant):
    with pytest.raises(MarlRayError) as refused:
        check_space(sweep_by(metric, **run))
    assert str(refused.value).startswith(f"metric: no run reports {meant}")


GROUPS = {"algorithm": "grpo", "train": {"group_size": 2}}
BUDGETS = {"constraints": [{"budget": 4}]}
CRITIC = "an algorithm with a critic"
TRUST_REGION = "an algorithm with a trust region"
MULTIPLIERS = "an algorithm with Lagrange multipliers"
DATA = {**TEXTS, "data": "decisions://log/e", "evaluation": {"every": 0}}


@pytest.mark.parametrize(
    ("metric", "run", "need"),
    [
        ("value_loss", GROUPS, CRITIC),
        ("explained_variance", GROUPS, "an algorithm that trains its critic beside the actor"),
        ("cost_value_loss", GROUPS, "an algorithm that keeps budgets"),
        ("cost_value_loss", BUDGETS, "an algorithm that keeps budgets"),
        ("reference_kl", GROUPS, "hyper.kl_coef above 0"),
        ("trust_region_kl", {}, TRUST_REGION),
        ("trust_region_case", {"algorithm": "p3o", **BUDGETS}, TRUST_REGION),
        ("line_search_steps", {}, TRUST_REGION),
        ("group_std", {}, "an algorithm that compares the sampled members of groups"),
        (
            "informative_groups",
            {**GROUPS, "algorithm": "remax"},
            "an algorithm that compares the sampled members of groups",
        ),
        ("multiplier_0", {"algorithm": "ppo", **BUDGETS}, MULTIPLIERS),
        ("multiplier_0", {"algorithm": "p3o", **BUDGETS}, MULTIPLIERS),
        ("one/multiplier_0", {"algorithm": "map3o", **TWO, **BUDGETS}, MULTIPLIERS),
        ("left_out", GROUPS, "language models and an algorithm that compares the members of groups"),
        ("engine/log_prob_gap", GROUPS, "an engine that computes with modules of its own, such as vllm"),
        ("engine/log_prob_gap", TEXTS, "an engine that computes with modules of its own, such as vllm"),
        (
            "one/value_loss",
            {"team": {"one": {"agents": ["worker_0"], "algorithm": "grpo"}, **TWO["team"]}, **GROUPS},
            CRITIC,
        ),
        ("time/evaluation", {"evaluation": {"every": 0}}, "evaluations"),
        ("time/benchmarks", TEXTS, "run.evaluation.benchmarks"),
    ],
)
def test_a_metric_whose_need_the_run_does_not_meet_is_refused_with_this_need(metric, run, need):
    with pytest.raises(MarlRayError) as refused:
        check_space(sweep_by(metric, **run))
    assert str(refused.value) == f"metric: not every run of the sweep reports {metric!r}, which needs {need}"


@pytest.mark.parametrize(
    ("metric", "run"),
    [
        ("value_loss", {}),
        ("explained_variance", {}),
        ("cost_value_loss", {"algorithm": "p3o", **BUDGETS}),
        ("multiplier_0", {"algorithm": "ppo_lagrangian", **BUDGETS}),
        ("reference_kl", {"hyper": {"kl_coef": 0.1}}),
        ("trust_region_case", {"algorithm": "cpo", **BUDGETS}),
        ("group_std", GROUPS),
        (
            "one/value_loss",
            {
                "team": {"one": {"agents": ["worker_0"]}, "two": {"agents": ["worker_1"], "algorithm": "grpo"}},
                "train": {"group_size": 2},
            },
        ),
        ("time/evaluation", {}),
        ("data/solver/passes", DATA),
        ("solver/reward", DATA),
        ("score", {**DATA, "evaluation": {"every": 1}}),
    ],
)
def test_a_metric_whose_need_the_run_meets_is_accepted(metric, run):
    check_space(sweep_by(metric, **run))


@pytest.mark.parametrize(
    ("metric", "run"),
    [
        ("multiplier_1", {"algorithm": "p3o", **BUDGETS}),
        ("multiplier_1", {"algorithm": "ppo_lagrangian", **BUDGETS}),
        ("multiplier_0", {}),
        ("return", DATA),
        ("episode_length", DATA),
        ("score", DATA),
        ("env/won", DATA),
        ("data/solver/rewards", DATA),
        ("data/solver/passes", TEXTS),
    ],
)
def test_a_metric_that_the_run_has_no_part_for_is_refused(metric, run):
    with pytest.raises(MarlRayError, match=f"^metric: no run reports '{metric}'; "):
        check_space(sweep_by(metric, **run))


@pytest.mark.parametrize("metric", ["eval/return", "eval/env/won", "best/env/won"])
def test_a_metric_of_evaluations_is_refused_without_them(metric):
    with pytest.raises(MarlRayError) as refused:
        check_space(sweep_by(metric, evaluation={"every": 0}))
    assert str(refused.value) == (
        f"metric: {metric} needs evaluations, and the run has none; set run.evaluation.every, or give a metric of the "
        "training"
    )


@pytest.mark.parametrize(
    "metric",
    [
        "eval/return",
        "score",
        "two/entropy",
        "eval/return/one",
        "env/won",
        "best/env/won",
        "eval/greedy_return",
        "best/truncated",
    ],
)
def test_a_metric_that_a_run_may_report_is_accepted(metric):
    check_space(sweep_by(metric, **TWO))
    assert unchecked_metrics(sweep_by(metric)) == [metric] * ("env/" in metric)


@pytest.mark.parametrize(
    "metric", ["eval/greedy", *(f"{part}/pass_at_{k}" for part in ("eval", "best") for k in (1, 2, 4, 6))]
)
def test_a_metric_that_a_run_of_texts_may_report_is_accepted(metric):
    check_space(sweep_by(metric, **TEXTS))


def test_a_benchmark_that_judges_a_sweep_must_be_measured():
    run = {"name": "r", "algorithm": "reinforce_pp", "env": {"id": "math"}}
    run |= {"team": {"solver": {"model": {"preset": "tiny-0.2m"}}}, "evaluation": {"benchmarks": ["humaneval"]}}
    keys = {"name": "s", "run": run, "space": {"hyper.lr": {"grid": [1.0e-4]}}, "seeds": 1}
    check_space(parse_config(SweepConfig, keys | {"metric": "benchmark/humaneval/pass_at_1"}))
    with pytest.raises(
        MarlRayError, match=r"metric: benchmark/math/pass_at_1 needs an entry of run.evaluation.benchmarks"
    ):
        check_space(parse_config(SweepConfig, keys | {"metric": "benchmark/math/pass_at_1"}))
