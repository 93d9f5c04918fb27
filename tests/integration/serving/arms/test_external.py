"""An arm that is somebody else's model: our own gateway over real HTTP is the other side."""

import contextlib
import json
import math

import httpx
import pytest
from toy_models.tokenizers import QWEN
from toy_serving.external_servers import KEY, PRICE, Replies, chunk, external
from toy_serving.gateways import bearer, serving, with_gateway, write_keys
from toy_serving.sites import running
from toy_serving.text_gateways import ASK, CHAT, TEXT, events, make_text_bundle, post, text_config

from marl_ray.config import ArmConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.serving.administration.remote_experiments import deploy_bundle, report_lines
from marl_ray.serving.asgi import Gateway


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", KEY)


@pytest.fixture(scope="module")
def other_gateway(tmp_path_factory):
    """The URL of a gateway with a key, whose model knows tools."""
    folder = tmp_path_factory.mktemp("theirs")
    keys = write_keys(folder / "keys.yaml", **{KEY: ("inference",)})
    bundle = make_text_bundle(folder, 3, template=QWEN)
    with running(Gateway(text_config({"one": bundle}, folder, api_keys=keys), seed=0)) as site:
        yield f"{site.url}/v1"


def against(other_gateway: str, bundle: str, folder, arms: dict | None = None, **more: object):
    """Our model against theirs."""
    both = arms or {"ours": {"bundle": bundle}, "theirs": external(other_gateway, price=PRICE)}
    experiment = {"name": "exp", "arms": both, "min_outcomes": 5} | more
    return text_config({}, folder, experiments=[experiment])


async def by_arm(client, **more) -> dict[str, str]:
    """A session of each arm."""
    sessions: dict[str, str] = {}
    for k in range(40):
        reply = await post(client, "/generate", ASK | {"session_id": f"s{k}", "max_tokens": 1} | more)
        sessions.setdefault(reply["arm"], f"s{k}")
        if len(sessions) == 2:
            break
    return sessions


SAMPLED = {"max_tokens": 30, "temperature": 0.7, "top_p": 0.9}
DIRECT = {"model": "exp", "messages": CHAT["messages"], "seed": ASK["seed"]} | SAMPLED
"""The question that ours asks theirs, as a client of theirs would ask it."""


@contextlib.asynccontextmanager
async def both_models(other_gateway: str, bundle: str, folder):
    """A client of our gateway, our gateway, and a session that meets theirs and has had one token of it."""
    rails = [{"name": "cost_usd", "margin": 0.01}]
    async with serving(against(other_gateway, bundle, folder, guardrails=rails)) as (client, app):
        yield client, app, (await by_arm(client))["theirs"]


def directly(other_gateway: str) -> httpx.AsyncClient:
    """A client of their gateway."""
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=other_gateway, headers=headers, timeout=60)


async def test_a_text_of_theirs_is_what_their_gateway_writes_whole_or_in_parts(other_gateway, text_bundles, tmp_path):
    async with (
        both_models(other_gateway, text_bundles["one"], tmp_path) as (client, _, session),
        directly(other_gateway) as direct,
    ):
        question = ASK | SAMPLED | {"session_id": session}
        reply = await post(client, "/generate", question)
        parts = await events(client, "/generate", question)
        [choice] = (await direct.post("/chat/completions", json=DIRECT)).json()["choices"]
    assert (reply["arm"], reply["text"]) == ("theirs", choice["message"]["content"])
    assert reply["finish_reason"] == choice["finish_reason"]
    assert reply["tokens"] == reply["log_probs"] == []  # ours does not know their tokens
    assert len(parts) > 2 and "".join(part["text"] for part in parts) == reply["text"]


