"""Loads configs from YAML and dotted overrides."""

import difflib
import hashlib
import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from marl_ray.config.base import Config
from marl_ray.config.mistakes.wording import first_mistake
from marl_ray.errors import MarlRayError, one_line, one_line_without, suggestion, type_name
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


class YamlLoader(yaml.SafeLoader):
    """YAML in which `3e-4` is a number, though YAML 1.1 reads it as text, and a key may be given only once.

    `<<: *NAME` merges the keys of another mapping into this one, whose own keys come first.

    Every error about a text is a yaml.YAMLError.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Return the value of a node. A value that Python refuses is a ConstructorError, which has its line."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date of the 13th month, a number of too many digits
            raise yaml.constructor.ConstructorError(None, None, one_line(error), node.start_mark) from error
        except (AttributeError, LookupError) as error:  # a text whose tag calls it a number, a bool or a moment
            message = f"{getattr(node, 'value', None)!r} is not what its tag {node.tag.rpartition(':')[2]} says"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from error

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node of the text; None at its end.

        One that is nested too deeply is a ComposerError, and a key that is given twice a ConstructorError, which has its
        line.
        """
        try:
            node = super().compose_node(parent, index)
        except RecursionError:
            raise yaml.composer.ComposerError(None, None, "nested too deeply") from None
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)  # as they are written, because a constructed mapping also has those that `<<` merges
        return node

    def _check_keys(self, node: yaml.MappingNode) -> None:
        keys = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # its value is no key of a Python mapping; the base class refuses it with its line
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            keys.add(key)

    def construct_special_key(self, node: yaml.Node) -> object:
        """Return the text of a `<<` or `=`, for which the base class has no value."""
        return self.construct_yaml_str(node)


YamlLoader.add_constructor("tag:yaml.org,2002:merge", YamlLoader.construct_special_key)
YamlLoader.add_constructor("tag:yaml.org,2002:value", YamlLoader.construct_special_key)
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
        raise MarlRayError(f"{source}: expected a mapping of keys at the top, got {type_name(data)}")
    merged = with_overrides(_plain_data(data, source), overrides)
    try:
        config = model.model_validate(merged)
    except ValidationError as error:
        if other_kind := other_kind_hint(model.model_fields, data, source):
            raise MarlRayError(f"{source}: {other_kind}") from error
        raise MarlRayError(f"{source}: {first_mistake(error, merged, model)}") from error
    # Keys whose names only an environment, a tool or a reward knows: no JSON could hand their values to a worker.
    for key, value in dotted_keys(merged).items():
        if (number := _infinite_number(value)) is not None:
            raise MarlRayError(f"{source}: {key}: expected a finite number, got {number}")
    return config


def _plain_data(data: object, source: str) -> JsonValue:
    """Return the data as JSON has it, in which a date is a text. Raises MarlRayError if JSON has nothing like it."""
    try:
        return json.loads(json.dumps(data, default=str))
    except (TypeError, ValueError) as error:  # a YAML alias that contains itself, a key that is no text
        raise MarlRayError(f"{source}: not plain data: {one_line(error)}") from error


def _infinite_number(value: JsonValue) -> float | None:
    """Return the first number of a value or of its lists that is infinite or not a number; None if each is finite."""
    if isinstance(value, Mapping | list):
        parts = value.values() if isinstance(value, Mapping) else value
        return next((number for part in parts if (number := _infinite_number(part)) is not None), None)
    return value if isinstance(value, float) and not math.isfinite(value) else None


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
    node[last] = _plain_data(_parse_yaml(text, f"override {override!r}"), f"override {override!r}")


def other_kind_hint(keys: Container[str], data: Mapping[str, object], file: str) -> str:
    """Return one sentence if the data is a config of another kind than that which has `keys` at the top, else ""."""
    expected_kind = next((kind for key, (kind, _) in KIND_BY_KEY.items() if key in keys), None)
    for key, (kind, command) in KIND_BY_KEY.items():
        if expected_kind is not None and key in data and key not in keys and kind != expected_kind:
            return f"is {kind}; expected {expected_kind}: {command.replace('FILE', file)}"
    return ""
