"""An arm whose responses vLLM writes."""

import asyncio
import os
import signal

import pytest
import torch
from toy_serving.gateways import with_gateway
from toy_serving.text_gateways import events, make_text_bundle, post, text_config

from marl_ray.config import ArmConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.prompting.prompts import encode_prompt
from marl_ray.serving.arms.errors import ArmError
from marl_ray.serving.arms.protocol import ResponseChunk, TextRequest
from marl_ray.serving.arms.text.batcher import TextBatcher


def test_an_arm_streams_and_batches_beside_one_of_the_built_in_decoder(tmp_path):
    bundle = make_text_bundle(tmp_path, 1, context=64)
    config = text_config({"own": bundle, "other": make_text_bundle(tmp_path, 2, context=64)}, tmp_path)
    experiment = config.experiments[0]
    arms = experiment.arms | {"own": experiment.arms["own"].model_copy(update={"engine": "vllm"})}
    config = config.model_copy(update={"experiments": (experiment.model_copy(update={"arms": arms}),)})
    requests = [{"session_id": f"s{k}", "prompt": "a" * (1 + k), "seed": k, "max_tokens": 4 + k} for k in range(8)]

    async def body(client):
        together = await asyncio.gather(*(post(client, "/generate", request) for request in requests))
        streamed = [await events(client, "/generate", request) for request in requests]
        json_object = {"response_format": {"type": "json_object"}}
        chat = {"model": "exp", "messages": [{"role": "user", "content": "hello"}]} | json_object
        refused = [
            await client.post("/v1/chat/completions", json=chat | {"user": request["session_id"]})
            for request in requests
        ]
        return together, streamed, refused, [await tops(client, request["session_id"]) for request in requests]

    async def tops(client, session):
        chat = {"model": "exp", "messages": [{"role": "user", "content": "hello"}], "user": session, "max_tokens": 12}
        top = chat | {"logprobs": True, "top_logprobs": 2}
        penalty = await client.post("/v1/chat/completions", json=chat | {"frequency_penalty": 1})
        answers = [await post(client, "/v1/chat/completions", top | {"temperature": heat}) for heat in (0, 1, 2)]
        return penalty, [answer["choices"][0]["logprobs"]["content"] for answer in answers]

    together, streamed, refused, named = with_gateway(config, body)
    assert {full["arm"] for full in together} == {"own", "other"}
    policy = load_bundle(bundle).policies["lm"]
    # Tokens that are ready together make one part; on a busy machine those of a short response may all be.
    assert max(len(parts) for full, parts in zip(together, streamed, strict=True) if full["arm"] == "own") > 1
    for request, full, parts, answer in zip(requests, together, streamed, refused, strict=True):
        assert [token for part in parts for token in part["tokens"]] == full["tokens"]
        if full["arm"] == "own":
            prompt = torch.tensor([encode_prompt(policy.tokenizer, request["prompt"], True)])
            ids = torch.tensor([full["tokens"]])
            scores = policy.evaluate(prompt, ids, torch.ones_like(ids, dtype=torch.bool), need_entropy=False).log_probs
            assert full["log_probs"] == pytest.approx(scores[0].tolist(), abs=1e-5)
            assert answer.status_code == 400 and "engine=vllm writes no JSON" in answer.text
    for full, (penalty, written) in zip(together, named, strict=True):
        assert full["arm"] == "other" or penalty.json()["error"]["param"] == "frequency_penalty"
        for tokens in written:
            assert {len(token["top_logprobs"]) for token in tokens} == {2}
            for token in tokens:
                first, second = (other["logprob"] for other in token["top_logprobs"])
                assert first >= second and first >= token["logprob"] - 1e-5
        assert all(token["token"] == token["top_logprobs"][0]["token"] for token in written[0])


def test_responses_fail_with_their_engine_and_the_next_ones_are_written_by_another(tmp_path):
    arm = TextBatcher(load_bundle(make_text_bundle(tmp_path, 1, context=64)), 4, 120.0, "vllm")
    request = TextRequest("writer", "hello", 5)

    async def ids() -> list[int]:
        reply = arm.write(request)
        pieces: list[ResponseChunk] = []
        while not pieces or pieces[-1].finish is None:
            pieces.append(await reply.next())
        return [token for piece in pieces for token in piece.ids]

    async def body() -> None:
        expected = await ids()
        os.kill(arm.batch("writer").engine.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]  # vLLM's engine
        with pytest.raises(ArmError, match=r"generation\.engine=vllm: its process died"):
            await ids()
        assert await ids() == expected

    try:
        asyncio.run(body())
    finally:
        arm.close()


def test_an_external_arm_has_no_engine_of_ours():
    with pytest.raises(MarlRayError, match="engine: only read with bundle"):
        parse_config(ArmConfig, {"url": "https://x.y/v1", "model": "m", "engine": "vllm"})
