"""Language models in the gateway: small real ones, in this process. Real bundles, a real SQLite file, no Ray."""

import asyncio
import json
import logging
import re
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_gateways import bearer, make_bundle, serving, with_gateway, write_keys
from toy_text_gateways import ASK, CHAT, CONTEXT, TEXT, config, events, make_text_bundle, post, rows, text_config, texts
from toy_tokenizers import LLAMA2, bytes_with, spaced

from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import held_out
from marl_ray.policies.bundles.actor_critic import load_bundle
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.decoding.stop_strings import first_stop
from marl_ray.policies.engines.torch_engine import TorchEngine
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.prompting.prompts import encode_prompt
from marl_ray.serving.arms.detokenizer import Detokenizer
from marl_ray.serving.asgi import Gateway

# Ray's own models, at import.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
__all__ = ["config", "texts"]
TOKENIZER = byte_tokenizer()


def test_text_is_what_the_policy_says_and_its_stream_is_the_same(config, texts):
    async def body(client):
        answers = []
        for k in range(8):
            asked = {"session_id": f"s{k}", "prompt": "hello", "seed": k}
            answers.append((await post(client, "/generate", asked), await events(client, "/generate", asked)))
        return answers, (await client.get("/v1/experiments/exp")).json()

    answers, report = with_gateway(config, body)
    engines = {arm: TorchEngine(load_bundle(texts[arm]).policies["lm"]) for arm in texts}
    ids = tuple(encode_prompt(TOKENIZER, "hello", True))
    for k, (whole, parts) in enumerate(answers):
        [expected] = engines[whole["arm"]].generate([Prompt(ids, k)], 0)
        assert whole["tokens"] == expected.ids
        assert whole["log_probs"] == pytest.approx(expected.log_probs, abs=1e-5)
        assert whole["text"] == TOKENIZER.decode(expected.ids, skip_special_tokens=True)
        assert whole["finish_reason"] == ("stop" if expected.ended else "length")
        assert (whole["experiment"], whole["epoch"], whole["propensity"]) == ("exp", 1, 0.5)
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
        assert {key: parts[-1][key] for key in ("arm", "finish_reason")} == {
            k: whole[k] for k in ("arm", "finish_reason")
        }
    assert {whole["arm"] for whole, _ in answers} == {"one", "four"}
    assert sum(arm["exposures"] for arm in report["arms"].values()) == 8


def test_a_response_does_not_depend_on_its_company(config):
    asked = [
        {"session_id": "s", "prompt": "a" * (1 + 7 * k % 40), "seed": k, "max_tokens": 3 + 5 * (k % 4)}
        | ({"temperature": 0.5 * (k % 3)} if k % 2 else {"top_k": 5, "top_p": 0.9})
        for k in range(12)
    ]

    async def body(client):
        together = await asyncio.gather(*(post(client, "/generate", one) for one in asked))
        alone = [await post(client, "/generate", one) for one in asked]
        return together, alone

    for together, alone in zip(*with_gateway(config.model_copy(update={"max_batch": 5}), body), strict=True):
        assert together["tokens"] == alone["tokens"]


def test_a_session_meets_one_arm_by_every_route(config):
    async def body(client):
        arms = []
        for k in range(6):
            session = f"s{k}"
            said = await post(client, "/generate", ASK | {"session_id": session})
            acted = await post(client, "/v1/act", {"session_id": session, "observations": {"writer": "hello"}})
            chat = await client.post("/v1/chat/completions", json=CHAT | {"user": session})
            named = await client.post(
                "/v1/chat/completions", json=CHAT | {"user": None}, headers={"x-session-id": session}
            )
            arms.append({said["arm"], acted["arm"], chat.headers["x-arm"], named.headers["x-arm"]})
            assert chat.headers["x-experiment"] == "exp" and chat.headers["x-session-id"] == session
        alone = await client.post("/v1/chat/completions", json=CHAT | {"user": None})
        assert alone.headers["x-session-id"] == alone.json()["id"]
        told = await post(client, "/v1/outcomes", {"session_id": alone.json()["id"], "value": 1})
        assert told["arm"] == alone.headers["x-arm"]
        return arms

    arms = with_gateway(config, body)
    assert all(len(one) == 1 for one in arms) and len(set().union(*arms)) == 2


