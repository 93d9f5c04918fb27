"""The candidate's side of a judgement, which answers the calls of tests in another process."""

import contextlib
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from marl_ray.sandbox import codec, wire

_UNLIMITED_BYTES = 1 << 62
"""Size that no message reaches: what the judge sends has no limit."""
_MAX_ARGS_LENGTH = 10_000
"""Maximum number of items, and of bytes of their message, of an exception's arguments."""
_MAX_TEXT_LENGTH = 1000
"""Number of characters that are sent of an exception's text; half of what a verdict's message holds."""


def _describe_error(error: BaseException) -> list[object]:
    """Return the name of an error's nearest built-in class, its text, and the arguments of a built-in one.

    The program may have forged all of them.
    """
    class_name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    text, args = "", None
    with contextlib.suppress(Exception):
        text = str(error)[:_MAX_TEXT_LENGTH]
    if type(error).__module__ == "builtins":
        with contextlib.suppress(Exception, codec.ForeignTypeError, wire.MalformedMessageError):
            packed = codec.pack(list(error.args), max_items=_MAX_ARGS_LENGTH)
            codec.dumps(packed, _MAX_ARGS_LENGTH)
            args = packed
    return [class_name, text, args]


def _answer_of_error(error: BaseException) -> dict[str, Any]:
    """Return the answer that the judge gets if a call raised an exception."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return {"exit": type(error).__name__}
    if isinstance(error, codec.ForeignTypeError):
        return {"foreign": str(error)}
    if isinstance(error, wire.MalformedMessageError):
        return {"encode": str(error)}
    return {"error": _describe_error(error)}


def answer_calls(channel: int, program: str, entry_point: str, frame_bytes: int, in_place: bool) -> None:
    """Load a candidate and answer the judge's calls until the judge is gone, which ends this process.

    Requests are `{"call": [arguments, named]}` and `{"next": [number of a handed-over iterator, maximum of items]}`.
    `in_place` adds the changes that a call made to its arguments. The candidate may forge every answer, so the judge
    trusts none.
    """
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    iterators: list[Any] = []

    def stream(iterator: object) -> int:
        iterators.append(iterator)
        return len(iterators) - 1

    def pack(value: object) -> object:
        return codec.pack(value, stream, frame_bytes // 2)

    def iterate(items: list[Any]) -> object:
        return iter([codec.unpack(item, _UNLIMITED_BYTES, iterate) for item in items])

    def load() -> dict[str, object]:
        exec(compile(program, "<candidate>", "exec", dont_inherit=True), module.__dict__)
        if not callable(module.__dict__.get(entry_point)):
            raise NameError(f"name {entry_point!r} is not defined")
        return {"value": None}

    def call(packed: list[Any], packed_named: dict[str, Any]) -> dict[str, object]:
        arguments = [codec.unpack(item, _UNLIMITED_BYTES, iterate) for item in packed]
        named = {key: codec.unpack(item, _UNLIMITED_BYTES, iterate) for key, item in packed_named.items()}
        try:
            answer = {"value": pack(module.__dict__[entry_point](*arguments, **named))}
        except BaseException as error:
            answer = _answer_of_error(error)
        if not in_place:
            return answer
        changed = {}
        before: dict[Any, Any] = {**dict(enumerate(packed)), **packed_named}
        for key, item in [*enumerate(arguments), *named.items()]:
            if codec.is_mutable(item):
                after = pack(item)
                if after != before[key]:
                    changed[str(key)] = after
        return answer | {"changed": changed}

    def next_items(number: int, max_items: int) -> dict[str, object]:
        items: list[Any] = []
        try:
            for _ in range(max_items):
                items.append(pack(next(iterators[number])))
        except StopIteration:
            return {"items": items, "done": True}
        except BaseException as error:
            return {"items": items, **_answer_of_error(error)}
        return {"items": items}

    def send_answer(body: Callable[..., dict[str, object]], *request: object) -> None:
        try:
            data = codec.dumps(body(*request), frame_bytes)
        except BaseException as error:
            data = codec.dumps(_answer_of_error(error), frame_bytes)
        wire.send_frame(channel, data)

    send_answer(load)
    while True:
        try:
            ((kind, request),) = codec.loads(wire.receive_frame(channel, _UNLIMITED_BYTES)).items()
        except EOFError:
            os._exit(0)
        send_answer(call if kind == "call" else next_items, *request)
