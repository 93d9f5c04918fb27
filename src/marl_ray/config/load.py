"""Loading of configs: from YAML and dotted overrides to a validated config, with one-line errors."""

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

from marl_ray.config.base import Config, meant, message_of
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


class YamlLoader(yaml.SafeLoader):
    """YAML 1.1 reads `3e-4` as text; every user means the number. Duplicate keys are refused, not overwritten.

    Every error about a text is a yaml.YAMLError.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Return the value of a node. A value that Python refuses is a ConstructorError, which has its line."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date of the 13th month, a number of too many digits
            raise yaml.constructor.ConstructorError(None, None, one_line(error), node.start_mark) from error

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node of the text. One that is nested too deeply for Python is a ComposerError."""
        try:
            return super().compose_node(parent, index)
        except RecursionError:
            raise yaml.composer.ComposerError(None, None, "nested too deeply") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """Return the mapping of a node. A key that is given twice is a ConstructorError, which has its line."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the base class refuses it with its line
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_config(model: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """Read a YAML file, apply `dotted.key=value` overrides, validate.

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
            f"config file {str(path)!r} cannot be read: {one_line_without(error, path)}{_beside(path)}"
        ) from error
    return _parse_yaml(text, str(path))


def _beside(path: str | Path) -> str:
    """Return the end of an error about a config that is not there.

    It names those in the config's folder whose names are close to its own.
    """
    file = Path(path)
    stems = [] if file.exists() else sorted(each.stem for each in file.parent.glob("*.yaml"))
    # Without the ending: names that share nothing else would be close by it.
    close = [f"{name}.yaml" for name in difflib.get_close_matches(file.stem, stems)]
    return suggestion(file.name, close, before=str(path).removesuffix(file.name))


def parse_config(model: type[C], data: object, overrides: Sequence[str] = (), source: str = "config") -> C:
    """Validate plain data with overrides on top; the first problem is the error's one line."""
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
        if wrong := other_kind_hint(model.model_fields, data, source):
            raise MarlRayError(f"{source}: {wrong}") from error
        errors = error.errors()
        # A key that is misspelt is missing, too.
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        place = list(path_in(merged, first))
        others = [
            ".".join(path_in(merged, each)) for each in errors if each is not first and not _follows(each, errors)
        ]
        more = f" (and {len(others)} more)" if others else ""
        if len(others) == 1 and others != [".".join(place)]:
            more = f" (and 1 more: {others[0]})"
        instead = ""
        if first["type"] == "extra_forbidden":
            instead = unknown_key_hint(model, first["loc"], "".join(f"{step}." for step in place[:-1]))
        raise MarlRayError(f"{source}: {_explain(first, '.'.join(place))}{instead}{more}") from error


def with_overrides(data: JsonObject, overrides: Sequence[str]) -> JsonObject:
    """Return the data with `dotted.key=value` overrides put into it. Raises MarlRayError naming the override."""
    for override in overrides:
        _apply(data, override)
    return data


def dotted_keys(data: JsonValue, prefix: str = "") -> JsonObject:
    """Return the values of nested mappings by dotted keys, below `prefix`. Lists are values, and empty mappings vanish."""
    if not isinstance(data, Mapping):
        return {prefix: data}
    return {
        dotted: value
        for key, inner in data.items()
        for dotted, value in dotted_keys(inner, f"{prefix}.{key}" if prefix else key).items()
    }


def config_hash(config: Config) -> str:
    """Return the sha256 of the canonical JSON of a config: equal for equal configs, whatever file they came from."""
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


def _apply(data: JsonObject, override: str) -> None:
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
    shown = repr(error["input"]) if error["input"] is not None else "nothing"
    named = error["type"] == "value_error" and str(error["input"]) in message
    explained = len(shown) > 60 or isinstance(error["input"], Mapping) or named
    suffix = "" if explained else f", got {shown}"
    return f"{key}: {message}{suffix}{meant(error)}" if key else message


def other_kind_hint(keys: Container[str], data: Mapping[str, object], file: str) -> str:
    """Return one sentence if the data is a config of another kind than that which has `keys` at the top.

    The text is empty otherwise.
    """
    expected_kind = next((kind for key, (kind, _) in KIND_BY_KEY.items() if key in keys), None)
    for key, (kind, command) in KIND_BY_KEY.items():
        if expected_kind is not None and key in data and key not in keys and kind != expected_kind:
            return f"is {kind}; expected {expected_kind}: {command.replace('FILE', file)}"
    return ""


def _values(data: Any) -> list[Any]:
    """Return the values of a mapping; any other value alone."""
    return list(data.values()) if isinstance(data, Mapping) else [data]


def _follows(error: ErrorDetails, errors: Sequence[ErrorDetails]) -> bool:
    """Return True if a list is too short because an entry of it is wrong."""
    place = error["loc"]
    return error["type"] == "too_short" and any(e is not error and e["loc"][: len(place)] == place for e in errors)


def path_in(data: Any, error: ErrorDetails) -> Iterator[str]:
    """Yield the steps of the place of one of pydantic's errors that are keys of the data, or could be.

    The others name the kinds of a union, or a validator.
    """
    steps, missing = error["loc"], error["type"] == "missing"
    for step in steps[:-1] if missing else steps:
        is_entry = isinstance(data, list) and isinstance(step, int) and step < len(data)
        if is_entry or (isinstance(data, Mapping) and step in data):
            data = data[step]
        elif isinstance(step, int) or NO_KEY.match(step) or step in _values(data):
            continue
        yield str(step)
    if missing:
        yield str(steps[-1])


def unknown_key_hint(model: type[BaseModel], place: Sequence[int | str], before: str = "") -> str:
    """Return the end of an error about an unknown key at this place of a config.

    It says where a key of that name is, or else which keys at its place are close to it. `before` is put before each.
    """
    parts: list[object] = [model]
    for step in place[:-1]:
        inner = [child for part in parts for child in _below(part, step)]
        parts = inner or [part for part in parts if _has_kind(part, step)] or parts  # a union's tag is no key
    key = str(place[-1])
    models = [part for part in parts if _is_model(part)]
    deeper = [path for each in models for path in _paths(each) if path.rpartition(".")[2] == key]
    if deeper:
        return f"; did you mean {' or '.join(before + path for path in deeper[:3])}?"
    return did_you_mean(key, [name for each in models for name in each.model_fields], before=before)


def _has_kind(part: Any, kind: int | str) -> bool:
    """Return True for the model of a union whose key `kind` has this one value."""
    return _is_model(part) and "kind" in part.model_fields and get_args(part.model_fields["kind"].annotation) == (kind,)


def _is_model(part: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _below(part: object, step: int | str) -> Iterator[object]:
    """Yield the types of what lies under a key, a name or an index of a type."""
    if _is_model(part):
        if step in part.model_fields:
            yield from _parts(part.model_fields[step].annotation)
    elif get_origin(part) is not None:
        for inner in get_args(part):
            yield from _parts(inner)


def _parts(annotation: object) -> Iterator[object]:
    """Yield the types of a union, one by one; any other type alone."""
    if get_origin(annotation) is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for inner in get_args(annotation):
            yield from _parts(inner)
    else:
        yield annotation


def _paths(model: type[BaseModel]) -> Iterator[str]:
    """Yield the dotted keys of the groups of a model, however deep."""
    for name, field in model.model_fields.items():
        for part in _parts(field.annotation):
            if _is_model(part):
                yield from (f"{name}.{key}" for key in part.model_fields)
                yield from (f"{name}.{path}" for path in _paths(part))