def test_texts_are_for_the_population_and_the_hold_out_too(texts, tmp_path):
    config = text_config(texts, tmp_path, holdouts={"exp": 0.4})
    given = {"population": {"attributes": {"country": ["de"]}}}
    experiment = parse_config(ExperimentConfig, config.experiments[0].model_dump(mode="json") | given)
    told = {"attributes": {"country": "de"}}

    async def body(client):
        for k in range(6):
            out, fast = held_out("exp", 0.4, f"s{k}"), {"max_tokens": 1}
            outside = await post(client, "/generate", ASK | fast | {"session_id": f"s{k}"})
            said = await post(client, "/generate", ASK | fast | told | {"session_id": f"s{k}"})
            chat = await client.post("/v1/chat/completions", json=CHAT | fast | told | {"user": f"s{k}"})
            assert said.get("holdout", False) is outside.get("holdout", False) is out
            assert (chat.headers.get("x-holdout"), chat.headers["x-arm"]) == ("true" if out else None, said["arm"])
            assert outside["arm"] == "one"
            outcome = await client.post("/v1/outcomes", json={"session_id": f"s{k}", "value": 1})
            assert outcome.status_code == (404 if out else 200)
        bad = await client.post("/v1/chat/completions", json=CHAT | {"attributes": {"country": None}})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "attributes.country")

    with_gateway(config.model_copy(update={"experiments": [experiment]}), body)


def test_texts_are_acts_too(config):
    async def body(client):
        act = {"session_id": "s", "observations": {"writer": "hello"}, "mode": "greedy"}
        acted = await post(client, "/v1/act", act)
        said = await post(client, "/generate", ASK | {"temperature": 0})
        batch = await post(client, "/batch", {"requests": [act, act | {"observations": {"writer": 3}}]})
        return acted, said, batch["answers"]

    acted, said, batch = with_gateway(config, body)
    assert acted["actions"] == {"writer": said["text"]}
    assert acted["log_probs"]["writer"] == pytest.approx(sum(said["log_probs"]), abs=1e-4)
    assert batch[0]["actions"] == acted["actions"]
    assert (batch[1]["status"], batch[1]["error"]["field"]) == (400, "observations.writer")