async def test_a_chat_with_theirs_has_their_log_probabilities(other_gateway, text_bundles, tmp_path):
    logprobs = {"logprobs": True, "top_logprobs": 2}
    async with (
        both_models(other_gateway, text_bundles["one"], tmp_path) as (client, _, session),
        directly(other_gateway) as direct,
    ):
        reply = await post(client, "/v1/chat/completions", CHAT | logprobs | SAMPLED | {"user": session})
        expected = (await direct.post("/chat/completions", json=DIRECT | logprobs)).json()
    tokens = reply["choices"][0]["logprobs"]["content"]
    assert reply["usage"]["completion_tokens"] == 30 == len(tokens)
    assert tokens == expected["choices"][0]["logprobs"]["content"] and len(tokens[0]["top_logprobs"]) == 2


async def test_an_act_of_theirs_is_a_text(other_gateway, text_bundles, tmp_path):
    async with both_models(other_gateway, text_bundles["one"], tmp_path) as (client, _, session):
        acted = await post(client, "/v1/act", {"session_id": session, "observations": {"writer": "hello"}})
    assert acted["arm"] == "theirs" and isinstance(acted["actions"]["writer"], str) and acted["log_probs"] == {}


async def test_each_token_of_theirs_has_its_price_by_every_route(other_gateway, text_bundles, tmp_path):
    """The outcome of a session carries what its requests have cost; a metric has the sum, and nobody reads the key."""
    async with both_models(other_gateway, text_bundles["one"], tmp_path) as (client, app, session):
        question = ASK | SAMPLED | {"session_id": session}
        await post(client, "/generate", question)
        await events(client, "/generate", question)
        chat = await post(client, "/v1/chat/completions", CHAT | SAMPLED | {"user": session})
        await post(client, "/v1/act", {"session_id": session, "observations": {"writer": "hello"}})
        await post(client, "/v1/outcomes", {"session_id": session, "value": 1})
        cost = dict(app.service.stores.units.metric_values("exp", "cost_usd"))[session]
        metrics = (await client.get("/metrics")).text
    first, longer, act, prompt = 1, 30, 12, chat["usage"]["prompt_tokens"]
    tokens = first + 3 * longer + act
    assert cost == pytest.approx((5 * prompt * PRICE["prompt"] + tokens * PRICE["completion"]) / 1e6)
    assert 'marl_ray_gateway_cost_usd_total{arm="theirs",experiment="exp"}' in metrics
    assert 'cost_usd_total{arm="ours"' not in metrics and f"Bearer {KEY}" not in metrics


async def test_reports_lists_and_pages_name_theirs_by_its_url(other_gateway, text_bundles, tmp_path):
    async with both_models(other_gateway, text_bundles["one"], tmp_path) as (client, _, _):
        report = (await client.get("/v1/experiments/exp")).json()
        listed = (await client.get("/v1/models")).json()["models"]
        page = await client.get("/ui/experiments/exp")
        endpoints = await client.get("/v1/endpoints")
    assert report["arms"]["theirs"]["bundle"] == other_gateway and report["guardrails"][0]["name"] == "cost_usd"
    assert {model["bundle"] for model in listed} == {text_bundles["one"], other_gateway}
    assert (page.status_code, endpoints.status_code) == (200, 200) and other_gateway in page.text


async def test_what_a_unit_costs_is_added_up_over_replicas(other_gateway, text_bundles, tmp_path):
    """Also where the outcome comes to a replica that has not met the unit; a unit of ours costs nothing."""
    config = against(other_gateway, text_bundles["one"], tmp_path, guardrails=[{"name": "cost_usd", "margin": 0.01}])

    async with serving(config) as (client, app), serving(config) as (other, second):
        sessions = await by_arm(client)
        question = ASK | {"session_id": sessions["theirs"], "max_tokens": 2}
        for replica in (client, client, other):
            await post(replica, "/generate", question)
        app.service.follower.decide()
        for session in sessions.values():
            await post(other, "/v1/outcomes", {"session_id": session, "value": 1})
        await post(client, "/generate", question)  # behind the outcome, in the unit's window
        app.service.unit_reports.write()
        metered = [
            gateway.service.metrics.counters_of(gateway.service.endpoints.routers["exp"].config)
            for gateway in (app, second)
        ]
        spent = sum(meters["theirs"].cost_usd for meters in metered)
        stored = dict(second.service.stores.units.metric_values("exp", "cost_usd"))
        assert stored[sessions["theirs"]] == pytest.approx(spent) and spent > 0
        assert stored[sessions["ours"]] == 0.0 and not second.service.stores.units.corrections("exp")


