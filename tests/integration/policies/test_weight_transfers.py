"""The order in which weights come to vLLM's process, and what happens to them when it ends: without vLLM's package."""

import pytest
import torch
from toy_models.sampled_by_vllm import Sampled

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import EngineLostError
from marl_ray.policies.engines.vllm.engine import VllmEngine
from marl_ray.policies.engines.vllm.process import child
from marl_ray.policies.engines.vllm.process.messages import NCCL
from marl_ray.policies.engines.vllm.process.weight_memory import read_tensors
from marl_ray.policies.engines.vllm.weight_transfers import SharedMemoryTransfer
from marl_ray.policies.language.sampling_copy import empty_copy
from marl_ray.policies.language.token_policy import build_token_policy

RECORDER = """
import sys
from multiprocessing.connection import Connection

connection, calls = Connection(int(sys.argv[1])), []
while True:
    try:
        calls.append(connection.recv())
    except EOFError:
        break
    connection.send((True, calls))
"""


@pytest.fixture(autouse=True)
def recorder(tmp_path, monkeypatch):
    """Let a program that answers every call with all calls so far take the place of vLLM."""
    (tmp_path / "vllm.py").write_text("")
    (tmp_path / "recorder.py").write_text(RECORDER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child, "SERVER_MODULE", "recorder")


def calls_of(engine):
    """The calls that the engine's process has got, without this one and the settings with which it started."""
    (start, _), *calls, _ = engine.process.ask("calls")
    assert start == "start"
    return calls


def layout_of(engine):
    """The places of the tensors in the memory that the engine's process reads."""
    assert isinstance(engine.transfer, SharedMemoryTransfer)
    return engine.transfer.memory.layout


def test_shared_memory_has_each_new_version_and_a_new_process_gets_the_weights_again():
    sampled = Sampled()
    engine, layout = sampled.engine, layout_of(sampled.engine)
    engine.follow()
    engine.follow()
    assert calls_of(engine) == [("join", ({},)), ("load", (1, {"layout": layout, "version": 1}))]
    sampled.update()
    engine.follow()
    assert calls_of(engine)[3:] == [("load", (2, {"layout": layout, "version": 2}))]
    weights = dict(read_tensors(layout, 2))
    assert all(torch.equal(weights[name], value) for name, value in sampled.plain.lm.named_parameters())
    engine.close()
    engine.follow()
    assert calls_of(engine) == [("join", ({},)), ("load", (3, {"layout": layout, "version": 3}))]
    engine.close()


def test_a_group_alone_brings_weights_which_are_lost_with_the_process():
    engine = VllmEngine(Sampled().plain, transfer=NCCL)
    engine.start()
    engine.join({"rank_offset": 1})
    engine.receive_weights({"names": ["a"]})
    assert calls_of(engine) == [("join", ({"rank_offset": 1},)), ("load", (1, {"names": ["a"]}))]
    engine.process.close()
    with pytest.raises(EngineLostError, match=r"^generation.engine=vllm: its weights were lost with its process$"):
        engine.follow()


def test_weights_of_an_empty_copy_are_taken_once_into_the_memory(tmp_path):
    Sampled().trained.lm.save_pretrained(tmp_path / "model")
    Sampled().trained.tokenizer.save_pretrained(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"), context=64)
    policy = build_token_policy(model, GenerationConfig(engine="vllm"), 0, unread=True)
    engine = VllmEngine(empty_copy(policy, torch.device("cpu"), trained=False))
    with pytest.raises(MarlRayError, match=r"^generation.engine=vllm: version 0 of the weights has not come$"):
        engine.follow()
    for _ in range(2):
        engine.update_weights()
    layout = layout_of(engine)
    assert calls_of(engine) == [("join", ({},)), ("load", (1, {"layout": layout, "version": 1}))]
    engine.close()
    engine.follow()
    assert calls_of(engine) == [("join", ({},)), ("load", (2, {"layout": layout, "version": 1}))]
    engine.close()