def test_a_chat_is_the_text_in_openais_words(config, texts):
    async def body(client):
        said = await post(client, "/generate", ASK)
        chat = await post(client, "/v1/chat/completions", CHAT | {"logprobs": True})
        usage = {"stream_options": {"include_usage": True}}
        parts = await events(client, "/v1/chat/completions", CHAT | usage)
        split = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        other = await post(client, "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": split}]})
        listed = (await client.get("/v1/models")).json()
        return said, chat, parts, other, listed

    said, chat, parts, other, listed = with_gateway(config, body)
    [choice] = chat["choices"]
    assert choice["message"] == {"role": "assistant", "content": said["text"], "refusal": None}
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == said["log_probs"]
    assert chat["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
    assert chat["system_fingerprint"] == load_bundle(texts[said["arm"]]).digest[:16]
    assert other["choices"][0]["message"] == choice["message"]
    *chunks, last, done = parts
    assert done == "[DONE]" and last["usage"] == chat["usage"] and last["choices"] == []
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == said["text"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert [model["id"] for model in listed["data"]] == ["exp"] and len(listed["models"]) == 2


def test_stop_strings_end_texts_and_chats_do_not_show_them(config):
    async def body(client):
        free = await post(client, "/generate", ASK | {"max_tokens": 40})
        text = free["text"]
        at = next(k for k in range(3, len(text) - 2) if text[k : k + 2].isascii() and text.find(text[k : k + 2]) == k)
        stop = text[at : at + 2]
        said = await post(client, "/generate", ASK | {"max_tokens": 40, "stop": stop})
        parts = await events(client, "/v1/chat/completions", CHAT | {"max_tokens": 40, "stop": ["never", stop]})
        return text[:at], stop, said, parts

    before, stop, said, parts = with_gateway(config, body)
    assert (said["text"], said["finish_reason"]) == (before + stop, "stop")
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts[:-1]) == before


def test_teams_name_the_agent(tmp_path):
    agents = {"planner": "p", "critic": "q"}
    config = text_config({"one": make_text_bundle(tmp_path, 1, agents)}, tmp_path)

    async def body(client):
        listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        unnamed = await client.post("/v1/chat/completions", json=CHAT)
        chats = [await post(client, "/v1/chat/completions", CHAT | {"model": model}) for model in listed]
        said = [await post(client, "/generate", ASK | {"agent": agent}) for agent in agents]
        both = await post(client, "/v1/act", {"session_id": "s", "observations": dict.fromkeys(agents, "hello")})
        return listed, unnamed, chats, said, both

    listed, unnamed, chats, said, both = with_gateway(config, body)
    assert listed == ["exp/planner", "exp/critic"]
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "model"
    assert [chat["choices"][0]["message"]["content"] for chat in chats] == [one["text"] for one in said]
    assert said[0]["text"] != said[1]["text"] and set(both["actions"]) == set(agents)


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "other"}}
DEEP = {"type": "function", "function": {"name": "look_up", "parameters": json.loads('{"a":' * 300 + "{}" + "}" * 300)}}


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


