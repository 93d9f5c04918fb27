"""Serve configs are read strictly: each bad one here is a small change to a good one."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from marl_ray.cli.serving.gateways import lint
from marl_ray.cluster.lint.documents import embedded_serve_config, read_documents
from marl_ray.errors import MarlRayError
from marl_ray.serving.administration.lint import lint_serve_config, read_serve_config

ROOT = Path(__file__).parents[4]
APP, DEPLOYMENT, ARGS = "applications.0", "applications.0.deployments.0", "applications.0.args"
GOOD: dict[str, Any] = {
    "proxy_location": "EveryNode",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "grpc_options": {"port": 9000},
    "controller_options": {"runtime_env": {"env_vars": {"A": "b"}}},
    "logging_config": {"encoding": "JSON"},
    "tracing_config": {"enabled": False},
    "applications": [
        {
            "name": "gateway",
            "import_path": "marl_ray.serving.app:build",
            "logging_config": {"log_level": "INFO"},
            "runtime_env": {"env_vars": {"A": "b"}, "pip": ["x"], "config": {"setup_timeout_seconds": 60}},
            "args": {
                "replicas": 2,
                "database": "sqlite:///runs/experiments.db",
                "cache": {"url": "redis://cache:6379/0"},
                "rate_limit": {"per_s": 10},
                "experiments": [
                    {
                        "name": "e",
                        "arms": {"a": {"bundle": "a"}, "b": {"bundle": "b"}},
                        "guardrails": [{"name": "error"}],
                        "breaker": {"failures": 3},
                    }
                ],
            },
            "deployments": [
                {
                    "name": "Gateway",
                    "max_ongoing_requests": 500,
                    "ray_actor_options": {"num_cpus": 1, "runtime_env": {"env_vars": {"A": "b"}}},
                    "autoscaling_config": {"min_replicas": 2, "max_replicas": 4, "policy": {"policy_kwargs": {}}},
                    "backpressure_config": {"status_code": 429},
                    "request_router_config": {"initial_backoff_s": 0.1},
                    "logging_config": {"log_level": "INFO"},
                },
                {"name": "other", "gang_scheduling_config": {"gang_size": 2}},
                {"name": "third", "deployment_actors": [{"name": "x", "actor_class": "a:B"}]},
            ],
        }
    ],
}
MODELS = [
    "",
    "http_options",
    "grpc_options",
    "controller_options",
    "logging_config",
    "tracing_config",
    APP,
    f"{APP}.logging_config",
    f"{APP}.runtime_env",
    f"{APP}.runtime_env.config",
    ARGS,
    f"{ARGS}.cache",
    f"{ARGS}.rate_limit",
    f"{ARGS}.experiments.0",
    f"{ARGS}.experiments.0.arms.a",
    f"{ARGS}.experiments.0.guardrails.0",
    f"{ARGS}.experiments.0.breaker",
    DEPLOYMENT,
    f"{DEPLOYMENT}.ray_actor_options",
    f"{DEPLOYMENT}.ray_actor_options.runtime_env",
    f"{DEPLOYMENT}.autoscaling_config",
    f"{DEPLOYMENT}.autoscaling_config.policy",
    f"{DEPLOYMENT}.backpressure_config",
    f"{DEPLOYMENT}.request_router_config",
    f"{DEPLOYMENT}.logging_config",
    f"{APP}.deployments.1.gang_scheduling_config",
    f"{APP}.deployments.2.deployment_actors.0",
]


def change_config(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one value set, at a dotted path."""
    data = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    node: Any = data
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    node[int(last) if isinstance(node, list) else last] = value
    return data


def test_a_good_config_has_no_finding_and_is_left_as_it_was():
    data = copy.deepcopy(GOOD)
    assert lint_serve_config(data, "f.yaml") == []
    assert data == GOOD
    assert read_serve_config(data) == GOOD


def test_a_variable_that_names_another_of_the_machine_is_no_secret():
    secrets = {"PGPASSWORD": "${DB_PASSWORD}", "BROKER": "amqp://user:${BROKER_PASSWORD}@host", "API_KEY": ""}
    assert lint_serve_config(change_config(f"{APP}.runtime_env.env_vars", secrets), "f.yaml") == []
    for plain in ("x${DB_PASSWORD}", "$(DB_PASSWORD)", "$ecret"):
        (finding,) = lint_serve_config(change_config(f"{APP}.runtime_env.env_vars", {"PGPASSWORD": plain}), "f.yaml")
        assert "env_vars.PGPASSWORD: expected no secret here" in finding


