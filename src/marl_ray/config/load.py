"""Loads configs from YAML and dotted overrides, with errors of one line."""

import difflib
import hashlib
import json
import re
import types
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeGuard, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from marl_ray.config.base import Config, choice_hint, message_of
from marl_ray.errors import MarlRayError, did_you_mean, one_line, one_line_without, suggestion
from marl_ray.json_types import JsonObject, JsonValue

C = TypeVar("C", bound=Config)
KIND_BY_KEY = {
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
NO_KEY = re.compile(r"(str|int|float|bool|none|any|dict|list|tuple|[a-z]+-.*|.*\[.*|[A-Z]\w*)$")
"""Steps of pydantic's place of an error that name a type, a validator or a model."""
MAX_INPUT_LENGTH = 60
"""Maximum number of characters of a value that an error shows, so that it stays one line."""


class YamlLoader(yaml.SafeLoader):
    """YAML in which `3e-4` is a number, though YAML 1.1 reads it as text, and a key may be given only once.

    Every error about a text is a yaml.YAMLError.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Return the value of a node. A value that Python refuses is a ConstructorError, which has its line."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date of the 13th month, a number of too many digits
            raise yaml.constructor.ConstructorError(None, None, one_line(error), node.start_mark) from error

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node of the text; None at its end. One that is nested too deeply is a ComposerError."""
        try:
            return super().compose_node(parent, index)
        except RecursionError:
            raise yaml.composer.ComposerError(None, None, "nested too deeply") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """Return the mapping of a node. A key that is given twice is a ConstructorError, which has its line."""
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the base class refuses it with its line
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_config(model: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """Return the validated config of a YAML file, with `dotted.key=value` overrides on top.

    Raises MarlRayError naming the file and the key.
    """
    return parse_config(model, read_yaml(path), overrides, source=str(path))


def read_yaml(path: str | Path) -> JsonValue:
    """Return plain data of a YAML file. Raises MarlRayError naming the file and the line."""
    if Path(path).suffix == ".py":
        raise MarlRayError(f"config file {str(path)!r}: expected a YAML file, got a Python file")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MarlRayError(
            f"config file {str(path)!r} cannot be read: {one_line_without(error, path)}{_other_files_hint(path)}"
        ) from error
    return _parse_yaml(text, str(path))


def _other_files_hint(path: str | Path) -> str:
    """Return the end of an error about a config that is not there.

    The text names the configs of the same folder whose names are close to its own.
    """
    file = Path(path)
    stems = [] if file.exists() else sorted(other.stem for other in file.parent.glob("*.yaml"))
    # Stems are compared, because names that share nothing but the ending would be close by it.
    close = [f"{name}.yaml" for name in difflib.get_close_matches(file.stem, stems)]
    return suggestion(file.name, close, before=str(path).removesuffix(file.name))


def parse_config(model: type[C], data: object, overrides: Sequence[str] = (), source: str = "config") -> C:
    """Return the validated config of plain data with overrides on top. Raises MarlRayError with the first mistake."""
    if not isinstance(data, Mapping):
        raise MarlRayError(
            f"{source}: expected a mapping of keys at the top, got {'nothing' if data is None else type(data).__name__}"
        )
    try:
        plain = json.loads(json.dumps(data, default=str))
    except (TypeError, ValueError) as error:  # a YAML alias that contains itself, a key that is no text
        raise MarlRayError(f"{source}: not plain data: {one_line(error)}") from error
    merged = with_overrides(plain, overrides)
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        if other_kind := other_kind_hint(model.model_fields, data, source):
            raise MarlRayError(f"{source}: {other_kind}") from error
        mistakes = error.errors()
        # An unknown key comes first: where it is a misspelt one, the right one is missing, too.
        first = next((mistake for mistake in mistakes if mistake["type"] == "extra_forbidden"), mistakes[0])
        path = list(path_in(merged, first))
        other_keys = [
            ".".join(path_in(merged, mistake))
            for mistake in mistakes
            if mistake is not first and not _is_consequence(mistake, mistakes)
        ]
        count = f" (and {len(other_keys)} more)" if other_keys else ""
        if len(other_keys) == 1 and other_keys != [".".join(path)]:
            count = f" (and 1 more: {other_keys[0]})"
        hint = ""
        if first["type"] == "extra_forbidden":
            hint = unknown_key_hint(model, first["loc"], "".join(f"{step}." for step in path[:-1]))
        raise MarlRayError(f"{source}: {_explain(first, '.'.join(path))}{hint}{count}") from error


def with_overrides(data: JsonObject, overrides: Sequence[str]) -> JsonObject:
    """Return the data with `dotted.key=value` overrides put into it. Raises MarlRayError naming the override."""
    for override in overrides:
        _apply_override(data, override)
    return data


def dotted_keys(data: JsonValue, prefix: str = "") -> JsonObject:
    """Return the values of nested mappings by dotted keys below `prefix`; lists are values, and empty mappings vanish."""
    if not isinstance(data, Mapping):
        return {prefix: data}
    return {
        dotted: value
        for key, inner in data.items()
        for dotted, value in dotted_keys(inner, f"{prefix}.{key}" if prefix else key).items()
    }


def config_hash(config: Config) -> str:
    """Return the sha256 of a config's canonical JSON, which is the same for equal configs of whatever files."""
    canonical = json.dumps(config.resolve(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _parse_yaml(text: str, source: str) -> JsonValue:
    try:
        return yaml.load(text, YamlLoader)  # noqa: S506  it extends the safe one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise MarlRayError(
            f"{source}{where}: not valid YAML: {getattr(error, 'problem', None) or one_line(error)}"
        ) from error


def _apply_override(data: JsonObject, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise MarlRayError(f"override {override!r}: expected dotted.key=value")
    *parents, last = key.split(".")
    node = data
    for depth, part in enumerate(parents):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise MarlRayError(
                f"override {override!r}: {'.'.join(parents[: depth + 1])} is a value, not a group of keys"
            )
        node = child
    node[last] = _parse_yaml(text, f"override {override!r}")


def _explain(error: ErrorDetails, key: str) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}"
    if error["type"] == "missing":
        return f"missing key {key!r}"
    message = message_of(error)
    shown_input = repr(error["input"]) if error["input"] is not None else "nothing"
    is_named = error["type"] == "value_error" and str(error["input"]) in message
    hides_input = len(shown_input) > MAX_INPUT_LENGTH or isinstance(error["input"], Mapping) or is_named
    suffix = "" if hides_input else f", got {shown_input}"
    return f"{key}: {message}{suffix}{choice_hint(error)}" if key else message


def other_kind_hint(keys: Container[str], data: Mapping[str, object], file: str) -> str:
    """Return one sentence if the data is a config of another kind than that which has `keys` at the top.

    The text is empty otherwise.
    """
    expected_kind = next((kind for key, (kind, _) in KIND_BY_KEY.items() if key in keys), None)
    for key, (kind, command) in KIND_BY_KEY.items():
        if expected_kind is not None and key in data and key not in keys and kind != expected_kind:
            return f"is {kind}; expected {expected_kind}: {command.replace('FILE', file)}"
    return ""


def _values_of(data: Any) -> list[Any]:
    """Return the values of a mapping; any other value alone."""
    return list(data.values()) if isinstance(data, Mapping) else [data]


def _is_consequence(error: ErrorDetails, errors: Sequence[ErrorDetails]) -> bool:
    """Return True if a list is too short because an entry of it is wrong."""
    place = error["loc"]
    return error["type"] == "too_short" and any(
        other is not error and other["loc"][: len(place)] == place for other in errors
    )


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
