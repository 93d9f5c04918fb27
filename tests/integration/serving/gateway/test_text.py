"""Language models in the gateway: small real ones, in this process. Real bundles, a real SQLite file, no Ray."""

import asyncio
import json
import logging

import pytest
from toy_serving.gateways import bearer, serving, write_keys
from toy_serving.text_gateways import ASK, CHAT, events, make_text_bundle, post, text_config

from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.experiments.assignment.rendezvous import is_held_out_unit
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.torch_engine import TorchEngine
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.prompting.prompts import encode_prompt

TOKENIZER = byte_tokenizer()


async def test_text_is_what_the_policy_says_and_its_stream_is_the_same(text_gateway, text_bundles):
    async with serving(text_gateway) as (client, _):
        answers = []
        for k in range(8):
            request = {"session_id": f"s{k}", "prompt": "hello", "seed": k}
            answers.append((await post(client, "/generate", request), await events(client, "/generate", request)))
        report = (await client.get("/v1/experiments/exp")).json()
    engines = {arm: TorchEngine(load_bundle(text_bundles[arm]).policies["lm"]) for arm in text_bundles}
    ids = tuple(encode_prompt(TOKENIZER, "hello", True))
    for k, (full, parts) in enumerate(answers):
        [expected] = engines[full["arm"]].generate([Prompt(ids, k)], 0)
        assert full["tokens"] == expected.ids
        assert full["log_probs"] == pytest.approx(expected.log_probs, abs=1e-5)
        assert full["text"] == TOKENIZER.decode(expected.ids, skip_special_tokens=True)
        assert full["finish_reason"] == ("stop" if expected.ended else "length")
        assert (full["experiment"], full["epoch"], full["propensity"]) == ("exp", 1, 0.5)
        assert "".join(part["text"] for part in parts) == full["text"]
        assert [token for part in parts for token in part["tokens"]] == full["tokens"]
        assert {key: parts[-1][key] for key in ("arm", "finish_reason")} == {
            k: full[k] for k in ("arm", "finish_reason")
        }
    assert {full["arm"] for full, _ in answers} == {"one", "four"}
    assert sum(arm["exposures"] for arm in report["arms"].values()) == 8


async def test_a_response_does_not_depend_on_its_company(text_gateway):
    requests = [
        {"session_id": "s", "prompt": "a" * (1 + 7 * k % 40), "seed": k, "max_tokens": 3 + 5 * (k % 4)}
        | ({"temperature": 0.5 * (k % 3)} if k % 2 else {"top_k": 5, "top_p": 0.9})
        for k in range(12)
    ]
    async with serving(text_gateway.model_copy(update={"max_batch": 5})) as (client, _):
        together = await asyncio.gather(*(post(client, "/generate", request) for request in requests))
        alone = [await post(client, "/generate", request) for request in requests]
    assert [answer["tokens"] for answer in together] == [answer["tokens"] for answer in alone]


async def test_a_session_meets_one_arm_by_every_route(text_gateway):
    async with serving(text_gateway) as (client, _):
        arms = []
        for k in range(6):
            session = f"s{k}"
            reply = await post(client, "/generate", ASK | {"session_id": session})
            acted = await post(client, "/v1/act", {"session_id": session, "observations": {"writer": "hello"}})
            chat = await client.post("/v1/chat/completions", json=CHAT | {"user": session})
            named = await client.post(
                "/v1/chat/completions", json=CHAT | {"user": None}, headers={"x-session-id": session}
            )
            arms.append({reply["arm"], acted["arm"], chat.headers["x-arm"], named.headers["x-arm"]})
            assert chat.headers["x-experiment"] == "exp" and chat.headers["x-session-id"] == session
        alone = await client.post("/v1/chat/completions", json=CHAT | {"user": None})
        assert alone.headers["x-session-id"] == alone.json()["id"]
        outcome = await post(client, "/v1/outcomes", {"session_id": alone.json()["id"], "value": 1})
        assert outcome["arm"] == alone.headers["x-arm"]
    assert all(len(names) == 1 for names in arms) and len(set().union(*arms)) == 2


async def test_texts_are_for_the_population_and_the_hold_out_too(text_bundles, tmp_path):
    config = text_config(text_bundles, tmp_path, holdouts={"exp": 0.4})
    population = {"population": {"attributes": {"country": ["de"]}}}
    experiment = parse_config(ExperimentConfig, config.experiments[0].model_dump(mode="json") | population)
    attributes = {"attributes": {"country": "de"}}

    async with serving(config.model_copy(update={"experiments": [experiment]})) as (client, _):
        for k in range(6):
            out, fast = is_held_out_unit("exp", 0.4, f"s{k}"), {"max_tokens": 1}
            outside = await post(client, "/generate", ASK | fast | {"session_id": f"s{k}"})
            inside = await post(client, "/generate", ASK | fast | attributes | {"session_id": f"s{k}"})
            chat = await client.post("/v1/chat/completions", json=CHAT | fast | attributes | {"user": f"s{k}"})
            assert inside.get("holdout", False) is outside.get("holdout", False) is out
            assert (chat.headers.get("x-holdout"), chat.headers["x-arm"]) == ("true" if out else None, inside["arm"])
            assert outside["arm"] == "one"
            outcome = await client.post("/v1/outcomes", json={"session_id": f"s{k}", "value": 1})
            assert outcome.status_code == (404 if out else 200)
        bad = await client.post("/v1/chat/completions", json=CHAT | {"attributes": {"country": None}})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "attributes.country")


