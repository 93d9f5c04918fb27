"""Texts in the log of decisions, and back from Parquet: what language models wrote is kept to the token."""

import asyncio
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from toy_serving.gateways import serving
from toy_serving.text_gateways import ASK, CHAT, CONTEXT, events, make_text_bundle, post, rows, text_config
from waiting import until_async

from marl_ray.config import GatewayConfig
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.torch_engine import TorchEngine
from marl_ray.policies.prompting.prompts import encode_prompt
from marl_ray.rollout.served.texts import read_served
from marl_ray.serving.logs.act_reader import read_logged
from marl_ray.serving.logs.acts import LoggedText
from marl_ray.serving.logs.export import export


@pytest.fixture
def logging_gateway(text_gateway: GatewayConfig, tmp_path: Path) -> GatewayConfig:
    return text_gateway.model_copy(update={"decision_log": str(tmp_path / "log")})


def read(config: GatewayConfig) -> list[LoggedText]:
    return list(read_logged(str(config.decision_log), "exp"))


async def test_every_route_logs_what_it_sent(logging_gateway, text_bundles):
    bundles = {arm: load_bundle(text_bundles[arm]) for arm in text_bundles}

    async with serving(logging_gateway) as (client, _):
        answers = {
            "whole": await post(client, "/generate", ASK | {"session_id": "a", "temperature": 0.5, "top_k": 7}),
            "parts": await events(client, "/generate", ASK | {"session_id": "b"}),
            "chat": await post(client, "/v1/chat/completions", CHAT | {"user": "c"}),
            "act": await post(client, "/v1/act", {"session_id": "d", "observations": {"writer": "so"}}),
            "greedy": await post(client, "/generate", ASK | {"session_id": "e", "temperature": 0}),
        }
    logged = {record.unit: record for record in read(logging_gateway)}
    assert sorted(logged) == ["a", "b", "c", "d", "e"]
    full, parts = answers["whole"], answers["parts"]
    first = logged["a"]
    assert (first.text, first.ids, first.log_probs) == (full["text"], full["tokens"], full["log_probs"])
    assert (first.arm, first.epoch, first.propensity, first.agent) == (full["arm"], 1, 0.5, "writer")
    assert first.digest == bundles[first.arm].digest and first.finish == full["finish_reason"]
    assert first.settings == {"temperature": 0.5, "top_p": 1.0, "top_k": 7, "max_tokens": 12}
    assert (first.asked, first.seed, first.prompt) == (["temperature", "top_k"], 5, "hello")
    policy = bundles[first.arm].policies["lm"]
    assert first.prompt_ids == encode_prompt(policy.tokenizer, "hello", None)
    assert logged["b"].ids == [number for part in parts for number in part["tokens"]]
    assert logged["b"].text == "".join(part["text"] for part in parts)
    assert logged["c"].text == answers["chat"]["choices"][0]["message"]["content"] and logged["c"].prompt is None
    assert logged["c"].messages == CHAT["messages"] and len(logged["c"].prompt_ids) > 0
    assert logged["d"].text == answers["act"]["actions"]["writer"]
    assert sum(logged["d"].log_probs) == pytest.approx(answers["act"]["log_probs"]["writer"])
    assert logged["e"].greedy and not first.greedy
    # The logged seed, prompt and settings give the logged tokens again.
    engine = TorchEngine(policy)
    generation = policy.generation.model_copy(update=first.settings)
    policy.generation = generation
    (again,) = engine.generate([Prompt(tuple(first.prompt_ids), first.seed, False)], 0)
    assert list(again.ids) == first.ids


async def test_of_a_stream_whose_client_leaves_the_log_has_what_was_sent(logging_gateway):
    async with serving(logging_gateway) as (_, app):
        sent, disconnected = [], asyncio.Event()
        body = {"session_id": "s", "prompt": "hello", "stream": True, "max_tokens": CONTEXT - 20, "temperature": 0}
        received = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

        async def receive():
            if (message := next(received, None)) is not None:
                return message
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
        task = asyncio.create_task(app(scope, receive, send))
        await until_async(lambda: len(sent) > 3, "three pieces of the text")
        disconnected.set()
        await asyncio.wait_for(task, 60)
        await until_async(lambda: rows(app) == 0, "the end of the row")
        lines = b"".join(sent).split(b"\n\n")
    stream_events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line]
    (record,) = read(logging_gateway)
    ids = [number for part in stream_events for number in part["tokens"]]
    assert record.finish == "broken_off" and record.ids[: len(ids)] == ids and 0 <= len(record.ids) - len(ids) < 50


