"""Values that may cross between candidate and judge.

Each is exactly of a known type, crosses by value, and is of bounded depth and size.

JSON with tags: None, bool, int, float, str and list stand for themselves; an object of one key is any other type.
Decoding trusts nothing: it can only make values of the types listed here or raise `MalformedMessageError`.
"""

import collections
import datetime
import importlib
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from marl_ray.sandbox.wire import MalformedMessageError

MAX_DEPTH = 100
"""Maximum number of containers within each other; far below `_SAFE_RECURSION`."""
_MAX_DIGITS = 4300
"""Maximum number of digits of an int in decimal; Python's own limit, which tests may have lifted."""
_SAFE_RECURSION = 5000
"""Number of nested calls of the JSON parser that the C stack holds."""
_PLAIN_TYPES = frozenset({type(None), str, bool, float})
_FEW_ITEMS = 6
"""Up to this many items are faster to check one by one than all together."""
_PLAIN_OR_INT_TYPES = _PLAIN_TYPES | {int}
_PLAIN_INTS = range(-(1 << 63), 1 << 63)
_NAMED_TYPES = {
    kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set)
} | {
    "frozenset": frozenset,
    "NoneType": type(None),
    "range": range,
    "object": object,
}
"""Types that cross as values, and factories of a defaultdict. Any other factory is replaced by none."""
_VIEW_TAGS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_MUTABLE_TYPES = (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
_encode = json.JSONEncoder(separators=(",", ":")).encode
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
StreamCodec = Callable[[Any], Any]


class ForeignTypeError(Exception):
    """A value of a type that may not cross. The argument is its name."""


def _is_iterator(kind: type) -> bool:
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")


def _is_named_tuple(kind: type) -> bool:
    return kind.__mro__[1:] == (tuple, object) and type(getattr(kind, "_fields", None)) is tuple


class Packer:
    """Makes the JSON form of one message.

    Raises `ForeignTypeError` for other types, `MalformedMessageError` if the value is nested too deep or too large.
    """

    def __init__(self, stream: StreamCodec | None = None, max_items: int = 1 << 62):
        """`stream` returns a handle for an iterator of the standard library (a generator, `map`, ...).

        Without it iterators are foreign. A value has at most `max_items` items; a list that occurs twice counts twice.
        A frame of twice as many bytes cannot hold more.
        """
        self._stream, self._items_allowed = stream, max_items

    def __call__(self, value: Any, depth: int = 0) -> Any:
        """Return the JSON form of a value that lies `depth` containers deep. Raises the errors of the class."""
        kind = type(value)
        if kind in _PLAIN_TYPES:
            return value
        if kind is int:
            return value if value in _PLAIN_INTS else {"i": hex(value)}
        if depth > MAX_DEPTH:
            raise MalformedMessageError(f"nested deeper than {MAX_DEPTH}")
        depth += 1
        if kind is list:
            return self._pack_items(value, depth)
        if kind is tuple:
            return {"t": self._pack_items(value, depth)}
        if kind is dict:
            return {"d": self._pack_pairs(value, depth)}
        if kind is set:
            return {"s": self._pack_items(value, depth)}
        if kind is frozenset:
            return {"f": self._pack_items(value, depth)}
        if kind is bytes:
            return {"b": value.hex()}
        if kind is bytearray:
            return {"a": value.hex()}
        if kind is complex:
            return {"c": [value.real, value.imag]}
        if kind is range:
            return {"r": [self(end) for end in (value.start, value.stop, value.step)]}
        return self._pack_rare(value, kind, depth)

    def _pack_items(self, items: Any, depth: int) -> list[Any]:
        self._items_allowed -= len(items)
        if self._items_allowed < 0:
            raise MalformedMessageError("too many items")
        if len(items) < _FEW_ITEMS:
            return [self(item, depth) for item in items]
        kinds = set(map(type, items))
        if kinds <= _PLAIN_TYPES or (kinds == {int} and min(items) in _PLAIN_INTS and max(items) in _PLAIN_INTS):
            return list(items)
        return [self(item, depth) for item in items]

    def _pack_pairs(self, items: dict[Any, Any], depth: int) -> list[Any]:
        self._items_allowed -= len(items)
        if self._items_allowed < 0:
            raise MalformedMessageError("too many items")
        return [[self(key, depth), self(item, depth)] for key, item in items.items()]

    def _pack_rare(self, value: Any, kind: type, depth: int) -> Any:
        """Pack a type of the standard library that few programs pass."""
        if kind is deque:
            return {"deque": [self._pack_items(value, depth), value.maxlen]}
        if kind is Counter or kind is OrderedDict:
            return {kind.__name__: self._pack_pairs(value, depth)}
        if kind is defaultdict:
            factory = value.default_factory
            factory_name = factory.__name__ if any(factory is item for item in _NAMED_TYPES.values()) else None
            return {"defaultdict": [factory_name, self._pack_pairs(value, depth)]}
        if kind in _VIEW_TAGS:
            return {_VIEW_TAGS[kind]: self._pack_items(value, depth)}
        if _is_named_tuple(kind):
            return {"named": [kind.__name__, list(kind._fields), self._pack_items(value, depth)]}  # type: ignore[attr-defined]
        if kind is type and value in _NAMED_TYPES.values():
            return {"type": value.__name__}
        if kind in _ISO_TYPES.values():
            return {kind.__name__: value.isoformat()}
        if kind is datetime.timedelta:
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
        if kind is _loaded_class("decimal", "Decimal") or kind is _loaded_class("uuid", "UUID"):
            return {kind.__name__: str(value)}
        if kind is _loaded_class("fractions", "Fraction"):
            return {"Fraction": [self(value.numerator), self(value.denominator)]}
        if _is_iterator(kind) and self._stream:
            return {"g": self._stream(value)}
        raise ForeignTypeError(kind.__name__ if type(kind.__name__) is str else "?")


def pack(value: Any, stream: StreamCodec | None = None, max_items: int = 1 << 62) -> Any:
    """Return the JSON form of a value; see `Packer`."""
    kind = type(value)
    if kind in _PLAIN_TYPES or (kind is int and value in _PLAIN_INTS):
        return value
    return Packer(stream, max_items)(value)


def _loaded_class(module: str, name: str) -> Any:
    """Return a class of a module that may not be loaded; in that case no value can be of that class."""
    return getattr(sys.modules.get(module), name, ...)


def _check_floats(items: list[Any]) -> list[Any]:
    if len(items) != 2 or any(type(item) is not float for item in items):
        raise MalformedMessageError("a complex number of something else than two floats")
    return items


def _check_ints(items: list[Any]) -> list[Any]:
    if any(type(item) is not int for item in items):
        raise MalformedMessageError("something else than ints")
    return items


def _make_defaultdict(items: list[Any]) -> Any:
    factory, pairs = items
    return defaultdict(None if factory is None else _NAMED_TYPES[factory], pairs)


def _make_deque(items: list[Any]) -> Any:
    content, max_length = items
    if type(content) is not list:
        raise MalformedMessageError("a deque of something else than a list")
    return deque(content, max_length)


@lru_cache(maxsize=64)
def _named_tuple_type(name: str, fields: tuple[str, ...]) -> type:
    return collections.namedtuple(name, fields)  # noqa: PYI024  the fields come with the value


def _make_named_tuple(items: list[Any]) -> Any:
    name, fields, content = items
    if type(name) is not str or type(fields) is not list or any(type(field) is not str for field in fields):
        raise MalformedMessageError("a named tuple without names")
    return _named_tuple_type(name, tuple(fields))(*content)


_ISO_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (datetime.date, datetime.datetime, datetime.time)}
VALUE_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "t": tuple,
    "d": dict,
    "s": set,
    "f": frozenset,
    "c": lambda items: complex(*_check_floats(items)),
    "r": lambda items: range(*_check_ints(items)),
    "deque": _make_deque,
    "Counter": lambda items: Counter(dict(items)),
    "OrderedDict": OrderedDict,
    "defaultdict": _make_defaultdict,
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "items": lambda items: dict(items).items(),
    "named": _make_named_tuple,
    "timedelta": lambda items: datetime.timedelta(*_check_ints(items)),
    "Fraction": lambda items: importlib.import_module("fractions").Fraction(*_check_ints(items)),
}
"""Tag -> the function that makes a value of its decoded list."""
VALUE_PARSERS: dict[str, Callable[[str], Any]] = {
    "i": lambda digits: int(digits, 16),
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
    "type": _NAMED_TYPES.__getitem__,
    **{name: kind.fromisoformat for name, kind in _ISO_TYPES.items()},
    "Decimal": lambda text: importlib.import_module("decimal").Decimal(text),
    "UUID": lambda text: importlib.import_module("uuid").UUID(text),
}
"""Tag -> the function that makes a value of its text."""


