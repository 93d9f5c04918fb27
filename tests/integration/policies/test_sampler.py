"""Sampling responses from language models."""

from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy_models.tokenizers import word_tokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Completion, Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.engines.decoding.decoder import Decoder
from marl_ray.policies.engines.models.cached_forward import ForwardModel
from marl_ray.policies.engines.models.llama import LlamaModel, is_llama
from marl_ray.policies.engines.torch_engine import make_cached_model
from marl_ray.policies.language.lora import add_adapters, without_adapters
from marl_ray.policies.language.sampling_copy import plain_copy, refresh
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy

CONTEXT = 128
SMALL = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILY: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama, yarn": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=YARN)),
    "llama, wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=259, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2)),
    "a sliding window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)),
    "biases": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
}


def restless(lm: Any, seed: int = 0) -> Any:
    """Larger random weights, biases and norms included, so that distributions are not flat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return lm.eval()


def make_policy(lm: Any, tokenizer: Any = None, **generation: Any) -> TokenPolicy:
    config = ModelConfig(preset="tiny-0.2m", context=CONTEXT)
    return TokenPolicy(lm, tokenizer or byte_tokenizer(CONTEXT), config, GenerationConfig(**generation))


@pytest.fixture(scope="module")
def policy() -> TokenPolicy:
    built = build_token_policy(ModelConfig(preset="tiny-0.2m", context=CONTEXT), GenerationConfig(max_tokens=12), 0)
    restless(built.lm)
    return built


def text_prompts(count: int = 4, group: int = 3) -> list[Prompt]:
    """`group` responses each to `count` prompts of different lengths, the first of one token."""
    return [
        Prompt(tuple(range(40, 41 + 5 * number)), stream=100 * number + member)
        for number in range(count)
        for member in range(group)
    ]


def rows_of(prompts: list[Prompt], completions: list[Completion]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prompts, responses, mask and log-probabilities, laid out as in Trajectories."""
    before, after = max(len(p.ids) for p in prompts), max(len(c.ids) for c in completions)
    ids = torch.full((len(prompts), before), -1)
    responses = torch.zeros(len(prompts), after, dtype=torch.long)
    log_probs = torch.zeros(len(prompts), after)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, before - len(prompt.ids) :] = torch.tensor(prompt.ids)
        responses[row, : len(completion.ids)] = torch.tensor(completion.ids)
        log_probs[row, : len(completion.ids)] = torch.tensor(completion.log_probs)
    return ids, responses, torch.arange(after) < torch.tensor([[len(c.ids)] for c in completions]), log_probs


def largest_difference(policy: TokenPolicy, prompts: list[Prompt], completions: list[Completion]) -> float:
    """Between log-probabilities of the sampling pass and of a full pass."""
    ids, responses, mask, log_probs = rows_of(prompts, completions)
    with torch.no_grad():
        full = policy.evaluate(ids, responses, mask).log_probs
    return float((full - log_probs).abs().max())


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]


@pytest.mark.parametrize("name", [*FAMILY, *OTHERS])
def test_log_probs_are_those_of_a_full_pass(name):
    policy = make_policy(restless((FAMILY | OTHERS)[name]()), max_tokens=20, temperature=0.7, top_k=50, top_p=0.9)
    assert is_llama(policy.lm, CONTEXT) == (name in FAMILY)
    prompts = text_prompts()
    completions = make_engine(policy).generate(prompts, 5)
    assert max(len(completion.ids) for completion in completions) > 10
    assert largest_difference(policy, prompts, completions) < 1e-5


@pytest.mark.parametrize("name", FAMILY)
def test_the_short_forward_is_the_models_own(name):
    policy = make_policy(restless(FAMILY[name]()), max_tokens=12)
    prompts = text_prompts()
    answers = []
    for model in (ForwardModel(policy.lm), LlamaModel(policy.lm, CONTEXT), ForwardModel(policy.lm)):
        decoder = Decoder(model, policy.tokenizer, policy.end_tokens)
        decoder.add(prompts, 1, policy.generation)
        tokens = {(t.handle, position): t for position in range(12) for t in decoder.step()}
        answers.append(tokens)
    for other in answers[1:]:
        assert {key: token.id for key, token in other.items()} == {key: t.id for key, t in answers[0].items()}
        assert all(abs(token.log_prob - answers[0][key].log_prob) < 1e-5 for key, token in other.items())