async def test_texts_are_acts_too(text_gateway):
    async with serving(text_gateway) as (client, _):
        act = {"session_id": "s", "observations": {"writer": "hello"}, "mode": "greedy"}
        acted = await post(client, "/v1/act", act)
        reply = await post(client, "/generate", ASK | {"temperature": 0})
        batch = await post(client, "/batch", {"requests": [act, act | {"observations": {"writer": 3}}]})
        batch = batch["answers"]
    assert acted["actions"] == {"writer": reply["text"]}
    assert acted["log_probs"]["writer"] == pytest.approx(sum(reply["log_probs"]), abs=1e-4)
    assert batch[0]["actions"] == acted["actions"]
    assert (batch[1]["status"], batch[1]["error"]["field"]) == (400, "observations.writer")


async def test_teams_name_the_agent(tmp_path):
    agents = {"planner": "p", "critic": "q"}
    config = text_config({"one": make_text_bundle(tmp_path, 1, agents)}, tmp_path)

    async with serving(config) as (client, _):
        listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        unnamed = await client.post("/v1/chat/completions", json=CHAT)
        chats = [await post(client, "/v1/chat/completions", CHAT | {"model": model}) for model in listed]
        replies = [await post(client, "/generate", ASK | {"agent": agent}) for agent in agents]
        both = await post(client, "/v1/act", {"session_id": "s", "observations": dict.fromkeys(agents, "hello")})
    assert listed == ["exp/planner", "exp/critic"]
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "model"
    assert [chat["choices"][0]["message"]["content"] for chat in chats] == [reply["text"] for reply in replies]
    assert replies[0]["text"] != replies[1]["text"] and set(both["actions"]) == set(agents)


async def test_metrics_and_logs_tell_tokens_and_the_time_to_the_first(text_gateway, caplog):
    with caplog.at_level(logging.WARNING, "marl_ray.access"):
        async with serving(text_gateway.model_copy(update={"access_log": "all"})) as (client, _):
            reply = await post(client, "/generate", ASK)
            arm = reply["arm"]
            metrics = (await client.get("/metrics")).text
    labels = f'arm="{arm}",experiment="exp"'
    assert f'marl_ray_gateway_tokens_total{{{labels},kind="generated"}} 12.0' in metrics
    assert f'marl_ray_gateway_tokens_total{{{labels},kind="prompt"}} 6.0' in metrics
    assert f"marl_ray_gateway_first_token_seconds_count{{{labels}}} 1.0" in metrics
    logged = [json.loads(record.message) for record in caplog.records]
    [text] = [line for line in logged if line["event"] == "text"]
    assert (text["prompt_tokens"], text["tokens"], text["finish"], text["arm"]) == (6, 12, "length", arm)


async def test_a_bundle_is_rolled_out_as_any_other(text_bundles, tmp_path):
    """`marl-ray deploy` does this: alone, then a candidate at the same endpoint, which is rolled back at once."""
    keys = write_keys(tmp_path / "keys.yaml", ops=("admin", "inference"))
    config = text_config({"one": text_bundles["one"]}, tmp_path, api_keys=keys, experiments=[])
    arms = {"production": {"bundle": text_bundles["one"]}, "candidate": {"bundle": text_bundles["four"]}}
    next_one = {"name": "exp-2", "endpoint": "exp", "arms": arms, "strategy": "gradual", "stages": [0.5, 1.0]}

    async with serving(config) as (client, _):
        client.headers.update(bearer("ops"))
        first = {"name": "exp", "arms": {"production": {"bundle": text_bundles["one"]}}}
        assert (await client.post("/v1/experiments", json=first | {"reason": "r"})).status_code == 201
        await post(client, "/v1/experiments/exp/stop", {"reason": "r"})
        made = await client.post("/v1/experiments", json=next_one | {"on_rollback": "cut", "reason": "r"})
        assert made.status_code == 201, made.text
        before = [await post(client, "/generate", ASK | {"session_id": f"s{k}"}) for k in range(12)]
        forced = await client.post("/v1/chat/completions", json=CHAT, headers={"x-arm": "candidate"})
        rolled = {"reason": "r", "arm": "candidate"}
        assert (await client.post("/v1/experiments/exp-2/rollback", json=rolled)).status_code == 200
        after = [await post(client, "/generate", ASK | {"session_id": f"s{k}"}) for k in range(12)]
        pages = [
            await client.get(path)
            for path in ("/ui", "/ui/experiments/exp-2", "/v1/experiments/exp-2", "/v1/endpoints")
        ]
    assert {answer["experiment"] for answer in before} == {"exp-2"}
    assert {answer["arm"] for answer in before} == {"production", "candidate"}
    assert forced.headers["x-arm"] == "candidate"
    assert {answer["arm"] for answer in after} == {"production"}
    assert [page.status_code for page in pages] == [200] * 4
