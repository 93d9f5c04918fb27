"""The place of a mistake in data that pydantic refused, and the keys of the model that are close to it."""

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from marl_ray.errors import did_you_mean

NO_KEY = re.compile(r"(str|int|float|bool|none|any|dict|list|tuple|[a-z]+-.*|.*\[.*|[A-Z]\w*)$")
"""Steps of pydantic's place of an error that name a type, a validator or a model."""


def _values_of(data: Any) -> list[Any]:
    """Return the values of a mapping; any other value alone."""
    return list(data.values()) if isinstance(data, Mapping) else [data]


def path_in(data: Any, error: ErrorDetails) -> Iterator[str]:
    """Yield the steps of the place of one of pydantic's errors that are keys of the data, or could be.

    The others name the kinds of a union, or a validator.
    """
    steps, missing = error["loc"], error["type"] == "missing"
    for step in steps[:-1] if missing else steps:
        is_entry = isinstance(data, list) and isinstance(step, int) and step < len(data)
        if is_entry or (isinstance(data, Mapping) and step in data):
            data = data[step]
        elif isinstance(step, int) or NO_KEY.match(step) or step in _values_of(data):
            continue
        yield str(step)
    if missing:
        yield str(steps[-1])


def unknown_key_hint(model: type[BaseModel], place: Sequence[int | str], before: str = "") -> str:
    """Return the end of an error about an unknown key at this place of a config.

    The text says where a key of that name is, or else which keys at its place are close to it. `before` is put before
    each.
    """
    parts: list[object] = [model]
    for step in place[:-1]:
        inner = [child for part in parts for child in _types_below(part, step)]
        parts = inner or [part for part in parts if _has_kind(part, step)] or parts  # a union's tag is no key
    key = str(place[-1])
    models = [part for part in parts if _is_model(part)]
    paths = [path for inner_model in models for path in _group_paths(inner_model) if path.rpartition(".")[2] == key]
    if paths:
        return f"; did you mean {' or '.join(before + path for path in paths[:3])}?"
    return did_you_mean(key, [name for inner_model in models for name in inner_model.model_fields], before=before)


def _has_kind(part: Any, kind: int | str) -> bool:
    """Return True for the model of a union whose key `kind` has this one value."""
    return _is_model(part) and "kind" in part.model_fields and get_args(part.model_fields["kind"].annotation) == (kind,)


def _is_model(part: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _types_below(part: object, step: int | str) -> Iterator[object]:
    """Yield the types of what lies under a key, a name or an index of a type."""
    if _is_model(part):
        if step in part.model_fields:
            yield from _union_members(part.model_fields[step].annotation)
    elif get_origin(part) is not None:
        for inner in get_args(part):
            yield from _union_members(inner)


def _union_members(annotation: object) -> Iterator[object]:
    """Yield the types of a union, one by one; any other type alone."""
    if get_origin(annotation) is Annotated:
        yield from _union_members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for inner in get_args(annotation):
            yield from _union_members(inner)
    else:
        yield annotation


def _group_paths(model: type[BaseModel]) -> Iterator[str]:
    """Yield the dotted keys of the groups of a model, however deep."""
    for name, field in model.model_fields.items():
        for part in _union_members(field.annotation):
            if _is_model(part):
                yield from (f"{name}.{key}" for key in part.model_fields)
                yield from (f"{name}.{path}" for path in _group_paths(part))
