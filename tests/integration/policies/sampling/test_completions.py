"""One completion: its greedy tokens, its end, its stream, and the prompts that get none."""

import pytest
import torch
from toy_models.sampling import CONTEXT

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.choice import make_engine


def test_greedy_takes_the_most_likely_token(policy):
    engine = make_engine(policy)
    prompt = tuple(b"hello")
    greedy, sampled = engine.generate([Prompt(prompt, 0, greedy=True), Prompt(prompt, 0)], 0)
    assert engine.generate([Prompt(prompt, 7, greedy=True)], 3)[0].ids == greedy.ids != sampled.ids
    with torch.no_grad():
        logits = policy.lm(torch.tensor([[*prompt, *greedy.ids]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == greedy.ids


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


def test_prompts_that_cannot_be_answered_are_refused(policy):
    engine = make_engine(policy)
    with pytest.raises(MarlRayError, match=r"^prompt: expected at least one token$"):
        engine.generate([Prompt((), 0)], 0)
    with pytest.raises(MarlRayError, match=r"model\.context"):
        engine.generate([Prompt((1,) * CONTEXT, 0)], 0)