JSON = {"type": "json_object"}
BODIES = {"/generate": ASK, "/v1/chat/completions": CHAT, "/v1/completions": TEXT}
WRONG = [
    ("/generate", {"prompt": None}, 400, "prompt"),
    ("/generate", {"prompt": "x" * CONTEXT}, 400, "prompt"),
    ("/generate", {"max_tokens": CONTEXT}, 400, "prompt"),
    ("/generate", {"max_tokens": 0}, 400, "max_tokens"),
    ("/generate", {"max_tokens": True}, 400, "max_tokens"),
    ("/generate", {"temperature": 2.5}, 400, "temperature"),
    ("/generate", {"top_p": 0}, 400, "top_p"),
    ("/generate", {"top_k": -1}, 400, "top_k"),
    ("/generate", {"seed": 1 << 63}, 400, "seed"),
    ("/generate", {"stop": [""]}, 400, "stop"),
    ("/generate", {"stop": ["x"] * 5}, 400, "stop"),
    ("/generate", {"stream": 1}, 400, "stream"),
    ("/generate", {"agent": "nobody"}, 400, "agent"),
    ("/generate", {"session_id": ""}, 400, "session_id"),
    ("/generate", {"n": 1}, 400, "n"),
    ("/generate", {"experiment": "none"}, 404, "experiment"),
    ("/v1/chat/completions", {"model": "none"}, 404, "model"),
    ("/v1/chat/completions", {"model": "exp/nobody"}, 400, "model"),
    ("/v1/chat/completions", {"model": None}, 400, "model"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "judge", "content": "x"}]}, 400, "messages.0.role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, 400, "messages"),
    ("/v1/chat/completions", {"n": 2}, 400, "n"),
    ("/v1/chat/completions", {"n": True}, 400, "n"),
    ("/v1/chat/completions", {"tools": [{}]}, 400, "tools.0"),
    ("/v1/chat/completions", {"tools": [TOOL]}, 400, "tools"),  # which this template does not show
    ("/v1/chat/completions", {"tools": [TOOL, TOOL]}, 400, "tools"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": NAMED}, 400, "tool_choice"),
    ("/v1/chat/completions", {"tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.tool_call_id"),
    ("/v1/chat/completions", {"messages": [calling("{}") | {"tool_calls": []}]}, 400, "messages.0.tool_calls"),
    *(
        ("/v1/chat/completions", {"messages": [calling(text)]}, 400, "messages.0.tool_calls.0.function.arguments")
        for text in ("[]", "{", '{"a": "\\ud800"}', '{"a": 1' + "0" * 30 + "}", '{"a": ' + "[" * 300 + "]" * 300 + "}")
    ),
    ("/v1/chat/completions", {"tools": [DEEP]}, 400, "tools"),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, 400, "response_format"),
    ("/v1/chat/completions", {"response_format": JSON, "tools": [TOOL]}, 400, "response_format"),
    ("/v1/chat/completions", {"top_logprobs": 2}, 400, "top_logprobs"),
    ("/v1/chat/completions", {"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ("/v1/chat/completions", {"functions": []}, 400, "functions"),
    *(
        ("/v1/chat/completions", {"logit_bias": bias}, 400, "logit_bias")
        for bias in ({"5": 101}, {"5": True}, {"-5": 1}, {"five": 1}, {"100000": 1}, {"9" * 30: 1}, {"05": 1}, [0])
    ),
    ("/v1/chat/completions", {"presence_penalty": 2.5}, 400, "presence_penalty"),
    ("/v1/completions", {"frequency_penalty": False}, 400, "frequency_penalty"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a", [1]]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [5, 100_000]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 300}, 413, "prompt"),
    ("/v1/completions", {"prompt": "x" * CONTEXT}, 400, "prompt"),
    ("/v1/completions", {"logprobs": True}, 400, "logprobs"),
    ("/v1/completions", {"logprobs": 6}, 400, "logprobs"),
    ("/v1/completions", {"echo": True}, 400, "echo"),
    ("/v1/completions", {"suffix": "x"}, 400, "suffix"),
    ("/v1/completions", {"model": "none"}, 404, "model"),
    ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 1}, 400, "max_tokens"),
    ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/chat/completions", {"user": "\0"}, 400, "user"),
    ("/v1/chat/completions", {"unknown": 1}, 400, "unknown"),
]


def test_wrong_requests_are_refused_by_name_and_no_arm_is_blamed(config):
    async def run():
        async with serving(config) as (client, app):
            for path, change, status, field in WRONG:
                answer = await client.post(path, json=BODIES[path] | change)
                error = answer.json()["error"]
                assert (answer.status_code, error["field"]) == (status, field), (change, answer.text)
                if path != "/generate":
                    assert error["param"] == field and error["type"] == "invalid_request_error", error
            assert error.keys() == {"message", "type", "param", "code", "field"}
            metrics = (await client.get("/metrics")).text
            assert "marl_ray_gateway_arm_failures_total{" not in metrics and rows(app) == 0

    asyncio.run(run())


def test_neutral_fields_and_tiny_temperatures_are_fine(config):
    neutral = {"n": 1, "presence_penalty": 0.0, "tools": [], "logit_bias": None, "response_format": {"type": "text"}}

    async def body(client):
        cold = [await post(client, "/v1/chat/completions", CHAT | neutral | {"temperature": t}) for t in (0, 1e-38)]
        await post(client, "/v1/chat/completions", CHAT | {"top_p": 5e-324, "top_logprobs": 0})
        return [chat["choices"][0]["message"]["content"] for chat in cold]

    greedy, cold = with_gateway(config, body)
    assert greedy == cold


def test_actor_critics_have_no_text_and_are_in_no_list(tmp_path):
    config = text_config({"one": make_bundle(tmp_path, 1)}, tmp_path)

    async def body(client):
        refused = [await client.post("/generate", json=ASK), await client.post("/v1/chat/completions", json=CHAT)]
        return [(answer.status_code, answer.json()["error"]["field"]) for answer in refused], (
            await client.get("/v1/models")
        ).json()["data"]

    assert with_gateway(config, body) == ([(422, "experiment"), (422, "model")], [])


def test_keys_are_needed_and_errors_tell_openais_clients_so(config, tmp_path):
    keys = write_keys(tmp_path / "keys.yaml", game=("inference",), ops=("admin",))

    async def body(client):
        for shown, status, kind in (({}, 401, "authentication_error"), (bearer("ops"), 403, "permission_error")):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=shown)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        await post(client, "/v1/chat/completions", CHAT, headers=bearer("game"))

    with_gateway(config.model_copy(update={"api_keys": keys}), body)