def unpack(value: Any, max_bytes: int, stream: StreamCodec | None = None, depth: int = 0) -> Any:
    """Return the value of a JSON form, which may come from an attacker.

    `max_bytes` limits ranges: the least number of bytes that their items would need in a frame. `stream` is the inverse
    of the function of `pack`. Raises `MalformedMessageError` for anything but a value of a known type.
    """
    kind = type(value)
    if kind in _PLAIN_OR_INT_TYPES:
        return value
    if depth > 3 * MAX_DEPTH:  # a dictionary takes two levels, a deque three
        raise MalformedMessageError(f"nested deeper than {MAX_DEPTH}")
    depth += 1
    if kind is list:
        if _PLAIN_OR_INT_TYPES.issuperset(map(type, value)):
            return list(value)
        return [unpack(item, max_bytes, stream, depth) for item in value]
    if kind is not dict or len(value) != 1:
        raise MalformedMessageError("an object of several keys")
    ((tag, content),) = value.items()
    try:
        if tag in VALUE_PARSERS and type(content) is str:
            return VALUE_PARSERS[tag](content)
        if tag in VALUE_MAKERS and type(content) is list:
            decoded = VALUE_MAKERS[tag](unpack(content, max_bytes, stream, depth))
            if tag == "r" and len(decoded) > max_bytes // 2:
                raise MalformedMessageError(f"a range of {len(decoded)} items")
            return decoded
    except (TypeError, ValueError, KeyError, SyntaxError, ArithmeticError) as error:
        raise MalformedMessageError(f"{tag}: {type(error).__name__}") from None
    if tag == "g" and stream:
        return stream(content)
    raise MalformedMessageError("an unknown tag")


