"""Values that may cross between candidate and judge: exactly of a built-in type, by value, of bounded depth and size.

JSON with tags: None, bool, int, float, str and list stand for themselves; an object of one key is any other type.
Decoding trusts nothing: it can only make built-in values or raise `Malformed`.
"""

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from marl_ray.sandbox.wire import LARGEST_FRAME, Malformed

DEEPEST = 100
_DICTS = (Counter, OrderedDict, defaultdict)
"""Cross as plain dictionaries: what they contain is built-in and how they compare is theirs no more."""
_PLAIN_INTS = range(-(1 << 63), 1 << 63)
_encode = json.JSONEncoder(separators=(",", ":")).encode
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class Foreign(Exception):
    """A value that is not exactly of a built-in type. The argument is the name of its type."""


def pack(value: Any, depth: int = 0) -> Any:
    """The JSON form of a value. `Foreign` for other types, `Malformed` when it is nested too deep."""
    kind = type(value)
    if value is None or kind is str or kind is bool or kind is float:
        return value
    if kind is int:
        return value if value in _PLAIN_INTS else {"i": hex(value)}
    if depth > DEEPEST:
        raise Malformed(f"nested deeper than {DEEPEST}")
    depth += 1
    if kind is list:
        return [pack(item, depth) for item in value]
    if kind is tuple:
        return {"t": [pack(item, depth) for item in value]}
    if kind is dict or kind in _DICTS:
        return {"d": [[pack(key, depth), pack(item, depth)] for key, item in value.items()]}
    if kind is set:
        return {"s": [pack(item, depth) for item in value]}
    if kind is frozenset:
        return {"f": [pack(item, depth) for item in value]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is bytearray:
        return {"a": value.hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is range:
        return {"r": [pack(end, depth) for end in (value.start, value.stop, value.step)]}
    raise Foreign(kind.__name__ if type(kind.__name__) is str else "?")


def _floats(items: list[Any]) -> list[Any]:
    if len(items) != 2 or any(type(item) is not float for item in items):
        raise Malformed("a complex number of something else than two floats")
    return items


_MAKE: dict[str, Callable[[list[Any]], Any]] = {
    "t": tuple,
    "d": dict,
    "s": set,
    "f": frozenset,
    "c": lambda items: complex(*_floats(items)),
    "r": lambda items: range(*items),
}
_PARSE: dict[str, Callable[[str], Any]] = {
    "i": lambda digits: int(digits, 16),
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
}


def unpack(value: Any, depth: int = 0) -> Any:
    """The value of a JSON form, which may come from an enemy: `Malformed` or a built-in value."""
    kind = type(value)
    if value is None or kind in (str, bool, float, int):
        return value
    if depth > 2 * DEEPEST:  # a dictionary takes two levels
        raise Malformed(f"nested deeper than {DEEPEST}")
    depth += 1
    if kind is list:
        return [unpack(item, depth) for item in value]
    if kind is not dict or len(value) != 1:
        raise Malformed("an object of several keys")
    ((tag, content),) = value.items()
    try:
        if tag in _PARSE and isinstance(content, str):
            return _PARSE[tag](content)
        if tag in _MAKE and isinstance(content, list):
            return _MAKE[tag]([unpack(item, depth) for item in content])
    except (TypeError, ValueError, OverflowError) as error:
        raise Malformed(f"{tag}: {error}") from None
    raise Malformed("an unknown tag")


def dumps(message: Any) -> bytes:
    data = _encode(message).encode()
    if len(data) > LARGEST_FRAME:
        raise Malformed(f"{len(data)} bytes, more than {LARGEST_FRAME}")
    return data


def loads(data: bytes) -> Any:
    """JSON of an enemy: `Malformed` when it is none."""
    try:
        text = data.decode("ascii")
        value, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration) as error:
        raise Malformed(type(error).__name__) from None
    if end != len(text):
        raise Malformed("more than one value")
    return value


def restore(old: Any, new: Any) -> None:
    """Give a list, dict, set or bytearray the contents of another, in place, and keep what is nested the same way."""
    if type(old) is list:
        old[:] = [*map(_merged, old, new), *new[len(old) :]]
    elif type(old) is dict:
        kept = {key: _merged(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(kept)
    elif type(old) is bytearray:
        old[:] = new
    else:
        old.clear()
        old.update(new)


def mutable(value: Any) -> bool:
    return type(value) in (list, dict, set, bytearray)


def _merged(old: Any, new: Any) -> Any:
    if mutable(old) and type(old) is type(new):
        restore(old, new)
        return old
    return new
