"""A process of vLLM that reads nothing: what is sent to it has a deadline, too."""

import pytest

from marl_ray.policies.engines.base import EngineLostError
from marl_ray.policies.engines.vllm.process import child
from marl_ray.policies.engines.vllm.process.child import VllmProcess
from marl_ray.policies.engines.vllm.process.messages import VllmSettings


@pytest.mark.parametrize("characters", [10, 10_000_000], ids=["it fits the socket", "it does not"])
def test_a_process_that_never_reads_is_given_up(tmp_path, monkeypatch, characters):
    (tmp_path / "never_reads.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child, "SERVER_MODULE", "never_reads")
    monkeypatch.setattr(child, "ANSWER_S", 0.3)
    monkeypatch.setattr(child, "START_S", 0.3)
    with pytest.raises(EngineLostError, match=r"^generation.engine=vllm: no answer to `start` in 0\.3 s$"):
        VllmProcess(VllmSettings(folder="f" * characters, dtype="float32", context=64, processed=False), 1)
