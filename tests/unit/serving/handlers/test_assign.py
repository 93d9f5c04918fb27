"""An arm alone, for clients that compute actions themselves."""

import re
from typing import Any

import pytest
from toy_serving.gateways import act, gateway_config, make_bundle, serving
from waiting import until_async

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.config.serving.arms import max_replicas
from marl_ray.errors import MarlRayError
from marl_ray.serving.scaling import scaling


async def test_an_arm_is_told_with_its_bundle_and_its_outcome_counts(config, bundles):
    async with serving(config) as (client, _):
        answers = [(await client.post("/v1/assign", json={"session_id": f"s{k}"})).json() for k in range(20)]
        arms = [(await act(client, f"s{k}"))["arm"] for k in range(20)]
        outcome_status = (await client.post("/v1/outcomes", json={"session_id": "s0", "value": 1.0})).status_code
        report = (await client.get("/v1/experiments/exp")).json()
    assert [answer["arm"] for answer in answers] == arms and set(arms) == {"one", "four"}
    for answer in answers:
        assert answer["bundle"] == bundles[answer["arm"]] and answer["digest"].startswith(
            answer["bundle"].rpartition("/")[2]
        )
        assert answer["exposed"] is True and answer["propensity"] == 0.5
    assert outcome_status == 200
    assert sum(arm["exposures"] for arm in report["arms"].values()) == 20


async def test_who_only_asks_is_no_unit(config):
    async with serving(config) as (client, _):
        first = (await client.post("/v1/assign", json={"session_id": "s", "expose": False})).json()
        outcome_status = (await client.post("/v1/outcomes", json={"session_id": "s", "value": 1.0})).status_code
        arm = (await act(client, "s"))["arm"]
    assert (first["exposed"], outcome_status, first["arm"]) == (False, 404, arm)


async def test_bad_questions_are_named(config):
    async with serving(config) as (client, _):
        bodies = [{}, {"session_id": "s", "expose": "no"}, {"session_id": "s", "observations": {}}]
        bodies += [{"session_id": "s", "experiment": "none"}]
        answers = [await client.post("/v1/assign", json=body) for body in bodies]
        messages = [(answer.status_code, answer.json()["error"]["field"]) for answer in answers]
    assert messages == [(400, "session_id"), (400, "expose"), (400, "observations"), (404, "experiment")]


async def test_a_bundle_that_one_replica_loads_ahead_all_load(bundles, tmp_path, monkeypatch):
    config = gateway_config(bundles, tmp_path / "x.db")
    extra = make_bundle(tmp_path, 2)

    async with serving(config) as (_, first), serving(config) as (client, second):
        first.service.notices.preload(extra, 4e9)  # as `POST /models/{version}/load` does
        await until_async(
            lambda: extra in first.service.live_experiments.models and extra in second.service.live_experiments.models,
            "both replicas to load the bundle",
        )
        listed = (await client.get("/v1/models")).json()["models"]
        assert extra in {model["bundle"] for model in listed}


def test_replicas_are_a_number_or_a_range():
    def bounds_of(replicas: Any) -> Any:
        return parse_config(GatewayConfig, {"replicas": replicas}).replicas

    assert scaling(bounds_of(3), 16.0) == {"num_replicas": 3}
    ranged = scaling(bounds_of([1, 8]), 16.0)["autoscaling_config"]
    assert (ranged["min_replicas"], ranged["max_replicas"], ranged["target_ongoing_requests"]) == (1, 8, 16.0)
    assert (max_replicas(bounds_of(3)), max_replicas(bounds_of([1, 8]))) == (3, 8)
    for wrong in ([8, 1], [0, 2], [1, 2, 3], 0, "many"):
        with pytest.raises(MarlRayError, match=re.escape("replicas")):
            bounds_of(wrong)
