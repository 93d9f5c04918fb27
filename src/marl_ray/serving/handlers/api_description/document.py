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
from marl_ray.serving.http.route import Route

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
    504: "Not done in time.",
}
_TEXT: JsonSchema = {"type": "string"}
_EVENT: JsonSchema = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""The schema of one event of a stream; its data is a part of the answer, as JSON."""
_PARAMETERS: dict[str, dict[str, JsonSchema]] = {
    "header": {
        "x-request-timeout-seconds": {"type": "number", "exclusiveMinimum": 0},
        "x-session-id": _TEXT | {"description": "The unit, where the body names none."},
        "x-arm": _TEXT | {"description": "Needs an admin key: act with this arm, outside of the experiment."},
    },
    "path": {
        "name": _TEXT | {"pattern": NAME_PATTERN},
        "agent": _TEXT | {"pattern": "^[^/]+$"},
        "version": _TEXT | {"pattern": "^[^/]+:[^/]+$", "description": "NAME:VERSION of the model registry."},
    },
}
"""Place of a parameter -> its name -> its schema."""
_HEADERS: JsonSchema = {"x-request-id": {"schema": _TEXT, "description": "The caller's own if it sent a sane one."}}


@lru_cache(maxsize=8)
def openapi(routes: tuple[Route, ...], base: str, keyed: bool) -> bytes:
    """Return the OpenAPI document, as JSON.

    `base` is the prefix that the gateway is mounted at; `keyed` says whether it has keys.
    """
    paths: dict[str, JsonObject] = {}
    for route in routes:
        if route.operation is not None:
            operation = _operation(route.operation, route.template, keyed)
            paths.setdefault(route.template, {})[route.method.lower()] = operation
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "marl-ray gateway",
                "version": __version__,
                "description": "Units (sessions) meet arms (bundles of policies), and tell how it went.",
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
        *(described.answer for described in OPERATIONS.values() if not isinstance(described.answer, dict)),
    ]
    inputs: Any = [(number, "validation", TypeAdapter(model)) for number, model in enumerate(models)]
    made = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")[1]
    schemas: dict[str, JsonSchema] = made["$defs"]
    schemas["GuardrailConfig"]["required"].remove("better")  # some metrics have a default for it
    experiment = schemas["ExperimentConfig"]
    parts = {
        "properties": experiment["properties"] | {"reason": REASON, "succeeds": SUCCEEDS},
        "required": [*experiment["required"], "reason"],
    }
    return schemas | {"ExperimentRequest": experiment | parts | {"title": "ExperimentRequest"}}


def _operation(operation_id: str, template: str, keyed: bool) -> JsonObject:
    described = OPERATIONS[operation_id]
    path = [part.strip("{}") for part in template.split("/") if part.startswith("{")]
    operation: JsonObject = {
        "operationId": operation_id,
        "summary": described.summary,
        "parameters": [
            {"$ref": f"#/components/parameters/{name}"}
            for name in (*path, *described.headers, "x-request-timeout-seconds")
        ],
        "responses": _responses(described),
    }
    if described.body is not None:
        schema = {"$ref": f"#/components/schemas/{described.body}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if described.scope is not None:
        operation["description"] = f"Needs a key with the scope {described.scope!r}, where keys are configured."
        if keyed or described.scope == "admin":
            operation["security"] = [{"key": []}]
    return operation


def _responses(described: Operation) -> JsonSchema:
    """Return the operation's errors and good answers, by status."""
    answer = described.answer
    content: JsonSchema = {described.media: {"schema": answer if isinstance(answer, dict) else _reference(answer)}}
    if described.streams:
        content |= {"text/event-stream": {"schema": _EVENT}}
    success = {"description": "Done.", "headers": _HEADERS, "content": content}
    responses = {
        str(status): _error_response(described, status) for status in sorted({400, 504, *described.error_statuses})
    }
    responses[str(described.status)] = success
    if described.not_ready is not None:
        responses["503"] = success | {"description": described.not_ready}
    return responses


def _error_response(described: Operation, status: int) -> JsonSchema:
    if described.error is Error:
        return {"$ref": f"#/components/responses/{status}"}
    return _describe_error(status, described.error)


def _parameter(name: str, where: str, schema: JsonSchema) -> JsonSchema:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _reference(model: Any) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _describe_error(status: int, error: Any) -> JsonSchema:
    retry = {"retry-after": {"schema": {"type": "integer"}, "description": "Seconds."}} if status in (429, 503) else {}
    content = {"application/json": {"schema": _reference(error)}}
    return {"description": _ERROR_DESCRIPTIONS[status], "headers": _HEADERS | retry, "content": content}
