"""The gateway under the experiment engine: rollback by itself, stages, people's changes, keys, layers, no database."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from toy_serving.gateways import SEES, act, bearer, gateway_config, serving, windows_end, write_keys
from waiting import until_async

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.lifecycle import ExperimentStatus
from marl_ray.experiments.store.experiments import ExperimentStore
from marl_ray.experiments.store.units import UnitStore
from marl_ray.serving.ramp_decisions.ramp_control import decide
from marl_ray.serving.store_poll import store_follower

ADMIN, PLAYER = "ops", "game"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return write_keys(tmp_path / "keys.yaml", ops=("admin", "inference", "outcomes"), game=("inference", "outcomes"))


def ramp_config(
    bundles: dict[str, str], folder: Path, gateway: dict[str, Any] | None = None, **more: Any
) -> GatewayConfig:
    experiment = {
        "name": "exp",
        "arms": {arm: {"bundle": bundles[arm]} for arm in ("one", "four")},
        "strategy": "gradual",
        "stages": [0.5, 1.0],
        "min_exposures": 5,
        "min_duration_s": 0.0,
        "min_outcomes": 20,
        "margin": 0.1,
    }
    data = {
        "experiments": [experiment | more],
        "database": f"sqlite:///{folder}/experiments.db",
        "spool": f"{folder}/spool",
    }
    return parse_config(GatewayConfig, data | (gateway or {}))


async def play(client, names: list[str], value, *apps) -> dict[str, str]:
    """Sessions that act once and post `value(arm, number)`, and are judged at once in the apps; session -> arm."""
    arms = {}
    for number, name in enumerate(names):
        arms[name] = (await act(client, name))["arm"]
        await client.post("/v1/outcomes", json={"session_id": name, "value": value(arms[name], number)})
    if apps:
        windows_end(*apps)
    return arms


@pytest.mark.parametrize("on_rollback", ["drain", "cut"])
def test_a_bad_arm_is_rolled_back_by_itself_for_good(bundles, tmp_path, on_rollback):
    config = ramp_config(bundles, tmp_path, on_rollback=on_rollback, min_exposures=10_000)

    async def body():
        async with serving(config) as (client, app):
            router = app.service.endpoints.routers["exp"]
            arms = await play(client, [f"s{k}" for k in range(120)], lambda arm, k: k % 3 - 5 * (arm == "four"), app)
            await until_async(lambda: "four" in router.rules.state.rolled_back, "the rollback")
            assert router.rules.state.status is ExperimentStatus.ROLLED_BACK
            later = await play(client, [f"t{k}" for k in range(40)], lambda arm, k: 0)
            assert set(later.values()) == {"one"}
            old = next(name for name, arm in arms.items() if arm == "four")
            again = (await act(client, old))["arm"]
            audit = (await client.get("/v1/experiments/exp/audit")).json()["audit"]
            report = (await client.get("/v1/experiments/exp")).json()
        return again, audit, report

    again, audit, report = asyncio.run(body())
    assert again == {"drain": "four", "cut": "one"}[on_rollback]
    assert [entry["action"] for entry in audit] == ["open", "rollback"]
    assert audit[1]["actor"] == "gateway" and audit[1]["reason"] == "harm proven by outcome"
    assert report["status"] == "rolled_back" and report["arms"]["four"]["rolled_back"]

    async def restarted():
        async with serving(config) as (client, _):
            return set((await play(client, [f"u{k}" for k in range(40)], lambda arm, k: 0)).values())

    assert asyncio.run(restarted()) == {"one"}


async def test_a_good_arm_climbs_its_stages_and_is_promoted(bundles, tmp_path):
    config = ramp_config(bundles, tmp_path)

    async with serving(config) as (client, app):
        router = app.service.endpoints.routers["exp"]
        assert router.rules.state.weights == {"one": 0.5, "four": 0.5}
        for batch in range(60):
            names = [f"s{batch}-{k}" for k in range(20)]
            await play(client, names, lambda arm, k: k % 3 + 4 * (arm == "four"), app)
            app.service.follower.decide()
            app.service.follower.poll()
            if router.rules.state.status is ExperimentStatus.PROMOTED:
                break
        assert router.rules.state.status is ExperimentStatus.PROMOTED and router.rules.state.weights == {
            "one": 0.0,
            "four": 1.0,
        }
        assert [entry["action"] for entry in (await client.get("/v1/experiments/exp/audit")).json()["audit"]] == [
            "open",
            "next_stage",
            "promote",
        ]


async def test_guardrails_of_named_metrics_roll_back(bundles, tmp_path):
    config = ramp_config(bundles, tmp_path, guardrails=[{"name": "cost", "margin": 0.1}], min_exposures=10_000)

    async with serving(config) as (client, app):
        for k in range(160):
            arm = (await act(client, f"s{k}"))["arm"]
            sent = {"session_id": f"s{k}", "value": k % 2, "metrics": {"cost": k % 3 + 3.0 * (arm == "four")}}
            assert (await client.post("/v1/outcomes", json=sent)).status_code == 200
        windows_end(app)
        await until_async(
            lambda: "four" in app.service.endpoints.routers["exp"].rules.state.rolled_back, "the rollback"
        )
        assert (await client.get("/v1/experiments/exp/audit")).json()["audit"][-1]["reason"] == "harm proven by cost"


async def test_an_ab_test_is_promoted_by_hand_only(bundles, tmp_path):
    config = ramp_config(bundles, tmp_path, strategy="ab")

    async with serving(config) as (client, app):
        await play(client, [f"s{k}" for k in range(200)], lambda arm, k: k % 3 + 4 * (arm == "four"), app)
        decision = decide(
            app.service.stores.experiments, app.service.stores.evidence, app.service.endpoints.routers["exp"].config
        )
        app.service.follower.poll()
        assert (decision.step.value, app.service.endpoints.routers["exp"].rules.state.status) == (
            "promote",
            ExperimentStatus.RUNNING,
        )


async def test_people_change_experiments_with_an_admin_key_only(bundles, tmp_path, keys):
    config = ramp_config(bundles, tmp_path, {"api_keys": keys}, min_exposures=10_000)

    async with serving(config) as (client, _):

        async def change(action: str, secret: str | None = ADMIN, **sent: Any):
            headers = {"authorization": f"Bearer {secret}"} if secret else {}
            return await client.post(f"/v1/experiments/exp/{action}", json=sent, headers=headers)

        refused = [
            (await change("pause", None, reason="x")).status_code,
            (await change("pause", "guess", reason="x")).status_code,
            (await change("pause", PLAYER, reason="x")).status_code,
            (await change("pause")).status_code,
            (await change("pause", reason="x", epoch=7)).status_code,
            (await change("resume", reason="x")).status_code,
            (await change("rollback", reason="x", arm="none")).status_code,
            (await client.post("/v1/act", json={"session_id": "s", "observations": SEES})).status_code,
        ]
        paused = (await change("pause", reason="a look")).json()
        resumed = (await change("resume", reason="all is well")).json()
        acted = await client.post(
            "/v1/act",
            json={"session_id": "s", "observations": SEES},
            headers={"authorization": f"Bearer {PLAYER}"},
        )
        forced = [
            await client.post(
                "/v1/act",
                json={"session_id": "tester", "observations": SEES},
                headers={"authorization": f"Bearer {secret}", "x-arm": "four"},
            )
            for secret in (ADMIN, PLAYER)
        ]
        rolled = (await change("rollback", reason="a person saw it", arm="four")).json()
        unread = [(await client.get("/v1/experiments/exp/audit", headers=h)).status_code for h in ({}, bearer(PLAYER))]
        assert unread == [401, 403]
        audit = (await client.get("/v1/experiments/exp/audit", headers=bearer(ADMIN))).json()["audit"]
    assert refused == [401, 401, 403, 400, 409, 409, 400, 401]
    assert (paused["status"], resumed["status"], rolled["status"]) == ("paused", "running", "rolled_back")
    assert acted.status_code == 200
    assert [answer.status_code for answer in forced] == [200, 403] and forced[0].json()["arm"] == "four"
    assert [(entry["actor"], entry["reason"]) for entry in audit[1:]] == [
        ("ops", "a look"),
        ("ops", "all is well"),
        ("ops", "a person saw it"),
    ]


async def test_nobody_changes_an_experiment_where_there_are_no_keys(bundles, tmp_path):
    async with serving(ramp_config(bundles, tmp_path)) as (client, _):
        answer = await client.post("/v1/experiments/exp/stop", json={"reason": "x"})
    assert answer.status_code == 403 and "api_keys" in answer.json()["error"]["message"]


async def test_units_outside_the_layer_share_are_with_the_control_and_not_counted(bundles, tmp_path):
    config = ramp_config(bundles, tmp_path, layer="players", layer_share=[0.0, 0.5], stages=[1.0])

    async with serving(config) as (client, app):
        arms = [(await act(client, f"s{k}"))["arm"] for k in range(60)]
        app.service.exposures.flush()
        summary = app.service.stores.evidence.summary("exp")
    assert set(summary) == {"four"} and summary["four"].exposures == arms.count("four")
    assert 10 < arms.count("one") < 50


async def test_another_replica_follows_by_itself(bundles, tmp_path):
    config = ramp_config(bundles, tmp_path, min_exposures=10_000)

    async with serving(config) as (_, first), serving(config) as (client, second):
        names = [f"s{k}" for k in range(120)]
        await play(client, names, lambda arm, k: k % 3 - 5 * (arm == "four"), first, second)
        await until_async(
            lambda: all(
                "four" in app.service.endpoints.routers["exp"].rules.state.rolled_back for app in (first, second)
            ),
            "both replicas to roll back",
        )
    assert store_follower.POLL_S < 1.0  # a replica asks the store several times a second


async def test_without_its_database_a_gateway_goes_on_with_the_last_weights(bundles, tmp_path, monkeypatch):
    config = gateway_config(bundles, tmp_path / "experiments.db")

    async with serving(config) as (client, app):
        router = app.service.endpoints.routers["exp"]

        def away(*_: Any) -> None:
            raise StoreError("experiment store: away")

        with monkeypatch.context() as patch:
            for name in ("states", "read"):
                patch.setattr(ExperimentStore, name, away)
            for name in ("assignments", "record_exposures"):
                patch.setattr(UnitStore, name, away)
            with pytest.raises(MarlRayError):
                app.service.follower.poll()
            await asyncio.sleep(3 * store_follower.POLL_S)
            arms = {f"s{k}": (await act(client, f"s{k}"))["arm"] for k in range(20)}
        app.service.exposures.flush()
        assert {name: app.service.stores.units.assignment("exp", name).arm for name in arms} == arms
        assert router.rules.state.status is ExperimentStatus.RUNNING


def test_a_file_of_keys_is_checked(tmp_path, bundles):
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, sha256: short, scopes: [admin]}]")
    with pytest.raises(MarlRayError, match=r"api_keys: .*keys\.0\.sha256") as caught:
        asyncio.run(serving(ramp_config(bundles, tmp_path, {"api_keys": str(path)})).__aenter__())
    assert "\n" not in str(caught.value)
