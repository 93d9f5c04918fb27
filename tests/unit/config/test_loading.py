"""Files and overrides of configs: what is read, what is refused, and in which words."""

from pathlib import Path

import pytest
from toy_runs.run_configs import refusal, run

from marl_ray.config import GatewayConfig, RunConfig, load_config, parse_config, read_yaml
from marl_ray.errors import MarlRayError


def file_refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(MarlRayError) as error:
        load_config(RunConfig, path)
    assert "\n" not in str(error.value)
    return str(error.value)


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


@pytest.mark.parametrize(("tag", "text"), [
    ("int", ""), ("int", "_"), ("float", ""), ("bool", "perhaps"), ("timestamp", "tomorrow"),
])  # fmt: skip
def test_a_text_that_its_tag_calls_something_else_is_not_valid(tag, text):
    message = f", line 1: not valid YAML: {text!r} is not what its tag {tag} says"
    assert refusal(f'name=!!{tag} "{text}"').endswith(message)


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan"])
def test_a_number_of_keys_that_no_class_names_is_finite(number):
    """JSON has no other, so the environments of workers would get nothing in its place."""
    got = float(number.replace(".", ""))
    assert refusal(f"env.kwargs.limit={number}") == f"config: env.kwargs.limit: expected a finite number, got {got}"
    assert refusal(f"env.kwargs.bounds=[0, {{high: {number}}}]").startswith(
        "config: env.kwargs.bounds: expected a finite"
    )


def test_what_workers_get_is_what_was_parsed():
    config = run("env.kwargs={day: 2026-11-28, 1: x}")
    assert config.env.kwargs == {"day": "2026-11-28", "1": "x"}
    assert parse_config(RunConfig, config.as_given()) == config


def test_a_key_given_twice_has_its_line(tmp_path):
    path = tmp_path / "c.yaml"
    assert file_refusal(path, "name: a\nenv: {id: x}\nname: b\n") == (
        f"{path}, line 3: not valid YAML: key 'name' is given twice"
    )
    assert "key 'id' is given twice" in file_refusal(path, "name: a\nenv:\n  id: x\n  id: y\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}),
        ("a: &a {x: 1}\nb: &b {x: 2, y: 3}\nc: {x: 4, <<: [*a, *b]}", {"c": {"x": 4, "y": 3}}),
        # A mapping that merges is itself merged, above and below the place where it stands.
        (
            "a: &a {x: 1}\nb:\n  in: &b {<<: *a, x: 2}\nc: {<<: *b, z: 3}",
            {"b": {"in": {"x": 2}}, "c": {"x": 2, "z": 3}},
        ),
        ("a: {=: 1}\nb: <<\nc: =", {"a": {"=": 1}, "b": "<<", "c": "="}),
    ],
)
def test_a_merge_key_gives_a_mapping_the_keys_of_others_below_its_own(tmp_path, text, expected):
    (tmp_path / "c.yaml").write_text(text)
    data = read_yaml(tmp_path / "c.yaml")
    assert {key: data[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a {x: 1}\nb:\n  <<: *a\n  y: 1\n  y: 2", ", line 5: not valid YAML: key 'y' is given twice"),
        ("a: &a {x: 1}\nb:\n  <<: *a\n  <<: *a", ", line 4: not valid YAML: key '<<' is given twice"),
        (
            "b:\n  <<: 3",
            ", line 2: not valid YAML: expected a mapping or list of mappings for merging, but found scalar",
        ),
        ("? [a, b]\n: 1", ", line 1: not valid YAML: found unhashable key"),
    ],
)
def test_a_mapping_that_merges_is_refused_as_others_are(tmp_path, text, message):
    assert file_refusal(tmp_path / "c.yaml", text) == f"{tmp_path / 'c.yaml'}{message}"


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


def test_a_python_file_is_no_config():
    with pytest.raises(MarlRayError, match=r"^config file 'relay.py': expected a YAML file, got a Python file$"):
        load_config(RunConfig, "relay.py")


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
