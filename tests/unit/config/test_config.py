"""Configs: what is read, what is refused, and in which words."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_runs.run_configs import refusal, run

from marl_ray.cli import main
from marl_ray.config import (
    SPECS,
    GatewayConfig,
    HyperParameters,
    PolicyConfig,
    RunConfig,
    config_hash,
    load_config,
    parse_config,
)
from marl_ray.config.run.algorithms import READ_WITH_KEY
from marl_ray.errors import MarlRayError


def file_refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(MarlRayError) as error:
        load_config(RunConfig, path)
    assert "\n" not in str(error.value)
    return str(error.value)


# Reading


@pytest.mark.parametrize("number", ["3e-4", "3E-4", "0.0003", "3.0e-4", ".3e-3", "+3e-4"])
def test_numbers_read_as_numbers_in_overrides_and_files(tmp_path, number):
    assert run(f"hyper.lr={number}").hyper.lr == 3e-4
    (tmp_path / "c.yaml").write_text(f"name: run\nenv: {{id: x}}\nhyper: {{lr: {number}}}\n")
    assert load_config(RunConfig, tmp_path / "c.yaml").hyper.lr == 3e-4


def test_overrides_reach_every_kind_of_value():
    config = run(
        "name=other",
        "env.kwargs.max_steps=10",
        "hyper.value_clip=null",
        "hyper.lr_decay=true",
        "team.shared.agents=['agent_*']",
        "team.shared.network.hidden=[8, 8]",
        "env.id=a.b:c",
        "tracking.uri=http://host:5000/x=y",
    )
    assert config.name == "other"
    assert config.env.kwargs == {"max_steps": 10}
    assert config.env.id == "a.b:c"
    assert config.hyper.value_clip is None
    assert config.hyper.lr_decay is True
    assert config.team["shared"].agents == ("agent_*",)
    assert config.team["shared"].network.hidden == (8, 8)
    assert config.tracking.uri == "http://host:5000/x=y"


def test_the_last_override_wins():
    assert run("seed=1", "seed=2", seed=3).seed == 2


def test_configs_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        run().seed = 1


def test_policy_hyper_lies_over_the_runs():
    config = run(hyper={"lr": 1e-3, "gamma": 0.9}, team={"a": {"hyper": {"lr": 5e-4}}})
    assert (config.hyper_of("a").lr, config.hyper_of("a").gamma) == (5e-4, 0.9)


# Refusals


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hyper.lrr=1", "unknown key 'hyper.lrr'"),
        ("nmae=x", "unknown key 'nmae'"),
        ("team.shared.hyper.lrr=1", "lrr"),
        ("hyper.lr=fast", "hyper.lr: "),
        ("hyper.lr=-1", "hyper.lr: expected a number greater than 0, got -1"),
        ("hyper.gamma=1.5", "hyper.gamma: "),
        ("seed=-1", "seed: "),
        ("train.env_copies=0", "train.env_copies: "),
        ("train.env_copies=1.5", "train.env_copies: "),
        ("algorithm=ppo9", "algorithm: "),
        ("name=a/b", "name: "),
        ("name=..", "name: "),
        ("team={}", "team: "),
        ("env=5", "env: "),
        ("seed", "override 'seed': expected dotted.key=value"),
        ("=1", "override '=1': expected dotted.key=value"),
        ("seed.x.y=1", "override 'seed.x.y=1': seed is a value, not a group of keys"),
        ("seed=[1", "override 'seed=[1'"),
    ],
)
def test_a_bad_override_is_named(override, message):
    assert message in refusal(override, seed=0)


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("seed", (1 << 53) - 1),
        ("hyper.epochs", 1 << 26),
        ("hyper.dynamic_sampling", 127),
        ("train.env_copies", 1 << 20),
        ("evaluation.episodes", 1 << 20),
        ("evaluation.max_steps", 1 << 26),
    ],
)
def test_a_number_that_no_random_stream_has_bits_for_is_refused(key, most):
    overrides = ["algorithm=dapo", "train.group_size=4"]
    run(*overrides, f"{key}={most}")
    assert refusal(*overrides, f"{key}={most + 1}") == (
        f"config: {key}: expected a number of at most {most}, got {most + 1}"
    )


def test_the_other_mistake_is_named_and_the_number_of_more_is_told():
    assert refusal("hyper.lr=-1", "hyper.gamma=2").endswith("(and 1 more: hyper.gamma)")
    assert refusal("hyper.lr=-1", "hyper.gamma=2", "train.horizon=0").endswith("(and 2 more)")


def test_a_missing_key_is_named():
    with pytest.raises(MarlRayError, match=r"^config: missing key 'env'$"):
        parse_config(RunConfig, {"name": "run"})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MarlRayError, match=r"none\.yaml.*No such file"):
        load_config(RunConfig, tmp_path / "none.yaml")
    with pytest.raises(MarlRayError, match="cannot be read"):
        load_config(RunConfig, tmp_path)


def test_bad_yaml_has_its_line(tmp_path):
    path = tmp_path / "c.yaml"
    assert file_refusal(path, "name: run\nenv:\n  id: [x\nseed: 1\n").startswith(f"{path}, line 4: not valid YAML")
    assert "line 2" in file_refusal(path, "name: run\n\tenv: x\n")


def test_yaml_that_python_cannot_hold_is_not_valid():
    assert refusal("name=2026-13-01").endswith(", line 1: not valid YAML: month must be in 1..12")
    assert ", line 1: not valid YAML: Exceeds the limit (4300 digits)" in refusal(f"name={'1' * 5000}")
    assert refusal("name=" + "[" * 2000).endswith(": not valid YAML: nested too deeply")


def test_a_key_given_twice_has_its_line(tmp_path):
    path = tmp_path / "c.yaml"
    assert file_refusal(path, "name: a\nenv: {id: x}\nname: b\n") == (
        f"{path}, line 3: not valid YAML: key 'name' is given twice"
    )
    assert "key 'id' is given twice" in file_refusal(path, "name: a\nenv:\n  id: x\n  id: y\n")


@pytest.mark.parametrize("text", ["", "- a\n", "just words\n", "5\n"])
def test_a_file_that_is_no_mapping(tmp_path, text):
    assert "expected a mapping of keys at the top" in file_refusal(tmp_path / "c.yaml", text)


@pytest.mark.parametrize(
    "text", ["? [a, b]\n: 1\n", "1: x\nname: a\nenv: {id: x}\n", "a: &a [*a]\n", "\x00\n", "a: !!python/x y\n"]
)
def test_odd_yaml_is_one_line(tmp_path, text):
    assert str(tmp_path) in file_refusal(tmp_path / "c.yaml", text)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(MarlRayError, match="cannot be read"):
        load_config(RunConfig, tmp_path / "c.yaml")


def test_env_copies_divide_among_workers():
    assert run("train.env_copies=6", "resources.workers=3").batch_steps == 6 * 64
    assert "train.env_copies=6 must be a multiple of resources.workers=4" in refusal(
        "train.env_copies=6", "resources.workers=4"
    )


LANGUAGE = {
    "algorithm": "grpo",
    "env": {"id": "math"},
    "team": {"a": {"model": {"preset": "tiny-0.2m"}}},
    "train": {"group_size": 4, "env_copies": 64, "horizon": 1},
}


def test_groups_of_workers_divide_the_workers():
    for parallel, groups in (
        ({}, 1),
        ({"replicate": 2}, 2),
        ({"shard": 2, "replicate": 2}, 2),
        ({"shard": 1}, 4),
        ({"tensor": 2}, 1),
        ({"shard": 1, "tensor": 2}, 2),
        ({"shard": 1, "context": 2, "tensor": 2}, 1),
    ):
        assert run(resources={"workers": 4, "parallel": parallel}, **LANGUAGE).resources.replicate == groups
    for parallel, message in (
        ({"replicate": 3}, "parallel.replicate=3: expected a divisor of resources.workers=4"),
        ({"shard": 8}, "parallel.shard=8: expected a divisor of resources.workers=4"),
        ({"shard": 4, "replicate": 2}, "shard=4 x replicate=2, expected their product to be resources.workers=4"),
        (
            {"shard": 4, "tensor": 2},
            "shard=4 x tensor=2, expected their product to be a divisor of resources.workers=4",
        ),
        ({"shard": 1, "replicate": 2}, "shard=1 x replicate=2, expected their product to be resources.workers=4"),
        ({"pipeline": 2}, "resources.parallel.pipeline"),
    ):
        assert message in refusal(resources={"workers": 4, "parallel": parallel}, **LANGUAGE)
    message = "resources.parallel: 2 groups of workers, expected language models"
    offloaded = LANGUAGE | {"team": {"a": {"model": {"preset": "tiny-0.2m", "cpu_offload": True}}}}
    assert "team.a.model.cpu_offload: expected one group of workers, got 2 by resources.parallel" in refusal(
        resources={"workers": 4, "parallel": {"shard": 2}}, **offloaded
    )
    assert message in refusal("resources.workers=4", "resources.parallel.replicate=2")
    for key in ("tensor", "context"):
        together = f"resources.parallel.{key}=2: expected language models"
        assert together in refusal("resources.workers=4", f"resources.parallel.{key}=2")
    adapted = LANGUAGE | {"team": {"a": {"model": {"preset": "tiny-0.2m", "lora": {"rank": 2}}}}}
    assert "team.a.model.lora: expected no adapters with resources.parallel.tensor=2" in refusal(
        resources={"workers": 4, "parallel": {"tensor": 2}}, **adapted
    )


def test_a_frozen_policy_needs_a_bundle_beside_one_that_learns():
    assert "team.a: frozen: true needs `bundle`" in refusal(team={"a": {"frozen": True}})
    frozen = {"frozen": True, "bundle": "/b"}
    assert "every policy is frozen" in refusal(team={"a": frozen, "b": frozen})
    assert run(team={"a": frozen, "b": {}}).team["a"].frozen


def test_minibatches_fit_the_horizon():
    message = "minibatches=9 of policy 'a' must not exceed train.horizon=8"
    assert message in refusal("train.horizon=8", team={"a": {"hyper": {"minibatches": 9}}})


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


def test_a_python_file_is_no_config():
    with pytest.raises(MarlRayError, match=r"^config file 'relay.py': expected a YAML file, got a Python file$"):
        load_config(RunConfig, "relay.py")


def test_a_key_that_is_not_read_names_the_command_that_lists_the_others():
    assert refusal("hyper.pid_kp=5").endswith(
        "mappo does not read it; see what is read with `marl-ray algorithms mappo`"
    )


def test_a_gateways_config_names_what_is_wrong_in_it():
    arms = {"a": {"bundle": "/a"}, "b": {"bundle": "/b", "weight": 0}}
    experiment = {"name": "e", "arms": arms}
    assert parse_config(GatewayConfig, {"experiments": [experiment]}).experiments[0].arms["b"].weight == 0
    bad = [
        ([experiment, experiment], "experiments: names must differ"),
        ([experiment | {"arms": {k: v | {"weight": 0} for k, v in arms.items()}}], "at least one weight must be above"),
        ([experiment | {"arms": {}}], "experiments.0.arms: "),
        ([experiment | {"alpha": 1}], "experiments.0.alpha: "),
    ]
    for experiments, message in bad:
        with pytest.raises(MarlRayError) as error:
            parse_config(GatewayConfig, {"experiments": experiments})
        assert message in str(error.value)


# Identity


def test_the_hash_is_of_the_meaning_not_of_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text("name: run\nenv: {id: x}\nhyper:\n  lr: 0.0007\n")
    (tmp_path / "b.yaml").write_text("# a comment\nenv:\n  id: x\nname: run\n")
    first, other = (load_config(RunConfig, tmp_path / name) for name in ("a.yaml", "b.yaml"))
    assert config_hash(first) == config_hash(other)
    assert config_hash(first) == config_hash(parse_config(RunConfig, first.resolve()))
    assert config_hash(first) != config_hash(load_config(RunConfig, tmp_path / "a.yaml", ["seed=1"]))
    assert len(config_hash(first)) == 64


def test_the_hash_is_the_same_in_another_process():
    code = (
        "from marl_ray.config import *; print(config_hash(parse_config(RunConfig, {'name': 'r', 'env': {'id': 'x'}})))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


# The package


def test_importing_configs_loads_neither_torch_nor_ray():
    code = "import sys, marl_ray.config; print(*sorted({'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def _leaves() -> dict[str, dict[str, Any]]:
    schema = RunConfig.model_json_schema()
    leaves: dict[str, dict[str, Any]] = {}

    def walk(node: dict[str, Any], prefix: str) -> None:
        for name, value in node["properties"].items():
            options = [value, value.get("additionalProperties"), *value.get("anyOf", [])]
            references = [o["$ref"] for o in options if isinstance(o, dict) and "$ref" in o]
            below = schema["$defs"][references[0].rsplit("/", 1)[1]] if references else {}
            if "properties" in below:
                walk(below, f"{prefix}{name}.")
            else:
                leaves[prefix + name] = value

    walk(schema, "")
    return leaves


@pytest.mark.parametrize("language", [False, True])
def test_no_run_reads_more_than_a_hundred_keys(language):
    """That holds for every algorithm.

    The keys of the other family of policies and of other algorithms are not for it, and a run with `data` reads that
    key and three fewer of `train`. A model comes from `path` or from `preset`, and a warm start, which has more keys,
    is refused beside `kl_coef` and beside `resume_from`.
    """
    leaves = _leaves()
    assert "team.agents" in leaves and "hyper.lr" in leaves and "team.model.lora.rank" in leaves  # it does go down
    words = ("data", "team.model.", "team.generation.", "train.curriculum", "evaluation.tasks")
    words = (*words, "evaluation.samples", "evaluation.benchmarks", "resources.hourly_price", "warm_start.count")
    numbers = ("evaluation.episodes", "evaluation.max_steps")
    unread = ("team.network.", "env.cost.", "train.rollout", "warm_start.top", "data", "team.model.preset", *numbers)
    unread = (*unread, "team.model.cpu_offload")  # refused beside groups of `resources.parallel`
    unread = (*unread, "train.overlap")  # refused beside language models
    others = unread if language else words
    others = (*others, "resume_from")
    family = [key for key in leaves if not key.startswith("hyper.") and not key.startswith(others)]
    held = {"kl_coef", *(key for key, part in READ_WITH_KEY.items() if part == "kl_coef")} if language else set()
    most = max(len(set(spec.read_keys) - held) for spec in SPECS.values() if spec.token_policies or not language)
    assert len(family) + most <= 100


def test_every_key_says_what_it_is():
    plain = {"seed", "team.network.activation", "hyper.adam_eps", "hyper.entropy_coef", "tracking.experiment"}
    plain |= {"resources.cpus_per_worker"}
    assert {key for key, value in _leaves().items() if "description" not in value} <= plain


def test_defaults_are_valid():
    assert HyperParameters().clip == 0.2
    assert PolicyConfig().agents == ("*",)


@pytest.mark.parametrize("kind", ["run", "sweep", "experiment", "gateway"])
def test_every_kind_of_config_has_a_schema(kind, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["config", "schema", kind])
    assert caught.value.code == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["type"] == "object"
