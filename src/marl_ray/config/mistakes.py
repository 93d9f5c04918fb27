"""Guesses what a user meant by a config that is refused: the kind of a file, and the key that a wrong one is close to."""

import types
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from marl_ray.errors import did_you_mean

KINDS = {
    "space": ("a sweep's config", "marl-ray sweep FILE"),
    "arms": ("an experiment's config", "marl-ray experiment create FILE"),
    "applications": ("a gateway's Serve config", "marl-ray serve FILE"),
    "groups": ("a cluster's config", "marl-ray cluster render FILE"),
    "train": ("a run's config", "marl-ray train FILE"),
    "algorithm": ("a run's config", "marl-ray train FILE"),
    "env": ("a run's config", "marl-ray train FILE"),
    "apiVersion": ("a manifest of Kubernetes", "marl-ray cluster apply FILE"),
}
"""A key that configs of one kind alone have at the top -> the kind, and the command that reads it."""


def other_kind(keys: Container[str], data: Mapping[str, Any], file: str) -> str:
    """One sentence if the data is a config of another kind than that which has `keys` at the top; else empty."""
    own = next((kind for key, (kind, _) in KINDS.items() if key in keys), None)
    for key, (kind, command) in KINDS.items():
        if own is not None and key in data and key not in keys and kind != own:
            return f"is {kind}; expected {own}: {command.replace('FILE', file)}"
    return ""


def instead_of(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """The end of an error about an unknown key at this place of a config: where a key of that name is, or else which
    keys at its place are close to it."""
    parts: list[Any] = [model]
    for step in place[:-1]:
        inner = [child for part in parts for child in _below(part, step)]
        parts = inner or parts  # the step may be the tag of a union, which is no key
    key, models = str(place[-1]), [part for part in parts if _is_model(part)]
    deeper = [path for each in models for path in _paths(each) if path.rpartition(".")[2] == key]
    if deeper:
        return f"; did you mean {' or '.join(deeper[:3])}?"
    return did_you_mean(key, [name for each in models for name in each.model_fields])


def _is_model(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _below(part: Any, step: int | str) -> Iterator[Any]:
    """The types of what lies under a key, a name or an index of a type."""
    if _is_model(part):
        if step in part.model_fields:
            yield from _parts(part.model_fields[step].annotation)
    elif get_origin(part) is not None:
        for inner in get_args(part):
            yield from _parts(inner)


def _parts(annotation: Any) -> Iterator[Any]:
    """The types of a union, one by one; any other type alone."""
    if get_origin(annotation) is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for inner in get_args(annotation):
            yield from _parts(inner)
    else:
        yield annotation


def _paths(model: type[BaseModel]) -> Iterator[str]:
    """The dotted keys of the groups of a model, however deep."""
    for name, field in model.model_fields.items():
        for part in _parts(field.annotation):
            if _is_model(part):
                yield from (f"{name}.{key}" for key in part.model_fields)
                yield from (f"{name}.{path}" for path in _paths(part))
