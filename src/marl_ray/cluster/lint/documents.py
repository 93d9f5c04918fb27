"""Documents of YAML files, and the Serve config inside a RayService."""

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import yaml

from marl_ray.config.load import YamlLoader
from marl_ray.errors import MarlRayError, one_line, one_line_without
from marl_ray.json_types import JsonValue


def read_documents(path: str | Path) -> list[JsonValue]:
    """Return all documents of a YAML file, empty ones left out.

    The documents hold what JSON holds: YAML also knows sets, bytes, and anchors that lead to themselves. Raises
    MarlRayError naming the file, and the line where it can.
    """
    try:
        documents = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MarlRayError(f"{str(path)!r} cannot be read: {one_line_without(error, path)}") from error
    except yaml.YAMLError as error:
        raise MarlRayError(f"{path}: {describe_yaml_error(error)}") from error
    try:
        json.dumps(documents, allow_nan=False, default=_date_text)
    except (TypeError, ValueError, RecursionError) as error:
        raise MarlRayError(f"{path}: expected what JSON can hold: {one_line(error)}") from None
    return documents


def is_manifest(document: object) -> bool:
    """Return True if a document is meant for Kubernetes; it may still be wrong."""
    return isinstance(document, Mapping) and "kind" in document


def embedded_serve_config(document: object) -> JsonValue:
    """Return the Serve config inside a RayService, parsed from its `serveConfigV2`.

    Return None for any other document, and where the text is missing, no YAML, or not exactly one document of it.
    """
    spec = document.get("spec") if isinstance(document, Mapping) and document.get("kind") == "RayService" else None
    text = spec.get("serveConfigV2") if isinstance(spec, Mapping) else None
    if not isinstance(text, str):
        return None
    try:
        documents = parse_yaml(text)
    except yaml.YAMLError:
        return None
    return documents[0] if len(documents) == 1 else None


def parse_yaml(text: str) -> list[JsonValue]:
    """Return the documents of a YAML text; empty ones are left out. Raises yaml.YAMLError."""
    return [document for document in yaml.load_all(text, YamlLoader) if document is not None]


def _date_text(value: object) -> str:
    """Return a date, which YAML reads where text has no quotes, as the text. Raises TypeError for any other value."""
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"got {type(value).__name__} {value!r:.40}")


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """Return an error of YAML in one line, with the line of the file where it is known."""
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}" if mark else ""
    return f"not valid YAML{where}: {getattr(error, 'problem', None) or one_line(error)}"