@pytest.mark.parametrize("where", MODELS)
def test_an_unknown_key_is_found_at_every_depth(where):
    path = f"{where}.bogus_key".lstrip(".")
    assert lint_serve_config(change_config(path, 1), "f.yaml") == [f"f.yaml: {path}: unknown key"]


@pytest.mark.parametrize(
    ("path", "value", "finding"),
    [
        ("http_option", {}, "http_option: unknown key, did you mean 'http_options'?"),
        ("http_options.hosst", "x", "http_options.hosst: unknown key, did you mean 'host'?"),
        (f"{APP}.arg", {}, f"{APP}.arg: unknown key, did you mean 'args'?"),
        (f"{DEPLOYMENT}.replicas", 2, f"{DEPLOYMENT}.replicas: unknown key, did you mean 'num_replicas'?"),
        (f"{DEPLOYMENT}.traffic_to_replica_group", {"a": 1}, f"{DEPLOYMENT}.traffic_to_replica_group: unknown key"),
        (f"{DEPLOYMENT}.autoscaling_config.min_replica", 1, "min_replica: unknown key, did you mean 'min_replicas'?"),
        (f"{APP}.runtime_env.env_var", {}, f"{APP}.runtime_env.env_var: unknown key, did you mean 'env_vars'?"),
        (f"{ARGS}.experiments.0.arms.a.wieght", 1, "arms.a.wieght: unknown key, did you mean 'weight'?"),
        ("http_options.port", 70_000, "http_options.port: expected a port from 1 to 65535, got 70000"),
        ("http_options.port", "eighty", "http_options.port: expected a whole number"),
        (f"{APP}.import_path", 1, f"{APP}.import_path: expected text"),
        (f"{APP}.import_path", "x", f'{APP}.import_path: Got invalid import path "x"'),
        (
            f"{DEPLOYMENT}.autoscaling_config.max_replicas",
            "many",
            f"{DEPLOYMENT}.autoscaling_config.max_replicas: expected a whole number",
        ),
        (f"{DEPLOYMENT}.max_surge_percent", 101, f"{DEPLOYMENT}.max_surge_percent: expected a number of at most"),
        (
            f"{APP}.deployments.2.deployment_actors",
            [{"name": "x"}],
            "2.deployment_actors.0.actor_class: missing",
        ),
        (f"{ARGS}.experiments.0.strategy", "gradaul", "experiments.0.strategy: expected 'ab', 'gradual', "),
        (f"{ARGS}.experiments.0.strategy", "gradaul", "or 'thompson'; did you mean gradual?"),
        (f"{ARGS}.replicas", 0, f"{ARGS}.replicas: expected a number greater than 0"),
        (f"{ARGS}.experiments.0.arms.a", {}, f"{ARGS}.experiments.0.arms.a: expected either bundle or url"),
        (f"{ARGS}.experiments.0.layer_share", [0.5, 0.6], f"{ARGS}.experiments.0: layer_share: needs a layer"),
        (f"{ARGS}.database", "postgresql://u:pw@db/x", f"{ARGS}.database: expected no password here"),
        (f"{ARGS}.database", "postgresql://u:$(PGPASSWORD)@db/x", f"{ARGS}.database: expected no password here"),
        (f"{ARGS}.cache", {"url": "redis://:pw@c:6379/0"}, f"{ARGS}.cache.url: expected no password here"),
        (
            f"{APP}.runtime_env.env_vars.PGPASSWORD",
            "x",
            f"{APP}.runtime_env.env_vars.PGPASSWORD: expected no secret here",
        ),
        (
            f"{DEPLOYMENT}.max_ongoing_requests",
            5,
            f"{DEPLOYMENT}.max_ongoing_requests: expected at least max_batch (64)",
        ),
        (f"{APP}.deployments.1.num_replicas", 2, f"{APP}.deployments.1.num_replicas: expected the replicas in `args`"),
        (
            f"{DEPLOYMENT}.user_config",
            {"weights": {"a": 1}},
            f"{DEPLOYMENT}.user_config: expected none: weights, stages",
        ),
        (f"{ARGS}.replicas", 1, f"{DEPLOYMENT}.autoscaling_config: expected `replicas` in `args` of 2 at least"),
        ("http_options.host", "0.0.0.0", f"http_options.host: expected 127.0.0.1 or {ARGS}.api_keys"),
        ("http_options", {}, f"http_options.host: expected 127.0.0.1 or {ARGS}.api_keys"),
        ("applications", None, "applications: expected a list"),
    ],
)
def test_a_mistake_is_one_line_with_its_path(path, value, finding):
    findings = lint_serve_config(change_config(path, value), "f.yaml")
    assert len(findings) == 1
    assert findings[0].startswith("f.yaml: ")
    assert finding in findings[0]
    assert "\n" not in findings[0]


