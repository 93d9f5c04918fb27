"""The trusted side of a judgement.

It runs the tests with a proxy in place of the candidate, and decides the verdict alone.
"""

import builtins
import contextlib
import dis
import gc
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from marl_ray.sandbox import codec, wire
from marl_ray.sandbox.limits import Limits

PLAIN_KIND, IN_PLACE_KIND, ALONE_KIND = b"C", b"I", b"A"
"""Kinds of requests; limits follow. `IN_PLACE_KIND`: the candidate's changes of its mutable arguments are applied to the
tests' own in all calls; `ALONE_KIND`: only in calls that are statements of their own."""
_DISCARD, _CACHE = dis.opmap["POP_TOP"], 0
"""Opcodes: the one that drops a call's value, and the one of inline caches, which follow a call."""
ORPHANED_AFTER_S = 5.0
"""Seconds after a run's wall-clock limit at which this process ends itself, because its client must be gone."""
_REQUEST_BYTES = 256
"""Number of bytes that are read of a request, more than any has."""
_WORN_BYTES = 128 << 20
"""A judge that has grown by this many bytes, garbage not counted, is replaced."""
_MAX_CACHED = 100_000
"""Number of characters from which on a source is compiled anew each time, because 512 such would fill the memory."""
_RAISED_TYPES = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (StopIteration, StopAsyncIteration, ExceptionGroup))
}
"""Exceptions that a candidate may raise into the tests. A `StopIteration` would end their loops, so it is a
RuntimeError, as in a generator (PEP 479). Exception stands for all others."""
_UNREADABLE_ERRORS = (wire.MalformedMessageError, codec.ForeignTypeError, RecursionError, MemoryError)


class _VerdictDecided(BaseException):
    """Raised when the verdict is decided, whatever the tests catch."""