def test_a_model_without_keys_and_values_is_refused_by_name():
    lm = MambaForCausalLM(MambaConfig(vocab_size=259, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(MarlRayError, match="mamba"):
        make_engine(make_policy(lm))


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


def test_greedy_takes_the_most_likely_token(policy):
    engine = make_engine(policy)
    prompt = tuple(b"hello")
    greedy, sampled = engine.generate([Prompt(prompt, 0, greedy=True), Prompt(prompt, 0)], 0)
    assert engine.generate([Prompt(prompt, 7, greedy=True)], 3)[0].ids == greedy.ids != sampled.ids
    with torch.no_grad():
        logits = policy.lm(torch.tensor([[*prompt, *greedy.ids]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == greedy.ids


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


def test_a_stream_gives_the_completions_tokens(policy):
    engine, prompt = make_engine(policy), Prompt(tuple(b"stream"), 3)
    tokens = list(engine.stream(prompt, 0))
    complete = engine.generate([prompt], 0)[0]
    assert [token.id for token in tokens] == complete.ids
    assert [token.log_prob for token in tokens] == complete.log_probs
    assert [token.finish for token in tokens] == [None] * (len(tokens) - 1) + ["stop" if complete.ended else "length"]


def test_the_end_token_ends(policy):
    engine, end = make_engine(policy), policy.tokenizer.eos_token_id
    answers = engine.generate([Prompt((65,), stream) for stream in range(150)], 0, GenerationConfig(max_tokens=40))
    ended = [answer for answer in answers if answer.ended]
    assert ended and len(ended) < len(answers)
    assert all(answer.ids[-1] == end and end not in answer.ids[:-1] for answer in ended)
    assert all(len(answer.ids) == 40 and end not in answer.ids for answer in answers if not answer.ended)


def test_ids_are_never_decoded_and_encoded_again():
    tokenizer = word_tokenizer("a", "b", "ab", "ba", "aa", "q")
    again = [tokenizer.encode(tokenizer.decode([token])) for token in range(6)]
    assert again[2] != [2]  # two tokens for a text that one token had
    policy = make_policy(restless(Qwen2ForCausalLM(Qwen2Config(**SMALL | {"vocab_size": 7}))), tokenizer, stop=("q",))
    prompts = [Prompt((2, 3, 2), stream) for stream in range(40)]
    completions = make_engine(policy).generate(prompts, 0)
    assert largest_difference(policy, prompts, completions) < 1e-5
    texts = [tokenizer.decode(completion.ids, skip_special_tokens=True) for completion in completions]
    assert any(tokenizer.encode(text) != completion.ids for text, completion in zip(texts, completions, strict=True))
    assert all(("q" in text) <= completion.ended for text, completion in zip(texts, completions, strict=True))


def test_a_refresh_needs_no_new_engine():
    trained = build_token_policy(ModelConfig(preset="tiny-0.2m", context=CONTEXT), GenerationConfig(max_tokens=9), 0)
    plain = plain_copy(trained)
    engine, prompts = make_engine(plain), text_prompts()
    before = engine.generate(prompts, 0)
    restless(trained.lm)
    refresh(plain, trained)
    after = engine.generate(prompts, 0)
    assert ids_of(after) != ids_of(before)
    assert largest_difference(trained, prompts, after) < 1e-5
    for parameter in plain.parameters():  # replaced, not written to
        parameter.data = torch.zeros_like(parameter)
    assert largest_difference(plain, prompts, engine.generate(prompts, 0)) < 1e-5


ADAPTED = {
    "gpt2": ("all-linear", "torch"),
    "biases": ("all-linear", "torch"),
    "llama": (["q_proj", "down_proj", "lm_head"], "torch"),
    "llama, wide heads": (["v_proj", "gate_proj", "o_proj"], "torch"),
    "qwen2": ("all-linear", "torch"),
    "qwen3": ("all-linear", "transformers"),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_every_engine_adds_adapters_to_what_it_samples_with(name):
    """Also those that came with a refresh in place, after which the engine is the same."""
    torch.manual_seed(0)  # weights, and with them the rounding, do not depend on the tests before
    targets, engine = ADAPTED[name]
    model = ModelConfig.model_validate({"preset": "tiny-0.2m", "context": CONTEXT, "lora": {"rank": 3, "alpha": 4}})
    lora = model.lora.model_copy(update={"targets": targets})
    lm = restless((FAMILY | OTHERS)[name]())
    add_adapters(lm, lora)
    trained = TokenPolicy(lm, byte_tokenizer(CONTEXT), model, GenerationConfig(max_tokens=8, engine=engine))
    plain, prompts = plain_copy(trained), text_prompts()
    sampler = make_engine(plain)
    for seed in range(2):
        completions = sampler.generate(prompts, 0)
        assert largest_difference(trained, prompts, completions) < 1e-5
        assert largest_difference(plain, prompts, completions) < 1e-5
        with torch.no_grad(), without_adapters(trained.lm):
            assert seed == 0 or largest_difference(trained, prompts, completions) > 0.1
        for parameter in trained.actor_parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        refresh(plain, trained)


def test_bfloat16_weights_sample():
    policy = make_policy(restless(FAMILY["qwen2"]()).to(torch.bfloat16), max_tokens=16)
    prompts = text_prompts()
    completions = make_engine(policy).generate(prompts, 0)
    assert largest_difference(policy, prompts, completions) < 0.2


def test_prompts_that_cannot_be_answered_are_refused(policy):
    engine = make_engine(policy)
    with pytest.raises(MarlRayError, match=r"^prompt: expected at least one token$"):
        engine.generate([Prompt((), 0)], 0)
    with pytest.raises(MarlRayError, match=r"model\.context"):
        engine.generate([Prompt((1,) * CONTEXT, 0)], 0)


def test_logits_that_are_no_numbers_are_named():
    lm = FAMILY["llama"]()
    torch.nn.init.constant_(lm.lm_head.weight, torch.nan)
    with pytest.raises(MarlRayError, match=r"^the language model's logits are not finite$"):
        make_engine(make_policy(lm)).generate([Prompt((1,), 0)], 0)


@pytest.mark.parametrize("stop", [(), ("e", "\n\n")])
def test_transformers_continuous_batching_gives_the_same_responses(policy, stop):
    paged = make_engine(
        TokenPolicy(policy.lm, policy.tokenizer, policy.config, GenerationConfig(engine="transformers"))
    )
    generation = GenerationConfig(max_tokens=12, temperature=0.9, top_k=30, stop=stop)
    prompts = [*text_prompts(), Prompt((65, 66), 5, greedy=True)]
    expected = make_engine(policy).generate(prompts, 6, generation)
    answers = paged.generate(prompts, 6, generation)
    assert [(answer.ids, answer.ended) for answer in answers] == [(other.ids, other.ended) for other in expected]
    assert answers[0].log_probs == pytest.approx(expected[0].log_probs, abs=1e-5)
    assert [token.id for token in paged.stream(prompts[0], 6, generation)] == answers[0].ids
    assert make_engine(policy).generate(prompts, 6, generation) == expected  # it leaves the model as it was


def test_transformers_reads_more_prompts_than_fit_into_a_step(policy):
    """2,160 tokens, of which a step reads 2,048: one prompt is read in two steps, and gets its first token in the second."""
    paged = make_engine(
        TokenPolicy(policy.lm, policy.tokenizer, policy.config, GenerationConfig(engine="transformers"))
    )
    generation = GenerationConfig(max_tokens=2)
    prompts = [Prompt(tuple((7 * row + place) % 250 for place in range(60)), row) for row in range(36)]
    assert ids_of(paged.generate(prompts, 6, generation)) == ids_of(
        make_engine(policy).generate(prompts, 6, generation)
    )


def test_transformers_thread_that_has_ended_is_an_error_at_once(policy, monkeypatch):
    monkeypatch.setattr(ContinuousBatchingManager, "start", lambda manager: None)  # as if its thread died at once
    paged = make_engine(
        TokenPolicy(policy.lm, policy.tokenizer, policy.config, GenerationConfig(engine="transformers"))
    )
    with pytest.raises(
        MarlRayError, match=r"^generation\.engine=transformers: its thread ended before 2 of 2 responses$"
    ):
        paged.generate(text_prompts()[:2], 6, GenerationConfig(max_tokens=2))


def test_vllm_asks_for_what_it_needs(policy):
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with_vllm = TokenPolicy(policy.lm, policy.tokenizer, policy.config, GenerationConfig(engine="vllm"))
    with pytest.raises(MarlRayError, match=r"expected the package vllm; pip install .*\[vllm\]'"):
        make_engine(with_vllm)