def test_all_mistakes_are_told_at_once():
    data = change_config("http_options.prot", 1)
    data["applications"][0]["args"] |= {"replica": 3, "max_batch": 0}
    data["applications"][0]["deployments"][0]["num_cpus"] = 1
    assert [finding.split(": ")[1] for finding in lint_serve_config(data, "f.yaml")] == [
        "http_options.prot",
        f"{DEPLOYMENT}.num_cpus",
        f"{ARGS}.replica",
        f"{ARGS}.max_batch",
    ]
    with pytest.raises(MarlRayError, match=r"^serve config: http_options\.prot: unknown key.*\(and 3 more\)$"):
        read_serve_config(data)


@pytest.mark.parametrize(
    ("data", "finding"),
    [
        ([], "f.yaml: expected a mapping of keys at the top, got list"),
        (None, "f.yaml: expected a mapping of keys at the top, got nothing"),
        ({}, "f.yaml: applications: missing"),
        ({"applications": [1]}, "f.yaml: applications.0: expected a mapping of keys"),
        ({"applications": {1, 2}}, "f.yaml: expected plain data: "),
    ],
)
def test_what_is_no_config_is_one_finding(data, finding):
    (line,) = lint_serve_config(data, "f.yaml")
    assert line.startswith(finding)


def test_a_yaml_alias_of_itself_is_a_finding():
    (line,) = lint_serve_config(yaml.safe_load("applications: &a [*a]"), "f.yaml")
    assert line.startswith("f.yaml: expected plain data: ")


@pytest.mark.parametrize(
    ("path", "value", "finding"),
    [
        (f"{ARGS}.database", "sqlite:///x.db", f"spec.serveConfigV2.{ARGS}.database: expected PostgreSQL"),
        ("http_options.host", "127.0.0.1", "spec.serveConfigV2.http_options.host: expected 0.0.0.0, got '127.0.0.1'"),
        ("proxy_location", "HeadOnly", "spec.serveConfigV2.proxy_location: expected EveryNode, got 'HeadOnly'"),
    ],
)
def test_in_a_pod_other_things_are_wrong(path, value, finding):
    def findings(data):
        return lint_serve_config(data, "f.yaml", where="spec.serveConfigV2.", pods=2)

    good = json.loads(json.dumps(change_config("http_options.host", "0.0.0.0")))
    good["applications"][0]["args"] |= {"database": "postgresql://", "api_keys": "/etc/keys.yaml"}
    assert findings(good) == []
    *parents, last = path.split(".")
    node = good
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[last] = value
    assert [line.removeprefix("f.yaml: ")[: len(finding)] for line in findings(good)] == [finding]


@pytest.mark.parametrize("path", sorted((ROOT / "serve" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_in_the_repository_are_good(path):
    assert lint_serve_config(read_serve_config(path), path.name) == []


def test_kubernetes_runs_the_same_application_as_other_clusters():
    manifest = read_documents(ROOT / "cluster" / "kuberay" / "rayservice.yaml")[0]
    assert embedded_serve_config(manifest) == read_serve_config(ROOT / "serve" / "configs" / "production.yaml")


def test_a_missing_file_is_named():
    with pytest.raises(MarlRayError, match=r"none\.yaml.*cannot be read"):
        read_serve_config(ROOT / "none.yaml")


@pytest.mark.parametrize(("count", "line"), [(1, "1 file, no findings\n"), (2, "2 files, no findings\n")])
def test_files_without_findings_are_counted(count, line, capsys):
    lint([ROOT / "serve/configs/gridworld.yaml"] * count)
    assert capsys.readouterr().out == line
