"""The gateway's OpenAPI 3.1 document, made of the table of routes and of pydantic models."""

from functools import lru_cache
from typing import Any

import orjson
from pydantic import TypeAdapter

from marl_ray import __version__
from marl_ray.config import ExperimentConfig
from marl_ray.config.base import NAME_PATTERN
from marl_ray.json_types import JsonObject, JsonSchema
from marl_ray.serving.handlers.api_description.answers import Error
from marl_ray.serving.handlers.api_description.operations import OPERATIONS, Operation
from marl_ray.serving.handlers.api_description.requests import REASON, REQUESTS, SUCCEEDS
from marl_ray.serving.handlers.open_inference.schemas import INFER_PARTS, InferError
from marl_ray.serving.handlers.openai.schemas import OPENAI_PARTS
from marl_ray.serving.handlers.route import Route

_ERROR_DESCRIPTIONS = {
    400: "A field is unknown, missing or wrong.",
    401: "No known key.",
    403: "The key lacks the scope.",
    404: "No such experiment, or no such session in it.",
    409: "Not possible now: it exists already, is decided already, or the epoch is over.",
    413: "Larger than the gateway's config allows.",
    422: "The experiment's policies are of another kind.",
    429: "The key has used up its rate.",
    503: "The database is away, or no arm answers.",
    504: "No answer within the deadline.",
}
_TEXT: JsonSchema = {"type": "string"}
_EVENT: JsonSchema = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""The schema of one event of a stream; its data is a part of the answer, as JSON."""
_PARAMETERS: dict[str, dict[str, JsonSchema]] = {
    "header": {
        "x-request-timeout-seconds": {"type": "number", "exclusiveMinimum": 0},
        "x-session-id": _TEXT | {"description": "The unit, where the body names none."},
        "x-arm": _TEXT
        | {"description": "Arm to act with, outside of the experiment; needs a key with the scope admin."},
    },
    "path": {
        "name": _TEXT | {"pattern": NAME_PATTERN},
        "agent": _TEXT | {"pattern": "^[^/]+$"},
        "version": _TEXT | {"pattern": "^[^/]+:[^/]+$", "description": "NAME:VERSION of the model registry."},
    },
}
"""Place of a parameter -> its name -> its schema."""
_HEADERS: JsonSchema = {
    "x-request-id": {"schema": _TEXT, "description": "The caller's own if it is valid, else a new one."}
}


@lru_cache(maxsize=8)
def openapi(routes: tuple[Route, ...], base: str, has_keys: bool) -> bytes:
    """Return the OpenAPI document, as JSON.

    `base` is the prefix that the gateway is mounted at; `has_keys` says whether it has API keys.
    """
    paths: dict[str, JsonObject] = {}
    for route in routes:
        if route.operation is not None:
            operation = _operation(route.operation, route.template, has_keys)
            paths.setdefault(route.template, {})[route.method.lower()] = operation
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "marl-ray gateway",
                "version": __version__,
                "description": "Sessions are assigned to arms (bundles of policies), act with them, and report outcomes.",
            },
            "servers": [{"url": base or "/"}],
            "paths": paths,
            "components": {
                "schemas": REQUESTS | OPENAI_PARTS | INFER_PARTS | _models(),
                "parameters": {
                    name: _parameter(name, where, schema)
                    for where, schemas in _PARAMETERS.items()
                    for name, schema in schemas.items()
                },
                "responses": {str(status): _describe_error(status, Error) for status in _ERROR_DESCRIPTIONS},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _models() -> dict[str, JsonSchema]:
    models = [
        Error,
        InferError,
        ExperimentConfig,
        *(operation.answer for operation in OPERATIONS.values() if not isinstance(operation.answer, dict)),
    ]
    inputs: Any = [(number, "validation", TypeAdapter(model)) for number, model in enumerate(models)]
    definitions = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")[1]
    schemas: dict[str, JsonSchema] = definitions["$defs"]
    schemas["GuardrailConfig"]["required"].remove("better")  # some metrics have a default for it
    experiment = schemas["ExperimentConfig"]
    parts = {
        "properties": experiment["properties"] | {"reason": REASON, "succeeds": SUCCEEDS},
        "required": [*experiment["required"], "reason"],
    }
    return schemas | {"ExperimentRequest": experiment | parts | {"title": "ExperimentRequest"}}


def _operation(operation_id: str, template: str, has_keys: bool) -> JsonObject:
    operation = OPERATIONS[operation_id]
    path = [part.strip("{}") for part in template.split("/") if part.startswith("{")]
    fields: JsonObject = {
        "operationId": operation_id,
        "summary": operation.summary,
        "parameters": [
            {"$ref": f"#/components/parameters/{name}"}
            for name in (*path, *operation.headers, "x-request-timeout-seconds")
        ],
        "responses": _responses(operation),
    }
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body}"}
        fields["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if operation.scope is not None:
        fields["description"] = f"Needs a key with the scope {operation.scope!r}, where keys are configured."
        if has_keys or operation.scope == "admin":
            fields["security"] = [{"key": []}]
    return fields


def _responses(operation: Operation) -> JsonSchema:
    """Return the operation's errors and good answers, by status."""
    answer = operation.answer
    content: JsonSchema = {operation.media: {"schema": answer if isinstance(answer, dict) else _reference(answer)}}
    if operation.is_streamable:
        content |= {"text/event-stream": {"schema": _EVENT}}
    success = {"description": "Done.", "headers": _HEADERS, "content": content}
    responses = {
        str(status): _error_response(operation, status) for status in sorted({400, 504, *operation.error_statuses})
    }
    responses[str(operation.status)] = success
    if operation.not_ready is not None:
        responses["503"] = success | {"description": operation.not_ready}
    return responses


def _error_response(operation: Operation, status: int) -> JsonSchema:
    if operation.error is Error:
        return {"$ref": f"#/components/responses/{status}"}
    return _describe_error(status, operation.error)


def _parameter(name: str, where: str, schema: JsonSchema) -> JsonSchema:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _reference(model: Any) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _describe_error(status: int, error: Any) -> JsonSchema:
    retry = {"retry-after": {"schema": {"type": "integer"}, "description": "Seconds."}} if status in (429, 503) else {}
    content = {"application/json": {"schema": _reference(error)}}
    return {"description": _ERROR_DESCRIPTIONS[status], "headers": _HEADERS | retry, "content": content}
