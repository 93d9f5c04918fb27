"""A run's config is checked before anything starts: what its algorithm, its policies and its benchmarks need."""

import importlib
import pkgutil
import re

import pytest
from toy_runs.run_configs import language, refusal

from marl_ray.config import SPECS, HyperParameters, RunConfig, config_hash, parse_config
from marl_ray.config.run import checks
from marl_ray.config.run.config import CHECKS
from marl_ray.errors import MarlRayError


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"bogus": 1}, "unknown key 'team.x.hyper.bogus'"),
        ({"pid_kp": 1}, "team.x.hyper.pid_kp: mappo does not read it"),
        ({"lr": -1}, "team.x.hyper.lr: expected a number greater than 0"),
    ],
)
def test_a_policys_own_hyper_parameters_are_checked_by_name(hyper, message):
    with pytest.raises(MarlRayError) as caught:
        parse_config(RunConfig, {"name": "r", "env": {"id": "e"}, "team": {"x": {"hyper": hyper}}})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_is_not_read_names_the_command_that_lists_the_others():
    assert refusal("hyper.pid_kp=5").endswith(
        "mappo does not read it; see what is read with `marl-ray algorithms mappo`"
    )


COST = ["constraints=[{budget: 4}]"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=grpo"], "train.group_size=1: grpo of policy 'shared' needs 2 or more"),
        (["algorithm=grpo", "train.group_size=3"], "train.group_size=3 must divide the copies of a worker"),
        (
            ["algorithm=reinforce_pp", "train.rollout=steps"],
            "train.rollout=steps: reinforce_pp of policy 'shared' needs",
        ),
        (["algorithm=macpo"], "constraints: macpo of policy 'shared' needs a budget"),
        (["hyper.clip=0.3", "hyper.clip_high=0.2"], "clip_high=0.2 must not be below clip=0.3"),
        (["hyper.advantage_norm=group"], "advantage_norm=group of policy 'shared': mappo has no groups"),
        (
            ["algorithm=rloo", "train.group_size=2", "hyper.advantage_norm=group"],
            "advantage_norm=group of policy 'shared': rloo takes no deviation of a group",
        ),
        (
            ["algorithm=remax", "train.group_size=2", "hyper.dynamic_sampling=2"],
            "hyper.dynamic_sampling: remax does not read it",
        ),
        (["hyper.dynamic_sampling=2"], "hyper.dynamic_sampling: mappo does not read it"),
        (["hyper.pid_kp=5"], "hyper.pid_kp: mappo does not read it"),
        (["algorithm=cpo", *COST, "hyper.entropy_coef=0.1"], "hyper.entropy_coef: cpo does not read it"),
        (["algorithm=cpo", *COST, "hyper.importance_cap=2"], "hyper.importance_cap: cpo does not read it"),
        (["hyper.bogus=2"], "unknown key 'hyper.bogus'"),
        (["hyper.kl_coef=0.1", "hyper.kl_estimator=k1"], "hyper: kl_estimator=k1: its gradient is zero in expectation"),
        (["hyper.overlong_buffer=8"], "overlong_buffer of policy 'shared': a row holds a stretch of play"),
        (["hyper.overlong_filter=true"], "overlong_filter of policy 'shared': a row holds a stretch of play"),
        (["algorithm=rloo", "hyper.ratio_level=sequence"], "aggregation=token-mean: expected seq-mean-token-mean"),
        (["hyper.overlong_buffer=64"], "overlong_buffer=64 must be below train.horizon=64"),
        (["algorithm=direct_dapo", "hyper.beta=0.1"], "hyper.beta: direct_dapo does not read it"),
        (["algorithm=direct_dapo", "hyper.lowest_return=2"], "highest_return=1 must be above lowest_return=2"),
        (["hyper.kl_target=0.1"], "kl_target of policy 'shared': expected kl_coef beside it"),
        (["hyper.kl_coef=0.1", "hyper.kl_horizon=9"], "kl_horizon of policy 'shared': expected kl_target beside it"),
        (["hyper.entropy_step=0.1"], "entropy_step of policy 'shared': expected entropy_target beside it"),
        (["hyper.overlong_penalty=2"], "overlong_penalty of policy 'shared': expected overlong_buffer beside it"),
        (["algorithm=dapoo"], "algorithm: "),
        (["constraints=[{budget: -1}]"], "constraints.0.budget"),
        (["resume_from=other", "warm_start={data: x.parquet}"], "warm_start: expected no resume_from beside it"),
    ],
)
def test_what_an_algorithm_needs_is_checked_before_anything_starts(overrides, message):
    with pytest.raises(MarlRayError) as caught:
        parse_config(RunConfig, {"name": "a", "env": {"id": "x"}}, overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=mappo"], "team.a: mappo trains actor-critics, not language models"),
        (["train.rollout=steps"], "train.rollout=steps"),
        (["train.total_steps=0"], "train.total_steps=0: expected `warm_start`"),
        (["hyper.overlong_buffer=8"], "overlong_buffer=8 must be below team.a.generation.max_tokens=8"),
        (["team.a.model.path=gpt2"], "team.a.model: expected exactly one of `path` and `preset`"),
        (
            ["team.a.model.lora={rank: 600}", "team.a.generation.engine=vllm"],
            "team.a.model.lora.rank=600: expected at most",
        ),
        (["team.b.agents=[x]"], "team.b.model: expected a language model, as the other policies are"),
    ],
)
def test_what_language_models_need_is_checked_before_anything_starts(overrides, message):
    policy = {"model": {"preset": "tiny-0.2m"}, "generation": {"max_tokens": 8}}
    base = {"name": "a", "env": {"id": "math"}, "algorithm": "grpo", "train": {"group_size": 8}, "team": {"a": policy}}
    with pytest.raises(MarlRayError) as caught:
        parse_config(RunConfig, base, overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_is_checked_by_every_module_of_checks():
    modules = [
        importlib.import_module(f"{checks.__name__}.{module.name}") for module in pkgutil.iter_modules(checks.__path__)
    ]
    assert {module.check for module in modules} == set(CHECKS) and len(CHECKS) == len(modules)


def test_the_family_of_an_algorithm_is_refused_before_what_it_lacks():
    """Budgets would not make CPO train a language model."""
    base = {"name": "a", "env": {"id": "math"}, "team": {"a": {"model": {"preset": "tiny-0.2m"}}}}
    with pytest.raises(MarlRayError, match=r"team.a: cpo trains actor-critics, not language models"):
        parse_config(RunConfig, base, ["algorithm=cpo"])


def test_defaults_are_the_algorithms_own_until_something_is_given():
    base = {"name": "a", "env": {"id": "x"}, "train": {"group_size": 4}}
    config = parse_config(RunConfig, base, ["algorithm=dapo"])
    assert config.hyper_of("shared").clip_range == (0.8, 1.28) and config.has_whole_episodes
    changed = parse_config(RunConfig, base, ["algorithm=dapo", "hyper.clip_high=0.3", "team.shared.hyper.clip=0.1"])
    assert changed.hyper_of("shared").clip_range == (0.9, 1.3)
    # What travels to the workers keeps what was left open; what is printed leaves nothing open. Both are configs again.
    for data in (changed.as_given(), changed.resolve()):
        again = RunConfig.model_validate(data)
        assert again.hyper_of("shared") == changed.hyper_of("shared") and config_hash(again) == config_hash(changed)
    assert config_hash(changed) != config_hash(config)


def test_every_default_and_hyper_parameter_of_an_algorithm_is_a_key():
    keys = set(HyperParameters.model_fields)
    for name, spec in SPECS.items():
        assert set(spec.defaults) <= keys and set(spec.keys) <= keys, name
        assert HyperParameters.model_validate(spec.defaults).model_fields_set == set(spec.defaults), name
    assert {key for spec in SPECS.values() for key in spec.read_keys} == keys


def test_a_run_may_have_keys_that_only_some_of_its_policies_read():
    team = {"a": {"agents": ["x"]}, "b": {"agents": ["y"], "algorithm": "pid_lagrangian"}}
    base = {"name": "a", "env": {"id": "x"}, "team": team, "constraints": [{"budget": 3}]}
    config = parse_config(RunConfig, base, ["hyper.pid_kp=5", "hyper.lr=0.1"])
    assert config.hyper_of("b").pid_kp == 5 and config.hyper_of("b").lr == config.hyper_of("a").lr == 0.1
    written = config.resolve()["team"]
    assert "pid_kp" in written["b"]["hyper"] and "pid_kp" not in written["a"]["hyper"]
    with pytest.raises(MarlRayError, match=r"team.a.hyper.pid_kp: mappo does not read it"):
        parse_config(RunConfig, base, ["team.a.hyper.pid_kp=5"])


def test_the_algorithm_of_the_run_says_nothing_of_a_frozen_policy():
    team = {"a": {"agents": ["x"], "algorithm": "ppo"}, "b": {"agents": ["y"], "frozen": True, "bundle": "b"}}
    config = parse_config(RunConfig, {"name": "a", "env": {"id": "x"}, "team": team}, ["algorithm=remax"])
    assert not config.has_greedy_copies and not config.has_whole_episodes


def test_a_greedy_member_leaves_two_others_to_compare():
    team = {"a": {"agents": ["x"], "algorithm": "remax"}, "b": {"agents": ["y"], "algorithm": "grpo"}}
    base = {"name": "a", "env": {"id": "x"}, "team": team, "train": {"env_copies": 12}}
    with pytest.raises(MarlRayError, match=r"train.group_size=2: grpo of policy 'b' needs 3 or more"):
        parse_config(RunConfig, base, ["train.group_size=2"])
    assert parse_config(RunConfig, base, ["train.group_size=3"]).has_greedy_copies
    assert parse_config(RunConfig, base, ["train.group_size=2", "team.b.algorithm=remax"]).has_greedy_copies


def test_a_frozen_policy_has_no_hyper_parameters():
    team = {"a": {"agents": ["x"]}, "b": {"agents": ["y"], "frozen": True, "bundle": "b", "hyper": {"lr": 0.1}}}
    with pytest.raises(MarlRayError, match=r"^config: team\.b\.hyper\.lr: a frozen policy has no hyper-parameters$"):
        parse_config(RunConfig, {"name": "a", "env": {"id": "x"}, "team": team})


def test_bounds_are_compared_with_the_algorithms_own_defaults():
    base = {"name": "a", "env": {"id": "x"}, "train": {"group_size": 4}, "algorithm": "gspo"}
    assert parse_config(RunConfig, base, ["hyper.clip_high=0.001"]).hyper_of("shared").clip_range == (0.9997, 1.001)
    weighted = parse_config(RunConfig, base, ["algorithm=cispo", "hyper.clip_high=0.28"])
    assert weighted.hyper_of("shared").clip_range == (0.0, 1.28)


def test_a_benchmark_is_a_name_or_a_group_of_keys():
    override = (
        "evaluation.benchmarks=[humaneval, {name: math, data: s3://b/m.jsonl, samples: 4, temperature: 0.6, every: 5}]"
    )
    first, second = language(override, "resources.hourly_price=2.5").evaluation.benchmarks
    assert (first.name, first.data, first.samples, first.every) == ("humaneval", None, 1, None)
    assert (second.data, second.samples, second.temperature, second.every) == ("s3://b/m.jsonl", 4, 0.6, 5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("evaluation.benchmarks=[evalplus]",),
            "benchmarks.0.name: 'evalplus' is unknown; did you mean humaneval_plus?",
        ),
        (("evaluation.benchmarks=[math]",), "evaluation.benchmarks.0: data: math needs its file, or a URI"),
        (
            ("evaluation.benchmarks=[{name: mbpp, data: hub}]",),
            "data: 'hub', expected a file or a URI; nothing is downloaded",
        ),
        (("evaluation.benchmarks=[humaneval, humaneval]",), "evaluation: benchmarks: humaneval is given twice"),
        (
            ("evaluation.benchmarks=[{name: humaneval, every: 0}]",),
            "benchmarks.0.every: expected a number greater than 0",
        ),
        (("evaluation.benchmarks=[{name: humaneval, k: 1}]",), "unknown key 'evaluation.benchmarks.0.k'"),
        (
            ("resources.hourly_price=2",),
            "resources.hourly_price: expected evaluation.benchmarks, without which nothing",
        ),
    ],
)
def test_benchmarks_that_cannot_be_measured_are_refused(overrides, message):
    with pytest.raises(MarlRayError, match=re.escape(message)) as caught:
        language(*overrides)
    assert "\n" not in str(caught.value)


def test_actor_critics_are_measured_on_no_benchmark():
    assert "evaluation.benchmarks: expected a text environment and language models" in refusal(
        "evaluation.benchmarks=[humaneval]"
    )
