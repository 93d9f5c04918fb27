"""A host of vLLM without its package: calls that nobody will answer end with an error."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.engines.base import EngineLostError, Prompt
from marl_ray.policies.engines.vllm import host as vllm_host
from marl_ray.policies.engines.vllm.host import VllmHost
from marl_ray.policies.engines.vllm.process import child
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.policies.language.token_policy import build_token_policy

PROMPTS = [Prompt((5, 6, 7), stream=0)]
SHORT = GenerationConfig(max_tokens=2)
CLOSED = "^generation.engine=vllm: the engine was closed$"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host whose process, in place of vLLM, reads nothing and is given up after a second."""
    (tmp_path / "vllm.py").write_text("")
    (tmp_path / "never_reads.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child, "SERVER_MODULE", "never_reads")
    monkeypatch.setattr(child, "START_S", 1.0)
    policy = build_token_policy(ModelConfig(preset="tiny-0.2m", context=64), GenerationConfig(engine="vllm"), 0)
    host = VllmHost(plain_copy(policy))
    yield host
    host.close()


def begin(function, *arguments):
    """Call a function in a daemon thread, which keeps no process alive, and return the future of its result."""
    result: Future[Any] = Future()

    def call():
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return result


def test_a_call_to_a_closed_host_fails_at_once(host):
    host.close()
    for call in (begin(host.generate, 0, PROMPTS, 0, SHORT), begin(host.start)):
        with pytest.raises(EngineLostError, match=CLOSED):
            call.result(timeout=60)


def test_a_call_that_waits_for_weights_ends_when_its_host_is_closed(host, monkeypatch):
    call = begin(host.generate, host.policy.version + 1, PROMPTS, 0, SHORT)
    host.close()
    with pytest.raises(EngineLostError, match=CLOSED):
        call.result(timeout=60)


def test_a_call_ends_when_no_token_comes(host, monkeypatch):
    monkeypatch.setattr(vllm_host, "SILENCE_S", 0.2)
    for call in (begin(host.start), begin(host.generate, 0, PROMPTS, 0, SHORT)):
        with pytest.raises(EngineLostError, match=r"^generation.engine=vllm: no token for 0\.2 s$"):
            call.result(timeout=60)


def test_a_process_that_cannot_start_is_the_error_of_the_call(host):
    with pytest.raises(EngineLostError, match=r"^generation.engine=vllm: no answer to `start` in 1 s$"):
        begin(host.start).result(timeout=60)
