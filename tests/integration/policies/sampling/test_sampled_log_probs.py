"""Log-probabilities of sampled tokens: those of a full forward pass, in every family of models."""

import pytest
import torch
from toy_models.sampling import (
    CONTEXT,
    LLAMAS,
    OTHER_MODELS,
    SIZES,
    add_weight_noise,
    largest_difference,
    make_policy,
    text_prompts,
)
from toy_models.tokenizers import word_tokenizer
from transformers import MambaConfig, MambaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.engines.decoding.decoder import Decoder
from marl_ray.policies.engines.models.cached_forward import ForwardModel
from marl_ray.policies.engines.models.llama import LlamaModel, is_llama


@pytest.mark.parametrize("name", [*LLAMAS, *OTHER_MODELS])
def test_log_probs_are_those_of_a_full_pass(name):
    policy = make_policy(
        add_weight_noise((LLAMAS | OTHER_MODELS)[name]()), max_tokens=20, temperature=0.7, top_k=50, top_p=0.9
    )
    assert is_llama(policy.lm, CONTEXT) == (name in LLAMAS)
    prompts = text_prompts()
    completions = make_engine(policy).generate(prompts, 5)
    assert max(len(completion.ids) for completion in completions) > 10
    assert largest_difference(policy, prompts, completions) < 1e-5


@pytest.mark.parametrize("name", LLAMAS)
def test_the_short_forward_is_the_models_own(name):
    policy = make_policy(add_weight_noise(LLAMAS[name]()), max_tokens=12)
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


def test_ids_are_never_decoded_and_encoded_again():
    tokenizer = word_tokenizer("a", "b", "ab", "ba", "aa", "q")
    again = [tokenizer.encode(tokenizer.decode([token])) for token in range(6)]
    assert again[2] != [2]  # two tokens for a text that one token had
    policy = make_policy(
        add_weight_noise(Qwen2ForCausalLM(Qwen2Config(**SIZES | {"vocab_size": 7}))), tokenizer, stop=("q",)
    )
    prompts = [Prompt((2, 3, 2), stream) for stream in range(40)]
    completions = make_engine(policy).generate(prompts, 0)
    assert largest_difference(policy, prompts, completions) < 1e-5
    texts = [tokenizer.decode(completion.ids, skip_special_tokens=True) for completion in completions]
    assert any(tokenizer.encode(text) != completion.ids for text, completion in zip(texts, completions, strict=True))
    assert all(("q" in text) <= completion.ended for text, completion in zip(texts, completions, strict=True))


def test_bfloat16_weights_sample():
    policy = make_policy(add_weight_noise(LLAMAS["qwen2"]()).to(torch.bfloat16), max_tokens=16)
    prompts = text_prompts()
    completions = make_engine(policy).generate(prompts, 0)
    assert largest_difference(policy, prompts, completions) < 0.2


def test_logits_that_are_no_numbers_are_named():
    lm = LLAMAS["llama"]()
    torch.nn.init.constant_(lm.lm_head.weight, torch.nan)
    with pytest.raises(MarlRayError, match=r"^the language model's logits are not finite$"):
        make_engine(make_policy(lm)).generate([Prompt((1,), 0)], 0)