def test_what_texts_cannot_do_is_refused_in_one_line(texts, tmp_path):
    def refusal(bundles: dict[str, str], **more: Any) -> str:
        with pytest.raises(MarlRayError) as caught:
            Gateway(text_config(bundles, tmp_path, **more))
        return str(caught.value)

    mixed = refusal(texts | {"four": make_bundle(tmp_path, 4)})
    assert mixed == "experiments.exp.arms.four: holds actor-critics, arm 'one' holds language models"
    other = refusal(texts | {"four": make_text_bundle(tmp_path, 4, {"reader": "lm"})})
    assert other == "experiments.exp.arms.four: plays agents reader, arm 'one' plays writer"


def test_metrics_and_logs_tell_tokens_and_the_time_to_the_first(config, caplog):
    async def body(client):
        said = await post(client, "/generate", ASK)
        return said["arm"], (await client.get("/metrics")).text

    with caplog.at_level(logging.WARNING, "marl_ray.access"):
        arm, metrics = with_gateway(config.model_copy(update={"access_log": "all"}), body)
    labels = f'arm="{arm}",experiment="exp"'
    assert f'marl_ray_gateway_tokens_total{{{labels},kind="generated"}} 12.0' in metrics
    assert f'marl_ray_gateway_tokens_total{{{labels},kind="prompt"}} 6.0' in metrics
    assert f"marl_ray_gateway_first_token_seconds_count{{{labels}}} 1.0" in metrics
    logged = [json.loads(record.message) for record in caplog.records]
    [text] = [line for line in logged if line["event"] == "text"]
    assert (text["prompt_tokens"], text["tokens"], text["finish"], text["arm"]) == (6, 12, "length", arm)


def test_a_bundle_is_rolled_out_as_any_other(texts, tmp_path):
    """As `marl-ray deploy` does: alone, then a candidate at the same endpoint, which is rolled back and cut off."""
    keys = write_keys(tmp_path / "keys.yaml", ops=("admin", "inference"))
    config = text_config({"one": texts["one"]}, tmp_path, api_keys=keys, experiments=[])
    arms = {"production": {"bundle": texts["one"]}, "candidate": {"bundle": texts["four"]}}
    next_one = {"name": "exp-2", "endpoint": "exp", "arms": arms, "strategy": "gradual", "stages": [0.5, 1.0]}

    async def body(client):
        client.headers.update(bearer("ops"))
        first = {"name": "exp", "arms": {"production": {"bundle": texts["one"]}}}
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
        return before, forced, after, pages

    before, forced, after, pages = with_gateway(config, body)
    assert {answer["experiment"] for answer in before} == {"exp-2"}
    assert {answer["arm"] for answer in before} == {"production", "candidate"}
    assert forced.headers["x-arm"] == "candidate"
    assert {answer["arm"] for answer in after} == {"production"}
    assert [page.status_code for page in pages] == [200] * 4


@given(st.lists(st.lists(st.integers(0, 258), max_size=4), max_size=8))
def test_the_parts_of_a_text_are_the_whole(cuts):
    detokenizer = Detokenizer(TOKENIZER)
    parts = [detokenizer.add(part, False) for part in cuts] + [detokenizer.add([], True)]
    assert "".join(parts) == TOKENIZER.decode([*chain.from_iterable(cuts)], skip_special_tokens=True)


