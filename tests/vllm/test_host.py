"""One engine of vLLM that several callers use at once."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toy_models.sampled_by_vllm import Sampled

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import EngineLostError, Prompt
from marl_ray.policies.engines.host import pack_tensor, unpack_tensor
from marl_ray.policies.engines.vllm import host as vllm_host
from marl_ray.policies.engines.vllm.host import VllmHost

PROMPTS = [Prompt(tuple(range(40 + i, 60 + 2 * i)), stream=i) for i in range(8)]
LONG = GenerationConfig(max_tokens=24)


@pytest.fixture(scope="module")
def host() -> Iterator[VllmHost]:
    started = VllmHost(Sampled().plain)
    started.start()
    yield started
    started.close()


def test_calls_at_the_same_time_get_the_responses_that_each_would_get_alone(host):
    alone = [host.generate(host.policy.version, PROMPTS[number::2], number, LONG) for number in (0, 1)]
    before = host.progress()
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(host.generate, host.policy.version, PROMPTS[number::2], number, LONG) for number in (0, 1)
        ]
        together = [call.result(timeout=60) for call in calls]
    for first, other in zip(together, alone, strict=True):
        assert [answer.ids for answer in first] == [answer.ids for answer in other]
    assert host.progress() - before == sum(len(answer.ids) for part in together for answer in part)


def test_a_call_waits_for_the_weights_that_it_asks_for(host):
    version = host.policy.version
    old = host.generate(version, PROMPTS, 3, LONG)
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(host.generate, version + 1, PROMPTS, 3, LONG)
        weights = {name: pack_tensor(weight + 0.1) for name, weight in host.policy.lm.named_parameters()}
        host.load(version + 1, weights)
        new = early.result(timeout=60)
    assert {answer.version for answer in new} == {version + 1}
    assert [answer.ids for answer in new] != [answer.ids for answer in old]
    with pytest.raises(MarlRayError, match=f"expected weights of version {version}, but {version + 1} are loaded"):
        host.generate(version, PROMPTS, 3, LONG)


def test_a_call_for_weights_that_never_come_ends(host, monkeypatch):
    monkeypatch.setattr(vllm_host, "WEIGHTS_S", 0.2)
    with pytest.raises(EngineLostError, match=r"weights of version \d+ have not come for 0.2 s"):
        host.generate(host.policy.version + 1, PROMPTS, 3, LONG)


def test_weights_are_refused_twice_in_part_and_while_responses_are_written(host):
    version, expected = host.policy.version, host.generate(host.policy.version, PROMPTS, 3, LONG)
    name, weight = next(iter(host.policy.lm.named_parameters()))
    for number, weights, message in (
        (version, {}, "arrived twice"),
        (version + 1, {name: pack_tensor(weight[:1])}, rf"{name}: expected torch.float32 .* got torch.float32"),
        (version + 1, {name: pack_tensor(weight.bfloat16())}, "got torch.bfloat16"),
        (version + 1, {"head": pack_tensor(weight)}, "head: expected no such tensor"),
    ):
        with pytest.raises(MarlRayError, match=message):
            host.load(number, weights)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(host.generate, version, PROMPTS, 3, LONG)
        begun = host.progress()
        while host.progress() == begun and not writing.done():
            pass
        with pytest.raises(MarlRayError, match="arrived while responses are being written"):
            host.load(version + 1, {})
        assert writing.result(timeout=60) == expected
    assert host.generate(version, PROMPTS, 3, LONG) == expected


def test_a_process_that_dies_is_replaced_and_its_responses_are_written_again(host):
    expected = host.generate(host.policy.version, PROMPTS, 3, LONG)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(host.generate, host.policy.version, PROMPTS, 3, LONG)
        os.kill(host.engine.process.pid, signal.SIGKILL)
        assert writing.result(timeout=120) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_a_packed_tensor_is_the_tensor(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    again = unpack_tensor(pack_tensor(tensor))
    assert again.dtype == dtype and again.shape == tensor.shape and torch.equal(again, tensor)
