"""vLLM samples from the weights that the policy has.

A fault of its process is one named error, or a response that is written again. A process takes ten seconds of CPU time
to start, so the tests share two, and those that end one come last.
"""

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_models.sampled_by_vllm import Sampled

from marl_ray.config.run.model import GenerationConfig, LoraConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Completion, EngineLostError, EngineRefusedError, Prompt
from marl_ray.policies.engines.torch_engine import TorchEngine
from marl_ray.policies.engines.vllm.process import child
from marl_ray.policies.engines.vllm.process.child import VllmProcess
from marl_ray.policies.engines.vllm.process.messages import VllmRequest
from marl_ray.policies.engines.vllm.weight_transfers import SharedMemoryTransfer

PROMPTS = [Prompt(tuple(range(40 + i, 60 + 2 * i)), stream=i) for i in range(8)]
EXACT = 1e-5
"""Greatest difference of log-probabilities in float32."""


@pytest.fixture(scope="module")
def sampled() -> Iterator[Sampled]:
    """A policy that is sampled whole."""
    policy = Sampled()
    yield policy
    policy.engine.close()


@pytest.fixture(scope="module")
def adapted() -> Iterator[Sampled]:
    """A policy of which vLLM gets an adapter after each update."""
    policy = Sampled(LoraConfig(rank=4, alpha=16))
    yield policy
    policy.engine.close()


def vllm_request(handle: int) -> VllmRequest:
    return VllmRequest(handle, (5, 6, 7), 1.0, 0, 1.0, 8, (257,), 1)


def update(sampled: Sampled, version: int) -> dict[str, Any]:
    """The message about weights of this version in the engine's memory."""
    transfer = sampled.engine.transfer
    assert isinstance(transfer, SharedMemoryTransfer)
    return {"layout": transfer.memory.layout, "version": version}


def gap(sampled: Sampled, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> float:
    """Greatest difference from the policy's own log-probabilities, from a full pass for each response."""
    differences = []
    for prompt, completion in zip(prompts, completions, strict=True):
        context, response = (torch.tensor([ids]) for ids in (prompt.ids, completion.ids))
        with torch.no_grad():
            scores = sampled.plain.evaluate(context, response, torch.ones_like(response, dtype=torch.bool)).log_probs[0]
        differences += (scores - torch.tensor(completion.log_probs)).abs().tolist()
    return max(differences)


def test_log_probs_are_the_policys_before_and_after_every_update(sampled):
    before = sampled.engine.generate(PROMPTS, 7)
    assert gap(sampled, PROMPTS, before) < EXACT
    for number in range(2):
        sampled.update(number)
        after = sampled.engine.generate(PROMPTS, 7)
        assert gap(sampled, PROMPTS, after) < EXACT
        assert {answer.version for answer in after} == {sampled.plain.version}
        assert [answer.ids for answer in after] != [answer.ids for answer in before]
        before = after


def test_a_response_depends_on_its_stream_and_seed_and_not_on_the_batch(sampled):
    together = sampled.engine.generate(PROMPTS, 3)
    assert [sampled.engine.generate([prompt], 3)[0].ids for prompt in PROMPTS[:2]] == [
        answer.ids for answer in together[:2]
    ]
    assert sampled.engine.generate(PROMPTS, 4) != together
    twins = sampled.engine.generate([PROMPTS[0], Prompt(PROMPTS[0].ids, stream=99)], 3)
    assert twins[0].ids == together[0].ids != twins[1].ids


def test_the_most_likely_tokens_are_those_of_the_built_in_decoder(sampled):
    greedy = [Prompt(prompt.ids, prompt.stream, greedy=True) for prompt in PROMPTS]
    generation = GenerationConfig(max_tokens=16)
    built_in = TorchEngine(sampled.plain).generate(greedy, 0, generation)
    other = sampled.engine.generate(greedy, 0, generation)
    assert [(answer.ids, answer.ended) for answer in other] == [(answer.ids, answer.ended) for answer in built_in]


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5, "temperature": 2.0}])
def test_log_probs_are_of_the_whole_distribution_at_the_temperature(sampled, changes):
    """`Sampled` has temperature 1, at which the policy's own evaluation scores."""
    generation = GenerationConfig(max_tokens=12, **changes)
    answers = sampled.engine.generate(PROMPTS, 5, generation)
    if generation.temperature == 1:
        assert gap(sampled, PROMPTS, answers) < EXACT
    if generation.top_k:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            for end, token in enumerate(answer.ids):
                ids = torch.tensor([[*prompt.ids, *answer.ids[:end]]])
                with torch.no_grad():
                    logits = sampled.plain.lm(ids).logits[0, -1]
                assert token in logits.topk(generation.top_k).indices


def test_a_response_ends_with_an_end_token_a_stop_string_or_its_length(sampled):
    expected = sampled.engine.generate(PROMPTS, 1, GenerationConfig(max_tokens=20))
    at = next(place for place, token in enumerate(expected[0].ids) if 32 < token < 127)  # its byte is its text
    stopped = sampled.engine.generate(PROMPTS, 1, GenerationConfig(max_tokens=20, stop=(chr(expected[0].ids[at]),)))
    assert stopped[0].ids == expected[0].ids[: at + 1] and stopped[0].ended
    for answer in expected:
        ends = [token in sampled.plain.end_tokens for token in answer.ids]
        assert not any(ends[:-1]) and answer.ended == ends[-1]
        assert answer.ended or len(answer.ids) == 20
    [completion] = sampled.engine.generate(PROMPTS[:1], 1, GenerationConfig(max_tokens=1))
    assert completion.ids == expected[0].ids[:1]


