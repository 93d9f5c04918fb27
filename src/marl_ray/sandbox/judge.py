"""The trusted side: runs the tests with a proxy in place of the candidate, and alone decides the verdict."""

import builtins
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

from marl_ray.sandbox import codec, wire

MEMORY_BYTES, CPU_S = 4 << 30, 1 << 30
_LONGEST_MESSAGE = 500
_RAISED = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (UnicodeError, ImportError, ExceptionGroup))
}
"""What a candidate may raise into the tests. The others take arguments that a text is not; ValueError stands for them."""


class _Final(BaseException):
    """The verdict is decided, whatever the tests catch."""


class Candidate:
    """Calls cross to the candidate; `verdict` is set once something happened that no test may forgive."""

    def __init__(self, channel: int):
        self._channel = channel
        self.verdict: tuple[str, str] | None = None

    def _fail(self, verdict: str, message: str) -> _Final:
        self.verdict = self.verdict or (verdict, message)
        return _Final()

    def _answer(self) -> dict[str, Any]:
        """One answer, checked. Raises what the candidate raised."""
        if self.verdict:
            raise _Final
        try:
            answer = codec.loads(wire.receive_frame(self._channel))
        except wire.Malformed as error:
            raise self._fail("fail:encode", str(error)) from None
        except (EOFError, OSError):
            raise self._fail("fail:crash", "the candidate's process ended") from None
        if type(answer) is not dict:
            raise self._fail("fail:encode", "an answer that is no object")
        for key, verdict in (("foreign", "fail:nonbuiltin"), ("exit", "fail:exit"), ("encode", "fail:encode")):
            if key in answer:
                raise self._fail(verdict, str(answer[key])[:_LONGEST_MESSAGE])
        return answer

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" not in answer:
            return codec.unpack(answer.get("value"))
        described = answer["error"]
        if type(described) is not list or len(described) != 2 or not all(type(item) is str for item in described):
            raise wire.Malformed("an exception that is no pair of texts")
        name, text = described
        if name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException"):
            raise self._fail("fail:exit", name)
        raise _RAISED.get(name, ValueError)(text)

    def loaded(self) -> None:
        self._value(self._answer())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            packed = [codec.pack(item) for item in args], {key: codec.pack(item) for key, item in kwargs.items()}
            data = codec.dumps(packed)
        except codec.Foreign as foreign:
            raise self._fail("fail:nonbuiltin", f"argument of type {foreign}") from None
        except wire.Malformed as error:
            raise self._fail("fail:encode", f"argument: {error}") from None
        try:
            wire.send_frame(self._channel, data)
        except OSError:
            raise self._fail("fail:crash", "the candidate's process ended") from None
        answer = self._answer()
        try:
            self._echo(args, kwargs, answer.get("changed", {}))
            return self._value(answer)
        except wire.Malformed as error:
            raise self._fail("fail:encode", str(error)) from None

    def _echo(self, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Any) -> None:
        """What the candidate did to its mutable arguments happens to the tests' own."""
        if type(changed) is not dict:
            raise wire.Malformed("changes that are no object")
        mine = {str(key): item for key, item in [*enumerate(args), *kwargs.items()]}
        for key, packed in changed.items():
            value = codec.unpack(packed)
            if key not in mine or not codec.mutable(mine[key]) or type(mine[key]) is not type(value):
                raise wire.Malformed("a change of something that is no mutable argument")
            codec.restore(mine[key], value)


@lru_cache(maxsize=512)
def _compiled(source: str, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


def decide(tests: str, setup: str, entry_point: str, channel: int) -> tuple[str, str]:
    """Verdict and message of one candidate at the other end of the channel."""
    candidate = Candidate(channel)
    random.seed(wire.blob(tests))  # the same verdict every time
    namespace: dict[str, Any] = {"__name__": "tests"}

    def proxy(*args: Any, **kwargs: Any) -> Any:
        return candidate(*args, **kwargs)

    proxy.__name__ = proxy.__qualname__ = entry_point

    def body() -> None:
        exec(_compiled(setup, "<setup>"), namespace)
        namespace[entry_point] = proxy
        candidate.loaded()
        exec(_compiled(tests, "<tests>"), namespace)

    outcome = _outcome(body)
    return candidate.verdict or outcome


def _outcome(body: Callable[[], None]) -> tuple[str, str]:
    try:
        body()
    except _Final:
        return "fail:error", ""  # the candidate's own verdict comes first
    except wire.Malformed as error:
        return "fail:encode", str(error)
    except AssertionError as error:
        return "fail:wrong", str(error)
    except MemoryError:
        return "oom", "MemoryError"
    except BaseException as error:
        return "fail:error", f"{type(error).__name__}: {error}"
    return "passed", ""


def serve(control: socket.socket) -> None:
    """Judge one candidate after another; each message brings the payload (tests, setup) and the channel."""
    recursion = sys.getrecursionlimit()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            return
        tests, setup, entry_point = map(wire.text, wire.read_payload(fds[0]))
        signal.setitimer(signal.ITIMER_REAL, float(message) + 5)  # ends this process should its client be gone
        verdict, text = decide(tests, setup, entry_point, fds[1])
        for fd in fds:
            os.close(fd)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setrecursionlimit(recursion)
        control.send(json.dumps({"verdict": verdict, "message": text[:_LONGEST_MESSAGE]}).encode())