async def test_tools_and_objects_are_theirs_too(other_gateway, tmp_path):
    arms = {"theirs": external(other_gateway)}
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

    async with serving(against(other_gateway, "", tmp_path, arms)) as (client, _):
        question = CHAT | {"tools": [weather], "tool_choice": "required", "max_tokens": 400}
        path = "/v1/chat/completions"
        for seed in range(8):
            full = (await post(client, path, question | {"seed": seed}))["choices"][0]
            if full["finish_reason"] == "tool_calls":
                break
        [call] = full["message"]["tool_calls"]
        parts = [part["choices"][0]["delta"] for part in (await events(client, path, question | {"seed": seed}))[:-1]]
        [joined] = [call for delta in parts for call in delta.get("tool_calls", [])]
        assert joined["function"] == call["function"] and call["function"]["name"] == "weather"
        back = [*CHAT["messages"], full["message"], {"role": "tool", "tool_call_id": call["id"], "content": "20"}]
        await post(client, path, CHAT | {"tools": [weather], "messages": back, "max_tokens": 2})
        for seed in range(8):
            body = CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 400, "seed": seed}
            choice = (await post(client, path, body))["choices"][0]
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["message"]["content"]), dict)
                break
        else:
            raise AssertionError("no object in eight")
        refused = [
            await client.post("/v1/completions", json=TEXT),
            await client.post("/generate", json=ASK | {"top_k": 3}),
        ]
        assert [answer.json()["error"]["field"] for answer in refused] == ["prompt", "top_k"]


@pytest.mark.parametrize(
    ("url", "change"), [("", {"model": "none"}), ("", {"api_key_env": "WRONG"}), ("http://127.0.0.1:9/v1", {})]
)
async def test_where_theirs_fails_ours_answers(url, change, other_gateway, text_bundles, tmp_path, monkeypatch, caplog):
    """An unknown model, a wrong key, nobody there: the control answers, and the failure counts."""
    monkeypatch.setenv("WRONG", "wrong-secret")
    arms = {"ours": {"bundle": text_bundles["one"]}, "theirs": external(url or other_gateway, **change)}

    async with serving(against(other_gateway, "", tmp_path, arms)) as (client, _):
        answers = [await post(client, "/generate", ASK | {"session_id": f"s{k}", "max_tokens": 1}) for k in range(12)]
        metrics = (await client.get("/metrics")).text
    assert {answer["arm"] for answer in answers} == {"ours"}
    assert {answer.get("fallback_for") for answer in answers} == {None, "theirs"}
    assert 'marl_ray_gateway_arm_failures_total{arm="theirs",experiment="exp"}' in metrics
    assert "wrong-secret" not in metrics + caplog.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (chunk(delta={"content": "a"}) + chunk(finish_reason="stop"), 200),
        (chunk(delta={"content": "a"}), 503),  # it breaks off in mid-response
    ],
)
async def test_a_unit_whose_cost_nobody_knows_has_none(other_gateway, tmp_path, body, status, caplog):
    """A server that names no usage is not for free: its units give no evidence on `cost_usd`, and one line says so."""
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}}\n\n'
    arms = {"theirs": external(other_gateway, price=PRICE)}
    now = [1_000.0]

    config = against(other_gateway, "", tmp_path, arms, guardrails=[{"name": "cost_usd", "margin": 0.01}])
    async with serving(config) as (client, app):
        stores, arm = app.service.stores, app.service.endpoints.routers["exp"].arms["theirs"]
        stores.database.clock = lambda: now[0]
        finished = chunk(delta={"content": "a"}) + chunk(finish_reason="stop")
        for session, replies in (("a", finished + usage), ("b", body), ("b", finished + usage)):
            arm.close()
            arm.transport = httpx.ASGITransport(Replies(200, replies))
            sent = await client.post("/generate", json=ASK | {"session_id": session})
            assert sent.status_code == (status if replies is body else 200)
        app.service.unit_reports.write()
        now[0] += 10_000.0
        record = stores.experiments.read("exp")
        values = stores.evidence.judged_units(record, ["cost_usd"]).values["cost_usd"]
        reported = stores.evidence.look(record).reported["cost_usd"]
        metrics = (await client.get("/metrics")).text
    assert sorted(value for value in values if not math.isnan(value)) == pytest.approx([0.004]) and len(values) == 2
    assert reported == {"theirs": 1}
    assert caplog.text.count("names no usage") == (status == 200)
    assert 'cost_unknown_total{arm="theirs",experiment="exp"} 1.0' in metrics