@given(st.text("ab€", max_size=20), st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_hidden_stop_is_told(text, stops):
    # As the decoder does, the response ends with the token that completes a stop.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    text = text[: min(ends, default=len(text))]
    ids = TOKENIZER.encode(text)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    detokenizer = Detokenizer(TOKENIZER, stops)
    told = "".join(detokenizer.add([number], k == len(ids) - 1) for k, number in enumerate(ids))
    assert told == text[: min(found, default=len(text))]


def test_special_tokens_without_a_name_have_no_text_either():
    """The tokenizers of Llama 3 and of most that write ChatML name their end token alone."""
    tokenizer = bytes_with(None, "<|im_end|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end not in tokenizer.all_special_ids
    ids = [*b"ab", end, *b"cd"]
    assert first_stop(tokenizer, ("bc",), ids) == 3
    assert Detokenizer(tokenizer, ("b<|im_end|>",)).add(ids[:3], True) == "a"


@given(st.lists(st.sampled_from(["a", "b", "▁", "\n", "<s>", "</s>"]), max_size=12))
def test_a_special_token_does_not_make_the_next_word_the_first(said):
    tokenizer = spaced(LLAMA2)
    ids = tokenizer.convert_tokens_to_ids(said)
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.add([number], False) for number in ids] + [detokenizer.add([], True)]
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True)


def test_tokens_that_the_tokenizer_does_not_know_have_no_text_either():
    """Models may have more of them, which round their vocabularies up."""
    ids = [*b"a", *[len(TOKENIZER) + 1] * 5, *b"b"]
    assert TOKENIZER.decode(ids) == "ab" and first_stop(TOKENIZER, ("ab",), ids) == 6


@given(
    st.lists(st.sampled_from(["a", "b", "€", "<|reply|>", "<|end|>"]), max_size=12),
    st.lists(st.sampled_from(["ab", "a<|reply|>", "<|reply|>b", "a<|reply|>b", "<|end|>", "b€"]), max_size=2),
)
def test_nothing_of_a_hidden_stop_with_special_tokens_is_told(said, stops):
    ids = TOKENIZER.encode("".join(said))
    at = first_stop(TOKENIZER, tuple(stops), ids) if stops else None
    ids = ids if at is None else ids[: at + 1]
    shown, plain = (TOKENIZER.decode(ids, skip_special_tokens=skip) for skip in (False, True))
    expected = plain
    if at is not None:
        lengths = [len(re.sub(r"<\|\w+\|>", "", s)) for s in stops if shown.endswith(s) or plain.endswith(s)]
        expected = plain[: len(plain) - max(lengths)]
    detokenizer = Detokenizer(TOKENIZER, stops)
    parts = [detokenizer.add([number], k == len(ids) - 1) for k, number in enumerate(ids)]
    assert "".join(parts) == expected


def test_completions_go_on_from_prompts_as_they_are(config, texts):
    """Without the chat template; several prompts are several choices by one arm."""
    path = "/v1/completions"

    async def body(client):
        whole = await post(client, path, TEXT | {"logprobs": 2})
        several = await post(client, path, TEXT | {"prompt": ["hello", "bye"]})
        ids = await post(client, path, TEXT | {"prompt": [*b"hello"]})
        parts = await events(client, path, TEXT | {"prompt": ["hello", [*b"bye"]][:1], "logprobs": 2})
        usage = {"stream_options": {"include_usage": True}}
        both = await events(client, path, TEXT | usage | {"prompt": [[*b"hello"], [*b"bye"]]})
        alone = await client.post(path, json=TEXT | {"user": None})
        return whole, several, ids, parts, both, alone

    whole, several, ids, parts, both, alone = with_gateway(config, body)
    [choice] = whole["choices"]
    [engine] = [
        TorchEngine(b.policies["lm"])
        for b in map(load_bundle, texts.values())
        if b.digest[:16] == whole["system_fingerprint"]
    ]
    [expected] = engine.generate([Prompt(tuple(b"hello"), 5)], 0)
    assert choice["text"] == TOKENIZER.decode(expected.ids, skip_special_tokens=True)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.log_probs, abs=1e-5)
    assert len(choice["logprobs"]["top_logprobs"]) == len(choice["logprobs"]["tokens"]) == 12
    assert choice["logprobs"]["text_offset"][:2] == [0, len(choice["logprobs"]["tokens"][0])]
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert [one["index"] for one in several["choices"]] == [0, 1]
    assert several["choices"][0]["text"] == ids["choices"][0]["text"] == choice["text"] != several["choices"][1]["text"]
    assert several["usage"]["completion_tokens"] == 24
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == choice["text"]
    told = [offset for part in parts[:-1] for offset in part["choices"][0]["logprobs"]["text_offset"]]
    assert told == choice["logprobs"]["text_offset"]
    *chunks, last, done = both
    assert (done, last["choices"], last["usage"]) == ("[DONE]", [], several["usage"])
    for index in (0, 1):
        said = "".join(part["choices"][0]["text"] for part in chunks if part["choices"][0]["index"] == index)
        assert said == several["choices"][index]["text"]
    assert alone.headers["x-session-id"] == alone.json()["id"]


