"""Biases and penalties on logits: against plain loops, and as OpenAI's clients ask for them."""

from collections import Counter

import pytest
import torch
from toy_serving.gateways import serving
from toy_serving.text_gateways import CHAT, TEXT, events, post

from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.decoding.logit_bias import LogitBias
from marl_ray.policies.engines.decoding.sampling import draw
from marl_ray.policies.engines.torch_engine import TorchEngine
from marl_ray.policies.language.philox import token_uniforms


@pytest.mark.parametrize("bias", [LogitBias(((7, 3.0), (9, -4.0))), LogitBias(presence=1.5, frequency=-0.7)])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_biased_row_is_drawn_from_shifted_logits_and_its_company_is_as_ever(text_bundles, bias, greedy):
    """Token by token from a pass over the whole text, with the formula of OpenAI's API."""
    policy = load_bundle(text_bundles["one"]).policies["lm"]
    engine = TorchEngine(policy)
    plain, biased = Prompt(tuple(b"hello"), 1), Prompt(tuple(b"hello"), 2, greedy, bias=bias)
    decoder = engine.decoder()
    rows = dict(zip(decoder.add([plain, biased], 0, policy.generation), ("plain", "biased"), strict=True))
    pairs: dict[str, list[tuple[int, float]]] = {"plain": [], "biased": []}
    while len(decoder):
        for token in decoder.step():
            pairs[rows[token.handle]].append((token.id, token.log_prob))
    assert [pair[0] for pair in pairs["plain"]] == engine.generate([plain], 0)[0].ids
    uniforms = torch.from_numpy(token_uniforms(0, [2], len(pairs["biased"]))[0])
    ids: list[int] = []
    for step, (token_id, log_prob) in enumerate(pairs["biased"]):
        with torch.no_grad():
            logits = policy.lm(torch.tensor([[*b"hello", *ids]])).logits[0, -1].float()
        counts = Counter(ids)
        shifted = logits.clone()
        for number, value in bias.tokens:
            shifted[number] += value
        for number, count in counts.items():
            shifted[number] -= bias.frequency * count + bias.presence
        kind = torch.tensor([True]) if greedy else None
        expected, _ = draw(shifted[None], uniforms[step : step + 1], kind, policy.generation.temperature)
        assert token_id == expected.item()
        assert log_prob == pytest.approx(
            logits.div(policy.generation.temperature).log_softmax(0)[token_id].item(), abs=1e-4
        )
        ids.append(token_id)


async def test_clients_force_and_forbid_tokens_and_repeat_less(text_gateway):
    letter = ord("q")

    async with serving(text_gateway) as (client, _):
        plain = await post(client, "/v1/completions", TEXT | {"logprobs": 0})
        forced = await post(client, "/v1/completions", TEXT | {"logit_bias": {str(letter): 100}})
        chat = await post(client, "/v1/chat/completions", CHAT | {"logit_bias": {str(letter): 100, "1": 0}})
        parts = await events(client, "/v1/chat/completions", CHAT | {"logit_bias": {str(letter): 100}})
        fresh = TEXT | {"logit_bias": {str(letter): 40, str(letter + 1): 39.5}, "presence_penalty": 2, "temperature": 0}
        none = TEXT | {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": None}
        fresh = await post(client, "/v1/completions", fresh)
        none = await post(client, "/v1/completions", none)
    assert forced["choices"][0]["text"] == chat["choices"][0]["message"]["content"] == "q" * 12
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts[:-1]) == "q" * 12
    assert set(fresh["choices"][0]["text"]) == {"q", "r"}
    assert none["choices"][0]["text"] == plain["choices"][0]["text"] != forced["choices"][0]["text"]
