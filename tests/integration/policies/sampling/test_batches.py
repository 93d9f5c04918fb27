"""Rows of a batch that is sampled: none depends on those beside it, on their settings, or on when they join and leave."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models.sampling import ids_of, text_prompts

from marl_ray.config.run.model import GenerationConfig
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.engines.decoding.decoder import Decoder
from marl_ray.policies.engines.torch_engine import make_cached_model


@settings(max_examples=8)
@given(st.data())
def test_a_completion_does_not_depend_on_its_batch(policy, data):
    engine, prompts = make_engine(policy), text_prompts()
    together = engine.generate(prompts, 9)
    chosen = data.draw(st.lists(st.sampled_from(range(len(prompts))), min_size=1, unique=True))
    assert ids_of(engine.generate([prompts[i] for i in chosen], 9)) == [together[i].ids for i in chosen]


def test_a_small_cache_only_makes_it_slower(policy, monkeypatch):
    engine, prompts = make_engine(policy), text_prompts()
    free = engine.generate(prompts, 2)
    monkeypatch.setattr("marl_ray.policies.engines.torch_engine.CACHE_BYTES", 100_000)  # three rows
    monkeypatch.setattr("marl_ray.policies.engines.decoding.decoder.MAX_PREFILL_TOKENS", 8)
    assert ids_of(engine.generate(prompts, 2)) == ids_of(free)
    assert engine.generate([], 2) == []


def test_other_seeds_and_streams_give_other_responses(policy):
    engine = make_engine(policy)
    prompt = Prompt((65, 66), 0)
    answers = [*engine.generate([prompt, Prompt((65, 66), 1)], 0), *engine.generate([prompt], 1)]
    assert len({tuple(answer.ids) for answer in answers}) == 3


def test_rows_join_and_leave_between_steps(policy):
    prompts = text_prompts()
    alone = {
        p: make_engine(policy).generate([p], 4, GenerationConfig(max_tokens=12 if i % 2 else 30))[0]
        for i, p in enumerate(prompts)
    }
    decoder = Decoder(make_cached_model(policy), policy.tokenizer, policy.end_tokens)
    got: dict[int, list[int]] = {}
    owner: dict[int, Prompt] = {}
    lost = decoder.add([Prompt(tuple(range(50)), 1)], 4, GenerationConfig(max_tokens=50))[0]
    finishes: Counter[str | None] = Counter()
    for number, prompt in enumerate(prompts):
        [handle] = decoder.add([prompt], 4, GenerationConfig(max_tokens=12 if number % 2 else 30))
        owner[handle], got[handle] = prompt, []
        if number == 6:
            decoder.remove(lost)
        for token in [*decoder.step(), *decoder.step(), *decoder.step()]:
            got.setdefault(token.handle, []).append(token.id)
            finishes[token.finish] += 1
    while len(decoder):
        for token in decoder.step():
            got[token.handle].append(token.id)
            finishes[token.finish] += 1
    assert {owner[handle]: ids for handle, ids in got.items() if handle != lost} == {p: c.ids for p, c in alone.items()}
    assert finishes["stop"] + finishes["length"] == len(prompts)
    assert decoder.step() == []
    with pytest.raises(KeyError):
        decoder.remove(lost)


def test_a_row_whose_logits_are_not_finite_takes_no_other_with_it(policy):
    """Neither those beside it, nor those that take its place in the cache."""
    generation, engine = GenerationConfig(max_tokens=12), make_engine(policy)
    prompts = [Prompt(tuple(text), k) for k, text in enumerate((b"one", b"a longer prompt", b"three", b"late one"))]
    expected = [engine.generate([prompt], 0, generation)[0].ids for prompt in prompts]
    decoder = Decoder(make_cached_model(policy), policy.tokenizer, policy.end_tokens, rows=3)
    handles = [decoder.add([prompt], 0, generation)[0] for prompt in prompts[:3]]
    with torch.inference_mode():
        decoder.cache.storage[1] = torch.nan
    got: dict[int, list[int]] = {handle: [] for handle in handles}
    lost: list[int] = []
    for token in decoder.step(lost):
        got[token.handle].append(token.id)
    assert lost == [handles[1]]
    late = decoder.add([prompts[3]], 0, generation)[0]
    got[late] = []
    while len(decoder):
        for token in decoder.step(lost):
            got[token.handle].append(token.id)
    assert lost == [handles[1]] and [got[handles[0]], got[handles[2]], got[late]] == [expected[k] for k in (0, 2, 3)]


def test_rows_with_other_settings_share_a_batch(policy):
    settings_ = [GenerationConfig(max_tokens=9), GenerationConfig(max_tokens=9, temperature=0.3, top_k=4)]
    prompt = Prompt(tuple(b"some text"), 11)
    decoder = Decoder(make_cached_model(policy), policy.tokenizer, policy.end_tokens)
    for generation in settings_:
        decoder.add([prompt], 0, generation)
    got: dict[int, list[int]] = {0: [], 1: []}
    while len(decoder):
        for token in decoder.step():
            got[token.handle].append(token.id)
    engine = make_engine(policy)
    assert list(got.values()) == [engine.generate([prompt], 0, generation)[0].ids for generation in settings_]