def test_a_stream_is_the_response(sampled):
    generation = GenerationConfig(max_tokens=9)
    [answer] = sampled.engine.generate(PROMPTS[:1], 2, generation)
    tokens = list(sampled.engine.stream(PROMPTS[0], 2, generation))
    assert [token.id for token in tokens] == answer.ids and tokens[-1].finish is not None


def test_a_prompt_above_the_context_is_refused_and_the_engine_goes_on(sampled):
    with pytest.raises(MarlRayError, match="exceed"):
        sampled.engine.generate([Prompt(tuple(range(1, 120)), 0)], 0)
    assert len(sampled.engine.generate(PROMPTS, 0)) == len(PROMPTS)


def test_adapters_follow_training_without_the_weights_below_them(adapted):
    base = adapted.engine.generate(PROMPTS, 7)
    assert gap(adapted, PROMPTS, base) < EXACT
    for number in range(2):
        adapted.update(number)
        answers = adapted.engine.generate(PROMPTS, 7)
        assert gap(adapted, PROMPTS, answers) < EXACT
        assert {answer.version for answer in answers} == {number + 1}
        assert [answer.log_probs for answer in answers] != [answer.log_probs for answer in base]


@pytest.mark.parametrize("policy", ["sampled", "adapted"])
def test_an_engine_that_has_slept_takes_the_weights_again(policy, request, monkeypatch):
    """On a CPU vLLM keeps its memory, so what is seen here is the order of calls."""
    engine: Sampled = request.getfixturevalue(policy)
    expected = engine.engine.generate(PROMPTS, 1)
    monkeypatch.setattr(engine.engine, "sleeps", True)
    engine.engine.sleep()
    engine.engine.sleep()
    assert engine.engine.generate(PROMPTS, 1) == expected
    engine.update()
    engine.engine.sleep()
    assert [answer.ids for answer in engine.engine.generate(PROMPTS, 1)] != [answer.ids for answer in expected]


def test_weights_are_refused_twice_in_part_and_while_responses_are_written(sampled):
    expected = sampled.engine.generate(PROMPTS, 1)
    held, version = sampled.engine.process, sampled.engine.version
    with pytest.raises(EngineRefusedError, match=f"weights of version {version} arrived twice"):
        held.ask("load", version, update(sampled, version))
    with pytest.raises(
        EngineRefusedError, match=f"expected version {version + 1}, got {version} and a part of {version}"
    ):
        held.ask("load", version + 1, update(sampled, version + 1))
    held.ask("add", [vllm_request(0)])
    with pytest.raises(EngineRefusedError, match="arrived while responses are being written"):
        held.ask("load", version + 1, update(sampled, version + 1))
    held.ask("remove", [0])
    assert sampled.engine.generate(PROMPTS, 1) == expected


@pytest.mark.parametrize(
    ("changes", "message"), [({"context": 1 << 20}, "max_model_len"), ({"folder": "/no/such"}, "/no/such")]
)
def test_settings_that_vllm_refuses_are_one_line(sampled, changes, message):
    expected = sampled.engine.generate(PROMPTS, 1)
    with pytest.raises(EngineRefusedError, match=message) as caught:
        sampled.engine.process.ask("start", replace(sampled.engine.settings(), **changes))
    assert str(caught.value).startswith("generation.engine=vllm: ") and "\n" not in str(caught.value)
    assert sampled.engine.generate(PROMPTS, 1) == expected


def test_an_engine_without_room_for_its_cache_cannot_start(sampled):
    with pytest.raises(EngineRefusedError, match="memory") as caught:
        VllmProcess(replace(sampled.engine.settings(), cache_gib=100_000), 1)
    assert str(caught.value).startswith("generation.engine=vllm: ") and "\n" not in str(caught.value)


def test_an_engine_that_serves_an_old_version_trains_nobody(sampled):
    expected = sampled.engine.generate(PROMPTS, 1)
    sampled.engine.version += 1  # as if the newest weights had been lost on their way
    with pytest.raises(EngineLostError, match="it samples with version"):
        sampled.engine.generate_once(PROMPTS, 1, sampled.plain.generation)
    assert sampled.engine.generate(PROMPTS, 1) == expected


def test_a_process_that_dies_or_falls_silent_is_replaced_and_its_responses_are_written_again(
    sampled, tmp_path, monkeypatch
):
    expected = sampled.engine.generate(PROMPTS, 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.kill(sampled.engine.process.pid, signal.SIGKILL)
    assert sampled.engine.generate(PROMPTS, 1) == expected
    assert [*tmp_path.rglob("vllm*")]
    held = sampled.engine.process
    with monkeypatch.context() as soon:
        soon.setattr(child, "ANSWER_S", 0.5)
        os.kill(held.pid, signal.SIGSTOP)
        with pytest.raises(EngineLostError, match=r"generation.engine=vllm: no answer to `step` in 0\.5 s"):
            held.ask("step")
    with pytest.raises(ProcessLookupError):
        os.kill(held.pid, 0)
    assert not [*tmp_path.iterdir()], "vLLM's files go with its process"
    assert sampled.engine.generate(PROMPTS, 1) == expected
