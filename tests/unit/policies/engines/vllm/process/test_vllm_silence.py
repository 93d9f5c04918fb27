"""A process of vLLM that reads nothing: what is sent to it has a deadline, and so has its end."""

import contextlib
import os
import signal
import tempfile

import pytest

from marl_ray.policies.engines.base import EngineLostError
from marl_ray.policies.engines.vllm.process import child
from marl_ray.policies.engines.vllm.process.child import VllmProcess
from marl_ray.policies.engines.vllm.process.messages import VllmSettings

SILENCE = r"^generation.engine=vllm: no answer to `start` in 0\.3 s$"


@pytest.fixture
def never_reads(tmp_path, monkeypatch):
    """Start a program in place of vLLM that reads nothing, and wait 0.3 s for its answers."""
    (tmp_path / "never_reads.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child, "SERVER_MODULE", "never_reads")
    monkeypatch.setattr(child, "ANSWER_S", 0.3)
    monkeypatch.setattr(child, "START_S", 0.3)


@pytest.mark.parametrize("characters", [10, 10_000_000], ids=["it fits the socket", "it does not"])
def test_a_process_that_never_reads_is_given_up(never_reads, characters):
    with pytest.raises(EngineLostError, match=SILENCE):
        VllmProcess(VllmSettings(folder="f" * characters, dtype="float32", context=64, processed=False), 1)


def test_a_process_that_does_not_end_when_killed_is_lost_too(never_reads, monkeypatch, tmp_path):
    kill, signals = os.killpg, []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(child, "CLOSE_S", 0.1)
    # Neither a call of the kernel that hangs nor the signal that waits for it can be had in a test.
    monkeypatch.setattr(os, "killpg", lambda group, number: signals.append((group, number)))
    try:
        with pytest.raises(EngineLostError, match=SILENCE):
            VllmProcess(VllmSettings(folder="f", dtype="float32", context=64, processed=False), 1)
        assert not list(tmp_path.glob("*vllm*")) and [number for _, number in signals] == [signal.SIGKILL]
    finally:
        for group, _ in signals:
            kill(group, signal.SIGKILL)


@pytest.fixture
def only_starts(tmp_path, monkeypatch):
    """Start a program in place of vLLM that answers `start` and nothing else, and wait 0.3 s for its other answers."""
    (tmp_path / "only_starts.py").write_text(
        "import sys, time\n"
        "from multiprocessing.connection import Connection\n"
        "connection = Connection(int(sys.argv[1]))\n"
        "connection.recv()\n"
        "connection.send((True, None))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child, "SERVER_MODULE", "only_starts")
    monkeypatch.setattr(child, "ANSWER_S", 0.3)
    process = VllmProcess(VllmSettings(folder="f", dtype="float32", context=64, processed=False), 1)
    yield process
    process.close()


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda process: process.ask("step"), r"no answer to `step` in 0\.3 s"),
        (lambda process: os.kill(process.pid, signal.SIGKILL), "its process died in `load`: status -9"),
        (lambda process: process.close(), "its process was ended"),
    ],
    ids=["silent", "killed", "closed"],
)
def test_all_calls_after_the_end_of_a_process_say_why_it_ended(only_starts, end, why):
    with contextlib.suppress(EngineLostError):
        end(only_starts)
    for method in ("load", "step", "remove"):
        with pytest.raises(EngineLostError, match=f"^generation.engine=vllm: {why}$"):
            only_starts.ask(method)