def test_the_most_likely_tokens_are_told_beside_each(config):
    asked = CHAT | {"logprobs": True, "top_logprobs": 3, "temperature": 0}

    async def body(client):
        whole = await post(client, "/v1/chat/completions", asked)
        return whole["choices"][0], await events(client, "/v1/chat/completions", asked)

    choice, parts = with_gateway(config, body)
    content = choice["logprobs"]["content"]
    for token in content:
        tops = token["top_logprobs"]
        assert len(tops) == 3 and tops[0]["token"] == token["token"] and tops[0]["logprob"] == token["logprob"]
        assert [top["logprob"] for top in tops] == sorted((top["logprob"] for top in tops), reverse=True)
    streamed = [token for part in parts[:-1] for token in part["choices"][0]["logprobs"]["content"]]
    assert streamed == content


def test_a_model_is_found_by_its_name(tmp_path):
    agents = {"planner": "p", "critic": "q"}
    config = text_config({"one": make_text_bundle(tmp_path, 1, agents)}, tmp_path)

    async def body(client):
        listed = (await client.get("/v1/models")).json()["data"]
        found = [(await client.get(f"/v1/models/{model['id']}")).json() for model in listed]
        quoted = (await client.get("/v1/models/exp%2Fcritic")).json()
        missing = [await client.get(f"/v1/models/{name}") for name in ("none", "exp", "exp/nobody")]
        return listed, found, quoted, [(answer.status_code, answer.json()["error"]["code"]) for answer in missing]

    listed, found, quoted, missing = with_gateway(config, body)
    assert found == listed and quoted == listed[1] and missing == [(404, "model_not_found")] * 3


def test_what_clients_send_along_is_tolerated(config):
    """Hints for the provider, and what other providers' answers have in their messages."""
    hints = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "reasoning_effort": "low",
        "verbosity": "low",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "logit_bias": {"50256": 0},
        "function_call": "none",
        "tool_choice": "auto",
    }
    answered = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None}
    answered |= {"function_call": None, "tool_calls": None, "reasoning_content": "x", "provider_specific_fields": {}}
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    user = {"role": "user", "content": [part], "name": "Ann"}

    async def body(client):
        plain = await post(client, "/v1/chat/completions", CHAT)
        hinted = await post(client, "/v1/chat/completions", CHAT | hints | {"messages": [user]})
        await post(client, "/v1/chat/completions", CHAT | {"messages": [user, answered, user]})
        options = {"include_usage": True, "include_obfuscation": False}
        streamed = await events(client, "/v1/chat/completions", CHAT | {"stream_options": options})
        return plain["choices"], hinted["choices"], streamed

    plain, hinted, streamed = with_gateway(config, body)
    assert plain == hinted and streamed[-2]["usage"]
