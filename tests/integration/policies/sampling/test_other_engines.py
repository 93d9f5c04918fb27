"""The engines beside the built-in one: transformers gives the same responses, and vllm asks for its package."""

from importlib.util import find_spec

import pytest
from toy_models.sampling import ids_of, text_prompts
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.language.token_policy import TokenPolicy


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
