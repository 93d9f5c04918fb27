"""Requests for texts: the fields that are refused, with their errors, and the unusual ones that are accepted."""

import json
from typing import Any

import pytest
from toy_serving.gateways import bearer, make_bundle, serving, write_keys
from toy_serving.text_gateways import ASK, CHAT, CONTEXT, TEXT, events, make_text_bundle, post, rows, text_config

from marl_ray.errors import MarlRayError
from marl_ray.serving.asgi import Gateway

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
    ("/generate", {"agent": ["writer"]}, 400, "agent"),
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


async def test_wrong_requests_are_refused_by_name_and_no_arm_is_blamed(text_gateway):
    async with serving(text_gateway) as (client, app):
        unexpected = []
        for path, change, status, field in WRONG:
            answer = await client.post(path, json=BODIES[path] | change)
            error = answer.json()["error"]
            is_named = (answer.status_code, error["field"]) == (status, field)
            is_openais = path == "/generate" or (
                (error["param"], error["type"]) == (field, "invalid_request_error")
                and error.keys() == {"message", "type", "param", "code", "field"}
            )
            if not (is_named and is_openais):
                unexpected.append((path, change, answer.text))
        assert unexpected == []
        metrics = (await client.get("/metrics")).text
        assert "marl_ray_gateway_arm_failures_total{" not in metrics and rows(app) == 0


async def test_neutral_fields_and_tiny_temperatures_are_fine(text_gateway):
    neutral = {"n": 1, "presence_penalty": 0.0, "tools": [], "logit_bias": None, "response_format": {"type": "text"}}

    async with serving(text_gateway) as (client, _):
        cold = [await post(client, "/v1/chat/completions", CHAT | neutral | {"temperature": t}) for t in (0, 1e-38)]
        await post(client, "/v1/chat/completions", CHAT | {"top_p": 5e-324, "top_logprobs": 0})
        greedy, cold = [chat["choices"][0]["message"]["content"] for chat in cold]
    assert greedy == cold


async def test_actor_critics_have_no_text_and_are_in_no_list(tmp_path):
    config = text_config({"one": make_bundle(tmp_path, 1)}, tmp_path)

    async with serving(config) as (client, _):
        refused = [await client.post("/generate", json=ASK), await client.post("/v1/chat/completions", json=CHAT)]
        assert (
            [(answer.status_code, answer.json()["error"]["field"]) for answer in refused],
            (await client.get("/v1/models")).json()["data"],
        ) == ([(422, "experiment"), (422, "model")], [])


async def test_keys_are_needed_and_errors_tell_openais_clients_so(text_gateway, tmp_path):
    keys = write_keys(tmp_path / "keys.yaml", game=("inference",), ops=("admin",))

    async with serving(text_gateway.model_copy(update={"api_keys": keys})) as (client, _):
        for shown, status, kind in (({}, 401, "authentication_error"), (bearer("ops"), 403, "permission_error")):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=shown)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        await post(client, "/v1/chat/completions", CHAT, headers=bearer("game"))


def test_what_texts_cannot_do_is_refused_in_one_line(text_bundles, tmp_path):
    def refusal(bundles: dict[str, str], **more: Any) -> str:
        with pytest.raises(MarlRayError) as caught:
            Gateway(text_config(bundles, tmp_path, **more))
        return str(caught.value)

    mixed = refusal(text_bundles | {"four": make_bundle(tmp_path, 4)})
    assert mixed == "experiments.exp.arms.four: holds actor-critics, arm 'one' holds language models"
    other = refusal(text_bundles | {"four": make_text_bundle(tmp_path, 4, {"reader": "lm"})})
    assert other == "experiments.exp.arms.four: plays agents reader, arm 'one' plays writer"


async def test_what_clients_send_along_is_tolerated(text_gateway):
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
    answered: dict[str, Any] = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None}
    answered |= {"function_call": None, "tool_calls": None, "reasoning_content": "x", "provider_specific_fields": {}}
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    user = {"role": "user", "content": [part], "name": "Ann"}

    async with serving(text_gateway) as (client, _):
        plain = await post(client, "/v1/chat/completions", CHAT)
        hinted = await post(client, "/v1/chat/completions", CHAT | hints | {"messages": [user]})
        await post(client, "/v1/chat/completions", CHAT | {"messages": [user, answered, user]})
        options = {"include_usage": True, "include_obfuscation": False}
        streamed = await events(client, "/v1/chat/completions", CHAT | {"stream_options": options})
        plain = plain["choices"]
        hinted = hinted["choices"]
    assert plain == hinted and streamed[-2]["usage"]