def test_a_session_keeps_theirs_over_a_restart(other_gateway, text_bundles, tmp_path):
    """Also where ours is gone: theirs knows the agents that it was given."""
    arms = {"theirs": external(other_gateway), "ours": {"bundle": text_bundles["one"]}}

    async def body(client):
        return await post(client, "/generate", ASK | {"session_id": session, "agent": "writer"} if session else ASK)

    session = ""
    first = with_gateway(against(other_gateway, "", tmp_path, arms), body)
    session = "s"
    again = with_gateway(against(other_gateway, "", tmp_path, arms), body)
    assert first["arm"] == again["arm"] and first["experiment"] == again["experiment"]


WRONG = [
    ({}, "expected either bundle or url"),
    ({"bundle": "b", "url": "http://x", "model": "m"}, "expected either bundle or url"),
    ({"url": "http://x"}, "model: expected the model's name"),
    ({"bundle": "b", "price": PRICE}, "price: only read with url"),
    ({"url": "http://user:secret@x/v1", "model": "m"}, "url"),
    ({"url": "ftp://x", "model": "m"}, "url"),
    ({"url": "http://x", "model": "m", "price": {"prompt": -1, "completion": 1}}, "price.prompt"),
]


@pytest.mark.parametrize(("arm", "message"), WRONG)
def test_wrong_arms_are_refused_by_name(arm, message):
    with pytest.raises(MarlRayError) as caught:
        parse_config(ArmConfig, arm)
    assert message in str(caught.value)


def test_a_key_that_is_missing_is_named(other_gateway, text_bundles, tmp_path):
    with pytest.raises(MarlRayError, match="environment variable NOWHERE"):
        Gateway(against(other_gateway, "", tmp_path, {"theirs": external(other_gateway, api_key_env="NOWHERE")}))


def test_theirs_is_deployed_and_succeeded_as_any_other(other_gateway, text_bundles, tmp_path, monkeypatch):
    """Alone by HTTP, then against a bundle, as `marl-ray deploy` does; a replica that starts anew loads both."""
    monkeypatch.setenv("MARL_RAY_API_KEY", "ops")
    keys = write_keys(tmp_path / "keys.yaml", ops=("admin", "inference"))
    config = text_config({}, tmp_path, experiments=[], api_keys=keys)
    arms = {"production": external(other_gateway, price=PRICE)}
    with running(Gateway(config, seed=0)) as site:
        made = {"name": "solver", "arms": arms, "autostart": True, "reason": "r"}
        answer = httpx.post(f"{site.url}/v1/experiments", json=made, headers=bearer("ops"), timeout=60)
        assert answer.status_code == 201, answer.text
        produced = httpx.get(f"{site.url}/v1/endpoints", headers=bearer("ops")).json()["endpoints"]["solver"]
        assert produced["production"]["bundle"] == other_gateway
        report = deploy_bundle(site.url, text_bundles["one"], "shadow", "solver", {}, "a test")
        assert report["config"]["arms"]["production"]["price"] == PRICE
        assert report_lines(report)
    with running(Gateway(config, seed=0)) as site:
        question = ASK | {"experiment": "solver", "max_tokens": 1}
        response = httpx.post(f"{site.url}/generate", json=question, headers=bearer("ops"), timeout=60)
        assert (response.status_code, response.json()["arm"]) == (200, "production"), response.text
