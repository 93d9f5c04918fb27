"""Defaults of `hyper` by family of policies, and the settings that win over them."""

import re

import pytest
from toy_runs.runs import PLAYING

from marl_ray.cli import main
from marl_ray.config import SPECS, RunConfig, parse_config
from marl_ray.errors import MarlRayError

LANGUAGE = [name for name in PLAYING if SPECS[name].token_policies and SPECS[name].critic != "central"]
MODELS = {
    "path": ({"path": "somewhere"}, 1e-6, 1e-5),
    "lora": ({"path": "somewhere", "lora": {}}, 1e-5, 1e-5),
    "preset": ({"preset": "tiny-1m"}, 2e-4, 1e-3),
    "preset lora": ({"preset": "tiny-1m", "lora": {}}, 2e-3, 1e-3),
}


def run(algorithm: str, model: dict | None, *overrides: str) -> RunConfig:
    base = {
        "name": "a",
        "env": {"id": "math"},
        "algorithm": algorithm,
        "team": {"a": {} if model is None else {"model": model}},
        "train": {"group_size": 4},
        "constraints": [{"budget": 1}] if SPECS[algorithm].needs_costs else [],
    }
    return parse_config(RunConfig, base, overrides)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("algorithm", LANGUAGE)
def test_a_language_model_discounts_no_token_and_learns_slowly(algorithm, kind):
    model, lr, critic_lr = MODELS[kind]
    hyper = run(algorithm, model).hyper_of("a")
    assert (hyper.gamma, hyper.gae_lambda, hyper.cost_gamma, hyper.cost_gae_lambda) == (1, 1, 1, 1)
    assert (hyper.lr, hyper.critic_lr, hyper.epochs, hyper.max_grad_norm) == (lr, critic_lr, 1, 1)
    assert (hyper.entropy_coef, hyper.value_coef) == (0, 0.1)
    assert hyper.adam_eps == (1e-8 if "path" in model else 1e-5)
    # What the algorithm says of itself it says of both families.
    for key, value in SPECS[algorithm].defaults.items():
        assert getattr(hyper, key) == value, key


@pytest.mark.parametrize("algorithm", PLAYING)
def test_actor_critics_keep_their_own_defaults(algorithm):
    hyper = run(algorithm, None).hyper_of("a")
    assert hyper == SPECS[algorithm].hyper.model_validate(SPECS[algorithm].defaults)
    assert (hyper.lr, hyper.max_grad_norm, hyper.value_coef, hyper.adam_eps) == (7e-4, 10, 1, 1e-5)
    assert hyper.epochs == (1 if algorithm == "remax" else 4)


def test_the_more_particular_default_wins():
    """The family's < the algorithm's own < the run's < the policy's."""
    hyper = "hyper: {lr: 5.0e-7, gamma: 0.9}"
    team = f"team={{a: {{model: {{preset: tiny-1m}}}}, b: {{agents: [x], model: {{path: y}}, {hyper}}}}}"
    defaults = run("ppo", None, team, "hyper.lr=1e-4", "hyper.gae_lambda=0.97")
    values = [
        (defaults.hyper_of(name).lr, defaults.hyper_of(name).gamma, defaults.hyper_of(name).gae_lambda) for name in "ab"
    ]
    assert values == [(1e-4, 1.0, 0.97), (5e-7, 0.9, 0.97)]
    assert run("gspo", {"path": "y"}).hyper_of("a").clip_range == (1 - 3e-4, 1 + 4e-4)


def test_what_is_resolved_is_the_same_config_again():
    config = run("ppo", {"path": "y", "lora": {}})
    written = config.resolve()
    assert written["team"]["a"]["hyper"]["lr"] == 1e-5
    assert written["team"]["a"]["hyper"]["gamma"] == 1.0
    assert RunConfig.model_validate(written).hyper_of("a") == config.hyper_of("a")


@pytest.mark.parametrize("key", ["adam_betas=[0.9,0.95]", "adam_eps=1e-8"])
def test_only_adam_reads_its_own_keys(key):
    assert run("ppo", None, f"hyper.{key}").hyper_of("a").optimizer == "adamw"
    for where in ("hyper", "team.a.hyper"):
        name = key.partition("=")[0]
        with pytest.raises(MarlRayError, match=f"{name} of policy 'a': expected optimizer=adamw, got sgd"):
            run("ppo", None, "hyper.optimizer=sgd", f"{where}.{key}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hyper.adam_betas=[0.9,1.0]", "hyper.adam_betas.1: expected a number less than 1"),
        ("hyper.weight_decay=-1", "hyper.weight_decay: expected a number of at least 0"),
        ("hyper.lr_warmup=-1", "hyper.lr_warmup: expected a number of at least 0"),
        ("hyper.optimizer=adam", "hyper.optimizer: expected 'adamw' or 'sgd'"),
        ("hyper.value_coef=0", "hyper.value_coef: expected a number greater than 0"),
    ],
)
def test_keys_of_the_optimiser_are_checked_by_name(override, message):
    with pytest.raises(MarlRayError, match=re.escape(message)):
        run("ppo", None, override)
    with pytest.raises(MarlRayError, match="grpo does not read it"):
        run("grpo", None, "hyper.value_coef=0.5")


def test_the_command_line_shows_what_language_models_default_to(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["algorithms", "ppo"])
    shown = capsys.readouterr().out
    assert "hyper.gamma = 0.99 (language models: 1.0)" in shown
    assert (
        "hyper.lr = 0.0007 (language models: path 1e-06, path with lora 1e-05, preset 0.0002, preset with lora 0.002)"
        in shown
    )
    with pytest.raises(SystemExit, match="0"):
        main(["algorithms", "cpo"])
    assert "language models" not in capsys.readouterr().out