async def test_texts_come_back_from_parquet_with_their_outcomes(logging_gateway, tmp_path):
    async with serving(logging_gateway) as (client, app):
        for k in range(3):
            await post(client, "/generate", ASK | {"session_id": "a", "seed": k})
        await post(client, "/v1/chat/completions", CHAT | {"user": "b", "top_p": 0.5})
        await post(client, "/generate", ASK | {"session_id": "silent"})
        for unit, value in {"a": 0.25, "b": 1.0}.items():
            await post(client, "/v1/outcomes", {"session_id": unit, "value": value, "metrics": {"cost": 2.0}})
        await asyncio.to_thread(app.service.acts.close)
        summary = export(
            app.service.stores.experiments,
            app.service.stores.units,
            "exp",
            logging_gateway.decision_log,
            str(tmp_path / "out"),
        )
    assert (summary.units, summary.sequences, summary.decisions, summary.censored) == (2, 4, 4, 1)
    table = pq.read_table(summary.path).to_pylist()
    logged = [record for record in read(logging_gateway) if record.unit != "silent"]
    assert [row["ids"] for row in table] == [record.ids for record in logged]
    assert [row["log_probs"] for row in table] == [record.log_probs for record in logged]
    assert [row["prompt_ids"] for row in table] == [record.prompt_ids for record in logged]
    assert [(row["unit"], row["turn"], row["outcome"], row["costs"]) for row in table] == [
        *(("a", turn, 0.25, [2.0]) for turn in range(3)),
        ("b", 0, 1.0, [2.0]),
    ]
    assert [row["sampled"] for row in table] == [True, True, True, False]
    assert table[0]["prompt"] == "hello" and table[0]["messages"] is None and table[0]["tools"] is None
    assert table[3]["prompt"] is None and json.loads(table[3]["messages"]) == CHAT["messages"]
    assert (table[3]["top_p"], table[3]["asked"], table[0]["asked"]) == (0.5, ["top_p"], [])


async def test_a_response_that_was_exported_twice_is_read_once(logging_gateway, tmp_path):
    """A second export into the same folder replaces the first; into another one beside it, it overlaps."""
    out = tmp_path / "out"

    async with serving(logging_gateway) as (client, app):
        for k in range(3):  # two of them alike
            await post(client, "/generate", ASK | {"session_id": "a", "seed": min(k, 1)})
        await post(client, "/generate", ASK | {"session_id": "b"})
        await asyncio.to_thread(app.service.acts.close)
        for unit, folder in (("a", out), ("b", out), ("b", out / "tuesday")):
            await post(client, "/v1/outcomes", {"session_id": unit, "value": 1.0})
            export(
                app.service.stores.experiments,
                app.service.stores.units,
                "exp",
                logging_gateway.decision_log,
                str(folder),
            )
    assert [path.name for path in out.rglob("*.parquet")] == ["exp.parquet"] * 2
    assert [record.unit for record in read_served(str(out))] == ["exp/a", "exp/a", "exp/a", "exp/b"]


async def test_an_answer_that_stands_in_is_logged_as_the_controls(text_bundles, tmp_path):
    bundles = {"one": text_bundles["one"], "four": make_text_bundle(tmp_path, 4, broken=True)}
    config = text_config(bundles, tmp_path, decision_log=str(tmp_path / "log"))

    async with serving(config) as (client, _):
        for k in range(6):
            await post(client, "/generate", ASK | {"session_id": f"s{k}"})
            await post(client, "/v1/act", {"session_id": f"t{k}", "observations": {"writer": "hello"}})
    logged = read(config)
    assert len(logged) == 12 and {(record.arm, record.digest) for record in logged} == {
        ("one", load_bundle(text_bundles["one"]).digest)
    }
