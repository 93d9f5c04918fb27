"""What happens to vLLM's process, and to what it is sent, is one named error or a response that is written again."""

import os
import signal
import tempfile
from dataclasses import replace
from typing import Any

import pytest
from toy_models.sampled_by_vllm import Sampled

from marl_ray.config.run.model import LoraConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.vllm_process import process
from marl_ray.policies.engines.vllm_process.messages import VllmRequest
from marl_ray.policies.engines.vllm_process.process import EngineLost, EngineRefused, VllmProcess

PROMPTS = [Prompt(tuple(range(40, 60)), stream=i) for i in range(4)]


def request(handle: int) -> VllmRequest:
    return VllmRequest(handle, (5, 6, 7), 1.0, 0, 1.0, 8, (257,), 1)


def update(one: Sampled, version: int) -> dict[str, Any]:
    """The message about weights of this version in the engine's memory."""
    return {"layout": one.engine._shared.layout, "version": version}


def test_a_process_that_dies_is_replaced_and_its_responses_are_written_again(sampled):
    wanted = sampled.engine.generate(PROMPTS, 1)
    os.kill(sampled.engine.process.pid, signal.SIGKILL)
    assert sampled.engine.generate(PROMPTS, 1) == wanted


def test_what_vllm_leaves_in_the_temporary_folder_goes_with_its_process(sampled, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = VllmProcess(sampled.engine._settings(), 1)
    assert [*tmp_path.rglob("vllm*")]
    held.close()
    assert not [*tmp_path.iterdir()]


def test_a_process_that_falls_silent_is_a_named_error_and_is_ended(sampled, monkeypatch):
    sampled.engine.generate(PROMPTS, 1)
    held = sampled.engine.process
    monkeypatch.setattr(process, "ANSWER_S", 0.5)
    os.kill(held.pid, signal.SIGSTOP)
    with pytest.raises(EngineLost, match=r"generation.engine=vllm: no answer to `step` in 0\.5 s"):
        held.ask("step")
    with pytest.raises(ProcessLookupError):
        os.kill(held.pid, 0)
    monkeypatch.undo()
    assert len(sampled.engine.generate(PROMPTS, 1)) == len(PROMPTS)


def test_weights_are_refused_twice_in_part_and_while_responses_are_written(sampled):
    wanted = sampled.engine.generate(PROMPTS, 1)
    held, version = sampled.engine.process, sampled.engine._version
    with pytest.raises(EngineRefused, match=f"weights of version {version} arrived twice"):
        held.ask("load", version, update(sampled, version))
    with pytest.raises(EngineRefused, match=f"expected version {version + 1}, got {version} and a part of {version}"):
        held.ask("load", version + 1, update(sampled, version + 1))
    held.ask("add", [request(0)])
    with pytest.raises(EngineRefused, match="arrived while responses are being written"):
        held.ask("load", version + 1, update(sampled, version + 1))
    held.ask("remove", [0])
    assert sampled.engine.generate(PROMPTS, 1) == wanted


def test_an_engine_that_serves_an_old_version_trains_nobody(sampled):
    wanted = sampled.engine.generate(PROMPTS, 1)
    sampled.engine._version += 1  # as if the newest weights had been lost on their way
    with pytest.raises(EngineLost, match="it samples with version"):
        sampled.engine._generate(PROMPTS, 1, sampled.plain.generation)
    assert sampled.engine.generate(PROMPTS, 1) == wanted


def test_an_engine_that_has_slept_takes_the_weights_again(monkeypatch):
    """On a CPU vLLM keeps its memory, so what is seen here is the order of calls."""
    for lora in (None, LoraConfig(rank=4)):
        one = Sampled(lora)
        monkeypatch.setattr(one.engine, "_sleeps", True)
        try:
            wanted = one.engine.generate(PROMPTS, 1)
            one.engine.rest()
            one.engine.rest()
            assert one.engine.generate(PROMPTS, 1) == wanted
            one.update()
            one.engine.rest()
            assert [answer.ids for answer in one.engine.generate(PROMPTS, 1)] != [answer.ids for answer in wanted]
        finally:
            one.engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 1 << 20}, "max_model_len"),
        ({"folder": "/no/such"}, "/no/such"),
        ({"cache_gib": 100_000}, "memory"),
    ],
)
def test_an_engine_that_cannot_start_says_why_in_one_line(sampled, changes, message):
    settings = replace(sampled.engine._settings(), **changes)
    with pytest.raises(MarlRayError, match=message) as caught:
        VllmProcess(settings, 1)
    assert str(caught.value).startswith("generation.engine=vllm: ") and "\n" not in str(caught.value)
