"""Arguments of `marl_ray.evaluate`: their types, and the records of `evaluation/options.py` that are made of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from marl_ray.api.calls import short_repr
from marl_ray.deadlines.seconds import EXPECTED_SECONDS, are_seconds
from marl_ray.errors import FieldError
from marl_ray.evaluation.benchmarks.base import ANSWER_KINDS
from marl_ray.evaluation.options import EpisodeOptions, RunningOptions, ScoringOptions, WebRequest, WritingRequest
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.rewards.option_numbers import is_finite
from marl_ray.sandbox import Level

_RECORD_TYPES: tuple[type, ...] = (EpisodeOptions, WebRequest, ScoringOptions, WritingRequest, RunningOptions)
"""Dataclasses whose fields are the options of `evaluate`."""
OPTIONS = sorted({field.name for record in _RECORD_TYPES for field in dataclasses.fields(record)})
"""All options of `evaluate`."""


class _OptionType(NamedTuple):
    """The values that an option may have."""

    expected: str
    """The values in words, behind `expected`."""
    convert: Callable[[Any], object]
    """Returns a value as the records hold it. Raises ValueError for one that is not expected."""


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


def _text(value: object) -> str:
    _require(isinstance(value, str))
    return str(value)


def _text_or_path(value: object) -> str:
    _require(isinstance(value, str | Path))
    return str(value)


def _whole_number(value: Any, minimum: int | None = None) -> int:
    """Return a whole number of Python or NumPy as one of Python."""
    _require(isinstance(value, Integral) and not isinstance(value, bool))
    _require(minimum is None or value >= minimum)
    return int(value)


def _finite_number(value: Any) -> float:
    """Return a finite number of Python or NumPy as one of Python."""
    _require(is_finite(value))
    return float(value)


def _seconds(value: object) -> float:
    """Return the seconds of a limit as a float of Python."""
    _require(are_seconds(value))
    return _finite_number(value)


def _flag(value: object) -> bool:
    _require(isinstance(value, bool))
    return bool(value)


def _ks(value: object) -> tuple[int, ...]:
    """Return the values of k, of which one may be given as it is."""
    if isinstance(value, Integral):
        return (_whole_number(value),)
    _require(isinstance(value, Sequence) and not isinstance(value, str))
    return tuple(map(_whole_number, value))  # type: ignore[call-overload]


def _level(value: object) -> Level:
    if isinstance(value, Level):
        return value
    _require(isinstance(value, str) and value.upper() in Level.__members__)
    return Level[str(value).upper()]


def _answer(value: object) -> object:
    _require(isinstance(value, str) and value in ANSWER_KINDS)
    return value


def _options_by_name(value: Any) -> JsonObject:
    _require(isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
    return dict(value)


def _function(value: object) -> object:
    _require(callable(value))
    return value


def _whole_number_from(minimum: int) -> _OptionType:
    return _OptionType(f"a whole number of {minimum} or more", lambda value: _whole_number(value, minimum))


_FLAG = _OptionType("True or False", _flag)
_TYPES: Mapping[str, _OptionType] = {
    "benchmark": _OptionType("a benchmark's name", _text),
    "policy": _OptionType("a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS", _text_or_path),
    "samples": _OptionType("a file or a URI", _text_or_path),
    "data": _OptionType("a file, a URI or another source of problems", _text_or_path),
    "split": _OptionType("the name of a part of the problems", _text),
    "sha256": _OptionType("a SHA-256 or any", _text),
    "out": _OptionType("a folder", lambda value: Path(_text_or_path(value))),
    "k": _OptionType("a whole number or a sequence of them", _ks),
    "mode": _OptionType("official, hardened or both", _text),
    "timeout_s": _OptionType(EXPECTED_SECONDS, _seconds),
    "min_level": _OptionType("limits, paths or namespaces", _level),
    "workers": _whole_number_from(1),
    "local": _FLAG,
    "env": _OptionType("options of the environment by name", _options_by_name),
    "tracking_uri": _OptionType("a URI", _text),
    "progress": _OptionType("a function of what is counted, the number done and the total", _function),
    "agent": _OptionType("an agent's name", _text),
    "num_samples": _whole_number_from(1),
    "seed": _whole_number_from(0),
    "greedy": _FLAG,
    "temperature": _OptionType("a finite number", _finite_number),
    "max_tokens": _whole_number_from(1),
    "answer": _OptionType(f"{', '.join(ANSWER_KINDS[:-1])} or {ANSWER_KINDS[-1]}", _answer),
    "prompt": _OptionType("a text", _text),
    "episodes": _whole_number_from(1),
    "max_steps": _whole_number_from(1),
}
"""Option -> the values that it may have."""


def convert_options(options: JsonMapping) -> JsonObject:
    """Return the options that are given, with values as the records hold them.

    One that is None, or False where it may be, counts as not given. Raises FieldError that names an option of a value
    that is not expected, and says what is.
    """
    converted: JsonObject = {}
    for name, value in options.items():
        if value is None:
            continue
        try:
            converted[name] = _TYPES[name].convert(value)
        except ValueError as error:
            raise FieldError(name, f"expected {_TYPES[name].expected}, got {short_repr(value)}") from error
    return {name: value for name, value in converted.items() if value is not False}


def make_records(arguments: JsonMapping, kinds: Sequence[type], refusal: str) -> list[Any]:
    """Return the records of one kind of evaluation, made from its options.

    Raises FieldError with the `refusal` for an option that is a field of none of them.
    """
    fields = {kind: {field.name for field in dataclasses.fields(kind)} for kind in _RECORD_TYPES}
    accepted = set().union(*(fields[kind] for kind in kinds))
    for name in arguments:
        if name not in accepted:
            raise FieldError(name, refusal)
    return [kind(**{name: value for name, value in arguments.items() if name in fields[kind]}) for kind in kinds]
