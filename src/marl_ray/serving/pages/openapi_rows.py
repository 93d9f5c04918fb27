"""The OpenAPI document as rows of a page: plain data in, plain data out."""

from collections.abc import Iterator, Mapping
from typing import Any

from marl_ray.json_types import JsonMapping, JsonObject

Part = JsonMapping
_MAX_CHARACTERS = 160
"""Maximum number of characters of a list of values on the page; a longer one is shown as `text`."""


def operations(document: Part) -> list[dict[str, object]]:
    """Return one row for each operation, in the document's order: what it takes and what it answers."""
    return [
        {
            "method": method.upper(),
            "path": path,
            "name": operation["operationId"],
            "summary": operation["summary"],
            "note": operation.get("description", ""),
            "parameters": [_describe_parameter(document, part) for part in operation.get("parameters", ())],
            "fields": list(_describe_fields(document, _find_json_schema(operation.get("requestBody", {})))),
            "answers": [_describe_answer(document, status, part) for status, part in operation["responses"].items()],
        }
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def models(document: Part) -> list[JsonObject]:
    """Return one row for each schema that has fields."""
    schemas: Part = document["components"]["schemas"]
    rows = [
        {"name": name, "fields": list(_describe_fields(document, schema))} for name, schema in sorted(schemas.items())
    ]
    return [row for row in rows if row["fields"]]


def _resolve_reference(document: Part, part: Part) -> Part:
    while "$ref" in part:
        resolved: Any = document
        for key in part["$ref"].removeprefix("#/").split("/"):
            resolved = resolved[key]
        part = resolved
    return part


def _find_json_schema(body: Part) -> Part:
    schema: Part = body.get("content", {}).get("application/json", {}).get("schema", {})
    return schema


def _describe_parameter(document: Part, part: Part) -> dict[str, str]:
    parameter = _resolve_reference(document, part)
    schema = parameter.get("schema", {})
    return {
        "name": parameter["name"],
        "where": parameter["in"],
        "kind": kind(schema),
        "text": schema.get("description", parameter.get("description", "")),
    }


def _describe_fields(document: Part, schema: Part) -> Iterator[dict[str, object]]:
    resolved = _resolve_reference(document, schema)
    required = resolved.get("required", ())
    for name, part in resolved.get("properties", {}).items():
        yield {
            "name": name,
            "kind": kind(part),
            "required": name in required,
            "text": part.get("description", ""),
        }


def _describe_answer(document: Part, status: str, part: Part) -> dict[str, str]:
    resolved = _resolve_reference(document, part)
    kinds = [kind(content.get("schema", {})) for content in resolved.get("content", {}).values()]
    return {"status": status, "text": resolved.get("description", ""), "kind": " or ".join(dict.fromkeys(kinds))}


def kind(schema: Part) -> str:
    """Return a schema in a few words: `integer`, `list of Point`, `Lineage or null`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " or ".join(dict.fromkeys(kind(part) for part in schema[choice]))
    if "enum" in schema or "const" in schema:
        text = " or ".join(map(repr, schema.get("enum", [schema.get("const")])))
        return text if len(text) <= _MAX_CHARACTERS else "text"
    named = schema.get("type", "anything")
    if isinstance(named, list):
        return " or ".join(named)
    if named == "array":
        return f"list of {kind(schema['items'])}" if "items" in schema else "list"
    values = schema.get("additionalProperties")
    return f"object of {kind(values)}" if named == "object" and isinstance(values, Mapping) else str(named)
