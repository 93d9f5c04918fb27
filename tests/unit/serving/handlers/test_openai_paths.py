"""OpenAI's paths in the gateway: chats, completions and names of models."""

import pytest
from toy_serving.gateways import serving
from toy_serving.text_gateways import ASK, CHAT, TEXT, events, make_text_bundle, post, text_config

from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.torch_engine import TorchEngine
from marl_ray.policies.language.tiny_models import byte_tokenizer

TOKENIZER = byte_tokenizer()


async def test_a_chat_is_the_text_in_openais_words(text_gateway, text_bundles):
    async with serving(text_gateway) as (client, _):
        reply = await post(client, "/generate", ASK)
        chat = await post(client, "/v1/chat/completions", CHAT | {"logprobs": True})
        usage = {"stream_options": {"include_usage": True}}
        parts = await events(client, "/v1/chat/completions", CHAT | usage)
        split = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        other = await post(client, "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": split}]})
        listed = (await client.get("/v1/models")).json()
    [choice] = chat["choices"]
    assert choice["message"] == {"role": "assistant", "content": reply["text"], "refusal": None}
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == reply["log_probs"]
    # A token of these models is a byte, the end token has no text.
    assert [token["bytes"] for token in choice["logprobs"]["content"]] == [
        [number] if number < 256 else None for number in reply["tokens"]
    ]
    assert chat["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
    assert chat["system_fingerprint"] == load_bundle(text_bundles[reply["arm"]]).digest[:16]
    assert other["choices"][0]["message"] == choice["message"]
    *chunks, last, done = parts
    assert done == "[DONE]" and last["usage"] == chat["usage"] and last["choices"] == []
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == reply["text"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert [model["id"] for model in listed["data"]] == ["exp"] and len(listed["models"]) == 2


async def test_stop_strings_end_texts_and_chats_do_not_show_them(text_gateway):
    async with serving(text_gateway) as (client, _):
        free = await post(client, "/generate", ASK | {"max_tokens": 40})
        text = free["text"]
        at = next(k for k in range(3, len(text) - 2) if text[k : k + 2].isascii() and text.find(text[k : k + 2]) == k)
        stop = text[at : at + 2]
        reply = await post(client, "/generate", ASK | {"max_tokens": 40, "stop": stop})
        parts = await events(client, "/v1/chat/completions", CHAT | {"max_tokens": 40, "stop": ["never", stop]})
        before = text[:at]
    assert (reply["text"], reply["finish_reason"]) == (before + stop, "stop")
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts[:-1]) == before


async def test_completions_go_on_from_prompts_as_they_are(text_gateway, text_bundles):
    """Without the chat template; several prompts are several choices by one arm."""
    path = "/v1/completions"

    async with serving(text_gateway) as (client, _):
        full = await post(client, path, TEXT | {"logprobs": 2})
        several = await post(client, path, TEXT | {"prompt": ["hello", "bye"]})
        ids = await post(client, path, TEXT | {"prompt": [*b"hello"]})
        parts = await events(client, path, TEXT | {"prompt": ["hello", [*b"bye"]][:1], "logprobs": 2})
        usage = {"stream_options": {"include_usage": True}}
        both = await events(client, path, TEXT | usage | {"prompt": [[*b"hello"], [*b"bye"]]})
        alone = await client.post(path, json=TEXT | {"user": None})
    [choice] = full["choices"]
    [engine] = [
        TorchEngine(b.policies["lm"])
        for b in map(load_bundle, text_bundles.values())
        if b.digest[:16] == full["system_fingerprint"]
    ]
    [expected] = engine.generate([Prompt(tuple(b"hello"), 5)], 0)
    assert choice["text"] == TOKENIZER.decode(expected.ids, skip_special_tokens=True)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.log_probs, abs=1e-5)
    assert len(choice["logprobs"]["top_logprobs"]) == len(choice["logprobs"]["tokens"]) == 12
    assert choice["logprobs"]["text_offset"][:2] == [0, len(choice["logprobs"]["tokens"][0])]
    assert full["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert [answer["index"] for answer in several["choices"]] == [0, 1]
    assert several["choices"][0]["text"] == ids["choices"][0]["text"] == choice["text"] != several["choices"][1]["text"]
    assert several["usage"]["completion_tokens"] == 24
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == choice["text"]
    offsets = [offset for part in parts[:-1] for offset in part["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]
    *chunks, last, done = both
    assert (done, last["choices"], last["usage"]) == ("[DONE]", [], several["usage"])
    for index in (0, 1):
        text = "".join(part["choices"][0]["text"] for part in chunks if part["choices"][0]["index"] == index)
        assert text == several["choices"][index]["text"]
    assert alone.headers["x-session-id"] == alone.json()["id"]


async def test_the_most_likely_tokens_are_told_beside_each(text_gateway):
    question = CHAT | {"logprobs": True, "top_logprobs": 3, "temperature": 0}

    async with serving(text_gateway) as (client, _):
        full = await post(client, "/v1/chat/completions", question)
        choice = full["choices"][0]
        parts = await events(client, "/v1/chat/completions", question)
    content = choice["logprobs"]["content"]
    for token in content:
        tops = token["top_logprobs"]
        assert len(tops) == 3 and tops[0]["token"] == token["token"] and tops[0]["logprob"] == token["logprob"]
        assert [top["logprob"] for top in tops] == sorted((top["logprob"] for top in tops), reverse=True)
    streamed = [token for part in parts[:-1] for token in part["choices"][0]["logprobs"]["content"]]
    assert streamed == content


async def test_a_model_is_found_by_its_name(tmp_path):
    agents = {"planner": "p", "critic": "q"}
    config = text_config({"one": make_text_bundle(tmp_path, 1, agents)}, tmp_path)

    async with serving(config) as (client, _):
        listed = (await client.get("/v1/models")).json()["data"]
        models = [(await client.get(f"/v1/models/{model['id']}")).json() for model in listed]
        quoted = (await client.get("/v1/models/exp%2Fcritic")).json()
        missing = [await client.get(f"/v1/models/{name}") for name in ("none", "exp", "exp/nobody")]
        missing = [(answer.status_code, answer.json()["error"]["code"]) for answer in missing]
    assert models == listed and quoted == listed[1] and missing == [(404, "model_not_found")] * 3
