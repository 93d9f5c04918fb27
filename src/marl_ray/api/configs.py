"""Configs as the API's callers give them: a file or a mapping, with changes by section."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from marl_ray.config.load import read_yaml
from marl_ray.errors import MarlRayError

ConfigSource: TypeAlias = str | Path | Mapping[str, Any]
"""A YAML file, or plain data."""


def data_of(
    source: ConfigSource, changes: Mapping[str, Any], read: Callable[[str | Path], Any] = read_yaml
) -> tuple[dict[str, Any], str]:
    """Plain data of a config with the changes merged into it, and the name of its source for errors.

    `read` reads a file. A mapping in `changes` changes the keys that it names and leaves the others of its section; any
    other value replaces the key. Raises MarlRayError for a file that cannot be read, or one that holds no mapping.
    """
    if isinstance(source, str | Path):
        data, name = read(source), str(source)
    else:
        data, name = source, "config"
    if not isinstance(data, Mapping):
        raise MarlRayError(f"{name}: expected a mapping of keys at the top, got {type(data).__name__}")
    return merged(data, changes), name


def merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the data with the changes, section by section."""
    result = dict(data)
    for key, value in changes.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result
