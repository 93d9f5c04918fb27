"""Readers of a gateway: keys, limits and pages of other sites; and the gateway's description of itself."""

import asyncio
import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from toy_serving.gateways import SEES, act, bearer, gateway_config, make_bundle, serving, with_gateway, write_keys

from marl_ray import __version__
from marl_ray.config import GatewayConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import Action
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.http import admission

READ = (
    "/v1/experiments",
    "/v1/experiments/exp",
    "/v1/experiments/exp/audit",
    "/v1/experiments/exp/curves",
    "/v1/endpoints",
    "/ui",
    "/ui/experiments/exp",
    "/ui/experiments/exp/live",
)
OPEN = ("/health", "/ready", "/metrics", "/openapi.json", "/docs", "/ui/style.css")


@pytest.fixture
def keyed(bundles, tmp_path: Path) -> GatewayConfig:
    keys = write_keys(tmp_path / "keys.yaml", ops=("admin",), eye=("read",), game=("inference", "outcomes"))
    return gateway_config(bundles, tmp_path / "experiments.db", api_keys=keys)


def basic(secret: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"any:{secret}".encode()).decode()}


async def test_reading_needs_the_scope_read_which_admin_holds(keyed):
    async with serving(keyed) as (client, _):
        shown = {"none": {}, "wrong": bearer("x"), "game": bearer("game"), "eye": bearer("eye"), "ops": bearer("ops")}
        shown |= {"browser": basic("eye"), "odd": {"authorization": "Basic !!"}}
        statuses = {key: [(await client.get(path, headers=h)).status_code for path in READ] for key, h in shown.items()}
    for holder, status in {
        "none": 401,
        "wrong": 401,
        "odd": 401,
        "game": 403,
        "eye": 200,
        "ops": 200,
        "browser": 200,
    }.items():
        assert set(statuses[holder]) == {status}, holder


async def test_models_are_for_players_too_and_some_paths_for_anybody(keyed):
    async with serving(keyed) as (client, _):
        requests = [("/v1/models", bearer("game")), ("/v1/models", bearer("eye")), *((path, {}) for path in OPEN)]
        assert {(await client.get(path, headers=headers)).status_code for path, headers in requests} == {200}


async def test_what_a_browser_sends_by_itself_opens_reading_alone(keyed):
    async with serving(keyed) as (client, _):
        page = await client.get("/ui")
        play = await client.post("/v1/act", json={"session_id": "s", "observations": SEES}, headers=basic("game"))
        stop = await client.post("/v1/experiments/exp/stop", json={"reason": "r"}, headers=basic("ops"))
        form = await client.post("/ui/experiments/exp/stop", data={"reason": "r"}, headers=basic("ops"))
        blind = await client.post("/ui/experiments/exp/stop", data={"reason": "r", "key": "game"})
    assert page.status_code == 401 and page.headers["www-authenticate"].startswith("Basic realm=")
    assert (play.status_code, stop.status_code) == (401, 401)
    assert form.status_code == 401 and "admin key" in form.text  # who may read sees the page again
    assert blind.status_code == 403 and "<html" not in blind.text


async def test_readers_have_a_limit_of_their_own_and_are_refused_slowly(bundles, tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "REFUSAL_S", 0.05)
    config = gateway_config(bundles, tmp_path / "x.db", read_limit={"per_s": 0.1, "burst": 3})

    async with serving(config) as (client, _):
        loop = asyncio.get_running_loop()
        codes = [(await client.get("/v1/experiments")).status_code for _ in range(3)]
        begin = loop.time()
        refused = await client.get("/v1/experiments/exp")
        took = loop.time() - begin
        acts = len([await act(client, f"s{k}") for k in range(20)])
    assert codes == [200] * 3 and refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert took >= 0.05 and acts == 20


async def test_a_replica_is_ready_when_what_takes_traffic_is_loaded(bundles, tmp_path):
    async with serving(gateway_config(bundles, tmp_path / "x.db")) as (client, app):
        ready, health = await client.get("/ready"), await client.get("/health")
        router = app.service.endpoints.routers["exp"]
        arm = router.arms["one"]
        app.service.follower.close()
        app.service.endpoints.drop_arms(router, {"one"})
        lacking = await client.get("/ready")  # the control is still to come
        app.service.endpoints.drop_arms(router, {"four"})
        app.service.endpoints.add_arms(router, {"one": arm})
        app.service.follower.arm_loader.missing["exp"] = {"four": "its bundle is gone"}
        degraded = await client.get("/ready")
    state = ready.json()
    assert (ready.status_code, state["ready"], state["missing"]) == (200, True, [])
    assert state["arms"] == {"exp": {"one": "loaded", "four": "loaded"}}
    assert state["version"] == __version__ and state["device"] and state["uptime_s"] >= 0 and state["since"] > 1e9
    assert health.json()["status"] == "ok"
    assert (lacking.status_code, lacking.json()["ready"], lacking.json()["missing"]) == (503, False, ["exp/one"])
    # The control answers for it, so the replica is none to be taken out of traffic.
    assert (degraded.status_code, degraded.json()["missing"]) == (200, ["exp/four"])