def dumps(message: Any, max_bytes: int) -> bytes:
    """Encode a message as a frame. Raises `MalformedMessageError` if it is larger than `max_bytes` bytes."""
    data = _encode(message).encode()
    if len(data) > max_bytes:
        raise MalformedMessageError(f"{len(data)} bytes, more than {max_bytes}")
    return data


def loads(data: bytes | bytearray) -> Any:
    """Parse JSON that may come from an attacker. Raises `MalformedMessageError` if it is invalid."""
    try:
        text = data.decode("ascii")
        value, end = _bounded_scan(text)
    except (ValueError, RecursionError, StopIteration) as error:
        raise MalformedMessageError(type(error).__name__) from None
    if end != len(text):
        raise MalformedMessageError("more than one value")
    return value


def _bounded_scan(text: str) -> tuple[Any, int]:
    """Parse one JSON value and return it with the position of its end.

    The parser works even if tests have raised the interpreter's limits on recursion and digits.
    """
    recursion, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    if recursion <= _SAFE_RECURSION and 0 < digits <= _MAX_DIGITS:
        value, end = _scan(text, 0)
        return value, end
    frame, depth = sys._getframe(), 0
    while frame.f_back:
        frame, depth = frame.f_back, depth + 1
    sys.setrecursionlimit(min(recursion, depth + _SAFE_RECURSION))
    sys.set_int_max_str_digits(_MAX_DIGITS)
    try:
        value, end = _scan(text, 0)
        return value, end
    finally:
        sys.setrecursionlimit(recursion)
        sys.set_int_max_str_digits(digits)


def replace_content(old: Any, new: Any) -> None:
    """Give a mutable value the content of another one of its type, in place.

    Mutable values within it stay the same objects where the types agree.
    """
    if type(old) is list:
        old[:] = [*map(_merge_into, old, new), *new[len(old) :]]
    elif isinstance(old, dict):
        merged_items = {key: _merge_into(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        dict.update(old, merged_items)
    elif type(old) is bytearray:
        old[:] = new
    else:
        old.clear()
        (old.extend if type(old) is deque else old.update)(new)


def is_mutable(value: Any) -> bool:
    """Return True if the value is of a type whose content can change, so that `replace_content` can write into it."""
    return type(value) in _MUTABLE_TYPES


def _merge_into(old: Any, new: Any) -> Any:
    if is_mutable(old) and type(old) is type(new):
        replace_content(old, new)
        return old
    return new