class Candidate:
    """Proxy of the candidate that sends calls to it."""

    def __init__(self, channel: int, frame_bytes: int):
        self._channel, self._frame_bytes = channel, frame_bytes
        self.verdict: tuple[str, str] | None = None
        """Verdict and message, once an event has decided them whatever the tests do then."""

    def _decide(self, verdict: str, message: str) -> _VerdictDecided:
        """Set the verdict unless one is set, and return the exception that ends the tests."""
        self.verdict = self.verdict or (verdict, message)
        return _VerdictDecided()

    def _decide_unreadable(self, error: BaseException, prefix: str = "") -> _VerdictDecided:
        """Decide the verdict for a value that cannot be sent, received or read."""
        if isinstance(error, codec.ForeignTypeError):
            return self._decide("fail:nonbuiltin", f"{prefix}of type {error}" if prefix else str(error))
        if isinstance(error, RecursionError):
            return self._decide("fail:encode", f"{prefix}nested too deep")
        if isinstance(error, MemoryError):
            return self._decide("oom", f"{prefix}MemoryError")
        if isinstance(error, wire.MalformedMessageError):
            return self._decide("fail:encode", f"{prefix}{error}")
        return self._decide("fail:crash", "the candidate's process ended")

    def _send_request(self, message: dict[str, Any]) -> tuple[dict[str, object], int]:
        """Send a request and return the answer and its size."""
        if self.verdict:
            raise _VerdictDecided
        try:
            data = codec.dumps(message, self._frame_bytes)
        except _UNREADABLE_ERRORS as error:
            raise self._decide_unreadable(error, "argument ") from None
        try:
            wire.send_frame(self._channel, data)
        except OSError as error:
            raise self._decide_unreadable(error) from None
        return self._receive_answer()

    def _receive_answer(self) -> tuple[dict[str, object], int]:
        try:
            frame = wire.receive_frame(self._channel, self._frame_bytes)
            answer = codec.loads(frame)
            if type(answer) is not dict:
                raise wire.MalformedMessageError("an answer that is no object")
        except (*_UNREADABLE_ERRORS, EOFError, OSError) as error:
            raise self._decide_unreadable(error) from None
        return answer, len(frame)

    def _unpack(self, value: object) -> Any:
        try:
            return codec.unpack(value, self._frame_bytes, self._iterator)
        except _UNREADABLE_ERRORS as error:
            raise self._decide_unreadable(error) from None

    def _raise_failure(self, answer: dict[str, Any]) -> None:
        """Raise the candidate's exception, or the final verdict if the answer is one."""
        for key, verdict in (("foreign", "fail:nonbuiltin"), ("exit", "fail:exit"), ("encode", "fail:encode")):
            if key in answer:
                raise self._decide(verdict, answer[key] if type(answer[key]) is str else "?")
        if "error" in answer:
            raise self._candidate_error(answer["error"])

    def _candidate_error(self, described: object) -> BaseException:
        if type(described) is not list or len(described) != 3 or [type(item) for item in described[:2]] != [str, str]:
            return self._decide("fail:encode", "an exception that is none")
        name, text, args = described
        if name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException", "BaseExceptionGroup"):
            return self._decide("fail:exit", name)
        if name in ("StopIteration", "StopAsyncIteration"):
            return RuntimeError(f"the candidate raised {name}")
        kind = _RAISED_TYPES.get(name, Exception)
        if type(args) is list:
            with contextlib.suppress(Exception):
                return kind(*self._unpack(args))
        with contextlib.suppress(Exception):
            return kind(text)
        return (UnicodeError if issubclass(kind, UnicodeError) else Exception)(text)

    def _iterator(self, number: object) -> Iterator[object]:
        if type(number) is not int:
            raise wire.MalformedMessageError("an iterator without a number")
        return self._iterate(number)

    def _iterate(self, number: int) -> Iterator[object]:
        """Yield the items of an iterator, which are fetched when they are needed.

        All together are no larger than a frame.
        """
        count = received = 0
        while True:
            answer, size = self._send_request({"next": [number, 1 + count // 8]})
            items, done = answer.get("items"), answer.get("done") is True
            received += size
            if type(items) is not list or received > self._frame_bytes:
                raise self._decide("fail:encode", f"an iterator of more than {self._frame_bytes} bytes")
            for item in items:
                yield self._unpack(item)
            if done:
                return
            self._raise_failure(answer)
            if not items:
                raise self._decide("fail:encode", "an iterator that neither continues nor ends")
            count += len(items)

    def _drain_iterator(self, iterator: Any) -> list[object]:
        """Return the remaining items of one of the tests' own iterators, packed."""
        max_items = self._frame_bytes // 2
        items = [codec.pack(item, self._drain_iterator) for item in islice(iterator, max_items + 1)]
        if len(items) > max_items:
            raise wire.MalformedMessageError("an iterator that does not end")
        return items

    def wait_until_loaded(self) -> None:
        """Wait until the candidate's program has been executed, and raise the error by which that ended, if it did."""
        self._raise_failure(self._receive_answer()[0])

    def call(self, args: tuple[object, ...], kwargs: dict[str, object], in_place: bool) -> object:
        """Call the candidate's function and return what it returned.

        With `in_place` the candidate's changes of the arguments are applied too.

        Raises the candidate's own error, or one that ends the judgement if a value cannot be sent or the answer is
        malformed.
        """
        try:
            packed = [codec.pack(item, self._drain_iterator) for item in args]
            named = {key: codec.pack(item, self._drain_iterator) for key, item in kwargs.items()}
        except _UNREADABLE_ERRORS as error:
            raise self._decide_unreadable(error, "argument ") from None
        answer, _ = self._send_request({"call": [packed, named]})
        if in_place:
            try:
                self._apply_changes(args, kwargs, answer.get("changed", {}))
            except _UNREADABLE_ERRORS as error:
                raise self._decide_unreadable(error) from None
        self._raise_failure(answer)
        return self._unpack(answer.get("value"))

    def _apply_changes(self, args: tuple[object, ...], kwargs: dict[str, object], changed: object) -> None:
        """Apply the candidate's changes of its mutable arguments to the tests' own."""
        if type(changed) is not dict:
            raise wire.MalformedMessageError("changes that are no object")
        arguments = {str(key): item for key, item in [*enumerate(args), *kwargs.items()]}
        for key, packed in changed.items():
            value = codec.unpack(packed, self._frame_bytes)
            if key not in arguments or not codec.is_mutable(arguments[key]) or type(arguments[key]) is not type(value):
                raise wire.MalformedMessageError("a change of something that is no mutable argument")
            codec.replace_content(arguments[key], value)


@lru_cache(maxsize=512)
def _compile(source: str, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


def _compile_cached(source: str, name: str) -> CodeType:
    """Compile a source, or return the code of an equal one if it is small."""
    return (_compile if len(source) < _MAX_CACHED else _compile.__wrapped__)(source, name)


def _stands_alone(caller: FrameType) -> bool:
    """Return True if the call that this frame is in is a statement of its own, so that its value is discarded."""
    code, after = caller.f_code.co_code, caller.f_lasti + 2
    while code[after] == _CACHE:
        after += 2
    return code[after] == _DISCARD


def decide(
    tests: str, setup: str, entry_point: str, channel: int, frame_bytes: int, kind: bytes = PLAIN_KIND
) -> tuple[str, str]:
    """Judge one candidate at the other end of the channel and return verdict and message."""
    candidate = Candidate(channel, frame_bytes)
    random.seed(wire.encode_text(tests))  # so that every judgement of a program has the same verdict
    namespace: dict[str, object] = {"__name__": "tests"}

    def proxy(*args: object, **kwargs: object) -> object:
        in_place = kind == IN_PLACE_KIND or (kind == ALONE_KIND and _stands_alone(sys._getframe(1)))
        return candidate.call(args, kwargs, in_place)

    proxy.__name__ = proxy.__qualname__ = entry_point

    def run_tests() -> None:
        exec(_compile_cached(setup, "<setup>"), namespace)
        namespace[entry_point] = proxy
        candidate.wait_until_loaded()
        exec(_compile_cached(tests, "<tests>"), namespace)

    test_verdict = _verdict_of(run_tests)
    return candidate.verdict or test_verdict


def _verdict_of(body: Callable[[], None]) -> tuple[str, str]:
    """Return verdict and message of the tests, which `body` runs.

    The tests do not count if an event has decided the candidate's verdict.
    """
    try:
        body()
    except _VerdictDecided:
        return "fail:error", ""
    except AssertionError as error:
        return "fail:wrong", _text_of(error)
    except MemoryError:
        return "oom", "MemoryError"
    except BaseException as error:
        text = _text_of(error)
        return "fail:error", f"{type(error).__name__}: {text}"
    return "passed", ""


def _text_of(error: BaseException) -> str:
    """Return the text of an exception, or a note that it has none.

    An exception may hold a value of the candidate that has no text, such as a huge int.
    """
    try:
        return str(error)
    except Exception as text_error:
        return f"(no text: {type(text_error).__name__})"


@contextlib.contextmanager
def _limit_tests(limits: Limits, used_bytes: int) -> Iterator[None]:
    """Set the tests' own limits within the block, and restore the interpreter's settings afterwards.

    The limit of memory counts beyond `used_bytes`, which this process already takes.
    """
    recursion, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    max_bytes = used_bytes + limits.memory_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard), hard)
    )
    signal.setitimer(signal.ITIMER_REAL, limits.max_wall_s + ORPHANED_AFTER_S)  # both timers end this process
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        sys.setrecursionlimit(recursion)
        sys.set_int_max_str_digits(digits)
        if "decimal" in sys.modules:
            decimal = sys.modules["decimal"]
            decimal.setcontext(decimal.DefaultContext.copy())


def _decide_safely(payload: int, channel: int, limits: Limits, kind: bytes) -> tuple[str, str]:
    """Return `decide`'s verdict and message, also if a value of the candidate breaks the judgement itself."""
    try:
        tests, setup, entry_point = map(wire.decode_text, wire.read_payload(payload))
        return decide(tests, setup, entry_point, channel, limits.frame_bytes, kind)
    except MemoryError:
        return "oom", "MemoryError"
    except BaseException as error:
        return "fail:error", f"{type(error).__name__} while judging"


def serve(control: socket.socket, size: Callable[[], int]) -> None:
    """Judge one candidate after another, until the client is gone or this process has grown too much.

    Each message brings the payload (tests, setup) and the channel. `size` returns the number of bytes of this process's
    address space.
    """
    initial_bytes = size()
    is_worn = False
    while not is_worn:
        message, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 2)
        if not message:
            return
        limits = Limits.unpack(message[1:])
        with _limit_tests(limits, size()):
            payload, channel = fds
            verdict, verdict_message = _decide_safely(payload, channel, limits, message[:1])
        for fd in fds:
            os.close(fd)
        if size() > initial_bytes + _WORN_BYTES:
            gc.collect()  # functions that tests define are cyclic garbage, and keep the candidate's values alive
            is_worn = size() > initial_bytes + _WORN_BYTES
        control.send((b"-" if is_worn else b"+") + wire.encode_verdict(verdict, verdict_message))
