"""Answers to a person who deploys by hand: of a rolled-back bundle, of misspelt names, and while nothing is judged."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from toy_serving.gateways import SEES, bearer, gateway_config, write_keys
from toy_serving.sites import Site, running
from typer.testing import CliRunner

from marl_ray.cli.main import app
from marl_ray.serving.asgi import Gateway


@pytest.fixture
def gateway(bundles: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A gateway with the experiment `exp` of the arms `one`, the control, and `four`."""
    monkeypatch.setenv("MARL_RAY_API_KEY", "ops")
    keys = write_keys(tmp_path / "keys.yaml", ops=("admin", "inference", "outcomes"))
    with running(Gateway(gateway_config(bundles, tmp_path / "x.db", api_keys=keys), seed=0)) as site:
        monkeypatch.setenv("MARL_RAY_GATEWAY", site.url)
        yield site


def output_of(*arguments: str, status: int = 0) -> str:
    """The output of a command, or its error."""
    result = CliRunner().invoke(app, list(arguments))
    assert (2 if result.exception else 0) == status, result.output
    return str(result.exception) if status else result.output


def test_a_rolled_back_bundle_is_deployed_with_the_flag_that_the_refusal_names(gateway, bundles):
    output_of("experiment", "rollback", "exp", "--arm", "four", "--reason", "r")
    assert "rolled_back" in output_of("experiment", "status", "exp")
    deploy = ("deploy", bundles["four"], "--endpoint", "exp", "--strategy", "ab")
    refusal = output_of(*deploy, status=2)
    assert refusal.endswith("or allow_rolled_back: true (marl-ray deploy --allow-rolled-back)")
    output_of(*deploy, "--allow-rolled-back")
    assert "allow_rolled_back candidate" in output_of("experiment", "audit", "exp-2")


def test_the_flag_also_keeps_a_production_whose_weights_were_rolled_back_as_another_arm(gateway, bundles):
    output_of("experiment", "stop", "exp", "--reason", "r")
    shown = output_of("deploy", bundles["one"], "--endpoint", "exp", "--strategy", "ab")
    assert "warning: Arms production, candidate have the same weights: " in shown
    output_of("experiment", "rollback", "exp-2", "--arm", "candidate", "--reason", "r")
    deploy = ("deploy", bundles["four"], "--endpoint", "exp", "--strategy", "ab")
    assert "arms.production: the weights of bundle" in output_of(*deploy, status=2)
    assert "exp-3: running" in output_of(*deploy, "--allow-rolled-back")
    assert "allow_rolled_back production" in output_of("experiment", "audit", "exp-3")


def test_misspelt_names_are_answered_with_those_that_are_close(gateway, bundles):
    output_of("experiment", "stop", "exp", "--reason", "r")
    refusal = output_of("deploy", bundles["four"], "--endpoint", "exp", "--set", "outcome_windw_s=10", status=2)
    assert "400: outcome_windw_s: unknown field; did you mean outcome_window_s or" in refusal
    refusal = output_of("experiment", "rollback", "exp", "--arm", "fuor", "--reason", "r", status=2)
    assert refusal.endswith("400: arm: 'fuor' is unknown; did you mean four?")


def test_a_bundle_that_is_missing_is_named_before_anything_changes(gateway, bundles):
    assert "/none' has no readable bundle.json" in output_of("deploy", "/none", "--endpoint", "exp", status=2)
    output_of("deploy", bundles["one"], "--endpoint", "single")
    for wrong in (("/none",), (bundles["four"], "--set", "outcome_window_s=-1")):
        output_of("deploy", *wrong, "--endpoint", "single", status=2)
        assert "single: running" in output_of("experiment", "status", "single")
    assert "single-2: running" in output_of("deploy", bundles["four"], "--endpoint", "single")
    assert "single: stopped" in output_of("experiment", "status", "single")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("stages=[0.1", "override 'stages=[0.1', line 1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("since=2026-13-01", "override 'since=2026-13-01', line 1: not valid YAML: month must be in 1..12"),
        ("alpha", "override 'alpha': expected dotted.key=value"),
    ],
)
def test_settings_that_cannot_be_read_are_refused_before_the_gateway_is_asked(setting, expected):
    assert output_of("deploy", "b", "--set", setting, "--url", "http://127.0.0.1:9", status=2) == expected


def test_settings_are_read_as_in_a_config(gateway, bundles):
    output_of("experiment", "stop", "exp", "--reason", "r")
    settings = ("--margin", "1e-3", "--set", "breaker.open_s=2e+1", "--set", "missing=-1e-3")
    report = json.loads(output_of("deploy", bundles["four"], "--endpoint", "exp", *settings, "--json"))
    config = report["config"]
    assert (config["margin"], config["breaker"]["open_s"], config["missing"]) == (0.001, 20.0, -0.001)


def test_status_says_when_units_are_judged_while_none_is(gateway):
    line = "no unit is judged yet: each is judged when its window of 600 s is over (outcome_window_s)"
    assert line not in output_of("experiment", "status", "exp")
    sent = {"experiment": "exp", "session_id": "s", "observations": SEES}
    assert httpx.post(f"{gateway.url}/v1/act", json=sent, headers=bearer("ops"), timeout=60).status_code == 200
    assert line in output_of("experiment", "status", "exp")