async def test_an_experiment_that_loads_after_the_start_takes_no_replica_out_of_traffic(bundles, tmp_path):
    async with serving(gateway_config(bundles, tmp_path / "x.db", names=("exp", "new"))) as (client, app):
        app.service.follower.close()
        new = app.service.endpoints.routers["new"]  # as if it was created over HTTP at another replica
        app.service.endpoints.drop_arms(new, {"one", "four"})
        answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["arms"]["new"]) == (200, {"one": "loading", "four": "loading"})
    assert answer.json()["missing"] == ["new/one", "new/four"]


async def test_a_replica_that_has_not_begun_is_not_ready(bundles, tmp_path):
    import httpx

    app = Gateway(gateway_config(bundles, tmp_path / "x.db"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
        status = (await client.get("/ready")).status_code
    app.service.close()
    assert status == 503


async def test_metrics_of_one_of_several_replicas_say_which_it_is(config):
    import httpx

    app = Gateway(config, replica="r7")
    app.service.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
        await act(client, "s")
        text = (await client.get("/metrics")).text
    samples = [sample for family in app.service.read_metrics() for sample in family.samples]
    app.service.close()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines and all('replica="r7"' in line for line in lines)
    assert not any("replica" in sample.labels for sample in samples)  # Ray has a label of its own


ASK = {"origin": "https://play.example.com", "access-control-request-method": "POST"}


async def test_pages_of_named_sites_may_ask_and_no_others(bundles, tmp_path):
    config = gateway_config(bundles, tmp_path / "x.db", cors=["https://play.example.com"])

    async with serving(config) as (client, _):
        before = await client.options("/v1/act", headers=ASK)
        other = await client.options("/v1/act", headers=ASK | {"origin": "https://evil.example.com"})
        plain = await client.options("/v1/act")
        sent = {"session_id": "s", "observations": SEES}
        answer = await client.post("/v1/act", json=sent, headers={"origin": "https://play.example.com"})
        refused = await client.post("/v1/act", json={}, headers={"origin": "https://play.example.com"})
        foreign = await client.post("/v1/act", json=sent, headers={"origin": "https://evil.example.com"})
    assert before.status_code == 204 and before.content == b""
    assert "authorization" in before.headers["access-control-allow-headers"]
    assert "POST" in before.headers["access-control-allow-methods"]
    for allowed in (before, answer, refused):
        assert allowed.headers["access-control-allow-origin"] == "https://play.example.com"
        assert allowed.headers["vary"] == "origin"
    assert (other.status_code, plain.status_code, foreign.status_code) == (405, 405, 200)
    for response in (other, plain, foreign):
        assert "access-control-allow-origin" not in response.headers
    assert not any("credentials" in name for response in (before, answer) for name in response.headers)


def test_any_site_may_ask_where_the_config_says_so_and_none_where_it_says_nothing(bundles, tmp_path, config):
    async def body(client) -> tuple[Any, Any]:
        return await client.options("/v1/act", headers=ASK), await client.get(
            "/health", headers={"origin": "https://a.b"}
        )

    anybody = with_gateway(gateway_config(bundles, tmp_path / "y.db", cors=["*"]), body)
    assert [response.headers["access-control-allow-origin"] for response in anybody] == ["*", "*"]
    assert not any("credentials" in name for response in anybody for name in response.headers)
    silent = with_gateway(config, body)
    assert silent[0].status_code == 405
    assert not any(name.startswith("access-control") for response in silent for name in response.headers)


@pytest.mark.parametrize("origin", ["play.example.com", "https://a.b/path", "https://*.b", "null"])
def test_origins_are_checked(bundles, tmp_path, origin):
    with pytest.raises(MarlRayError, match="cors"):
        parse_config(GatewayConfig, {"cors": [origin]})


async def test_the_docs_show_every_operation_and_load_nothing_from_elsewhere(config):
    async with serving(config) as (client, _):
        page = await client.get("/docs")
        document = await client.get("/openapi.json")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path, methods in json.loads(document.content)["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in page.text
    links = re.findall(r'(?:href|src|action)="([^"]*)"', page.text)
    assert links and all(link == "data:," or link.startswith("/") for link in links)
    assert "<script" not in page.text and "http://" not in page.text and "https://" not in page.text


async def test_reports_of_what_is_over_are_told_without_its_bundles(tmp_path):
    made = {"one": make_bundle(tmp_path, 1), "four": make_bundle(tmp_path, 4)}
    config = gateway_config(made, tmp_path / "x.db")

    async def stop(client, app) -> None:
        app.service.stores.experiments.change("exp", Action.STOP, epoch=None, actor="ops", reason="done")

    async with serving(config) as (client, app):
        await stop(client, app)
    shutil.rmtree(made["four"])
    async with serving(config) as (client, _):
        answers = [await client.get(path) for path in READ]
    assert [answer.status_code for answer in answers] == [200] * len(READ)
    arms = answers[1].json()["arms"]
    assert arms["four"]["digest"] and arms["four"]["lineage"] is None and arms["one"]["lineage"]["run"] == "r"
