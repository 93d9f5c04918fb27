"""The gateway's OpenAPI 3.1 document, made of the table of routes and of pydantic models."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from pydantic import TypeAdapter

from marl_ray import __version__
from marl_ray.config import ExperimentConfig
from marl_ray.config.base import NAME_PATTERN
from marl_ray.config.serving.gateway import ATTRIBUTE_LENGTH, ATTRIBUTE_NAME, ATTRIBUTES
from marl_ray.serving.handlers.act import ACT_FIELDS, ASSIGN_FIELDS
from marl_ray.serving.handlers.experiments import CHANGE_FIELDS, REASON_LENGTH
from marl_ray.serving.handlers.generate import GENERATE_FIELDS
from marl_ray.serving.handlers.open_inference.schemas import (
    INFER_PARTS,
    InferAnswer,
    InferError,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
)
from marl_ray.serving.handlers.openai.schemas import (
    OPENAI_PARTS,
    OPENAI_REQUESTS,
    ChatAnswer,
    CompletionAnswer,
    ModelName,
)
from marl_ray.serving.handlers.openapi.answers import (
    ActAnswer,
    AssignAnswer,
    Audit,
    BatchAnswer,
    Changed,
    Curves,
    EndpointList,
    Error,
    ExperimentList,
    ExperimentReport,
    GenerateAnswer,
    Health,
    Model,
    ModelList,
    OutcomeAnswer,
    OutcomesAnswer,
    Ready,
)
from marl_ray.serving.handlers.openapi.json_schema import JsonSchema
from marl_ray.serving.handlers.outcomes import LARGEST_OUTCOME, OUTCOME_FIELDS
from marl_ray.serving.http.fields import SESSION_LENGTH
from marl_ray.serving.http.keys import Permission
from marl_ray.serving.http.route import Route
from marl_ray.serving.http.text_settings import LARGEST_TEMPERATURE, LARGEST_TOKENS, SEEDS, STOP_LENGTH, STOPS

PAGES = ("/ui", "/docs")
"""Prefixes of the pages for people; the document describes all other paths."""

_IDENTIFIER: JsonSchema = {"type": ["string", "null"], "minLength": 1, "maxLength": SESSION_LENGTH}
_NUMBER: JsonSchema = {"type": "number", "minimum": -LARGEST_OUTCOME, "maximum": LARGEST_OUTCOME}
_REASON: JsonSchema = {
    "type": "string",
    "minLength": 1,
    "maxLength": REASON_LENGTH,
    "description": "For the audit log.",
}
_TOKENS: JsonSchema = {"type": ["integer", "null"], "minimum": 1, "maximum": LARGEST_TOKENS}
_STOP: JsonSchema = {"type": "string", "minLength": 1, "maxLength": STOP_LENGTH}
_FLAG: JsonSchema = {"type": ["boolean", "null"]}
_FIELDS: dict[str, JsonSchema] = {
    "experiment": {"type": ["string", "null"], "description": "Endpoint or experiment; optional where there is one."},
    "session_id": _IDENTIFIER | {"description": "The unit, in printable characters; or else the header x-session-id."},
    "cluster_id": _IDENTIFIER | {"description": "Of experiments that randomize clusters: the match, the lobby."},
    "attributes": {
        "type": ["object", "null"],
        "maxProperties": ATTRIBUTES,
        "propertyNames": {"minLength": 1, "maxLength": ATTRIBUTE_NAME},
        "additionalProperties": {"anyOf": [
            {"type": ["number", "boolean"]}, {"type": "string", "minLength": 1, "maxLength": ATTRIBUTE_LENGTH},
        ]},
        "description": "What experiments with a population ask for, by name, in printable characters.",
    },
    "observations": {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#/components/schemas/Array"}},
    "action_masks": {
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"enum": [0, 1, False, True]}},
        "description": "By agent, of those observed: whether each action is allowed.",
    },
    "mode": {"enum": ["sample", "greedy"], "default": "sample"},
    "expose": {"type": "boolean", "default": True, "description": "Whether the session meets the arm with this."},
    "agent": {"type": ["string", "null"], "description": "Whose text; optional where one policy plays all agents."},
    "prompt": {"type": "string"},
    "max_tokens": _TOKENS,
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": LARGEST_TEMPERATURE, "description": "0 is greedy."},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": 0, "maximum": LARGEST_TOKENS, "description": "0 is all tokens."},
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": STOPS}, {"type": "null"}]},
    "seed": {"type": ["integer", "null"], "minimum": -SEEDS, "maximum": SEEDS - 1},
    "stream": _FLAG | {"description": "Answer by server-sent events."},
    "model": {"type": "string", "description": "An endpoint, or ENDPOINT/AGENT, as /v1/models lists them."},
    "user": _IDENTIFIER | {"description": "The unit; or else the header x-session-id, or this request alone."},
    "value": _NUMBER | {"description": "The session's outcome; larger is better. Optional where metrics are given."},
    "at": {
        "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "format": "date-time"}, {"type": "null"}],
        "description": "When it came about: seconds since 1970, or a time with its zone. For charts and exports.",
    },
    "metrics": {
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": 100, "not": {"const": "outcome"}},
        "additionalProperties": _NUMBER,
        "description": "What guardrails ask for, by name.",
    },
    "reason": _REASON,
    "arm": {"type": ["string", "null"], "description": "The treatment that is meant, where it could be several."},
    "epoch": {"type": ["integer", "null"], "description": "The epoch that the change was decided on."},
}  # fmt: skip


def _object(
    fields: Iterable[str],
    *required: str,
    example: JsonSchema | None = None,
    special: Mapping[str, JsonSchema] = MappingProxyType({}),
) -> JsonSchema:
    """Return a schema of an object; fields in `special` mean something else here than on other paths."""
    schemas = {**_FIELDS, **special}
    properties = {field: schemas[field] for field in sorted(fields)}
    made = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return made | ({"examples": [example]} if example is not None else {})


_SCHEMAS: dict[str, JsonSchema] = {
    "Array": {
        "anyOf": [{"type": ["number", "boolean"]}, {"type": "array", "items": {"$ref": "#/components/schemas/Array"}}]
    },
    "ActRequest": _object(ACT_FIELDS, "observations", example={
        "session_id": "episode-17",
        "observations": {"agent_0": [0, 1, 2], "agent_1": [2, 3, 4]},
        "mode": "sample",
    }),
    "BatchRequest": {
        "type": "object",
        "properties": {"requests": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/ActRequest"}}},
        "required": ["requests"],
        "additionalProperties": False,
    },
    "AssignRequest": _object(ASSIGN_FIELDS, example={"session_id": "episode-18"}),
    "GenerateRequest": _object(GENERATE_FIELDS, "prompt"),
    "OutcomeRequest": _object(OUTCOME_FIELDS, example={
        "session_id": "episode-17", "value": 0.83, "metrics": {"cost": 3},
    }),
    "OutcomesRequest": {
        "type": "object",
        "properties": {
            "outcomes": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/OutcomeRequest"}},
        },
        "required": ["outcomes"],
        "additionalProperties": False,
    },
    "ChangeRequest": _object(CHANGE_FIELDS, "reason", example={"reason": "players complain", "epoch": 1}),
}  # fmt: skip


for _name, (_special, _fields, _required) in OPENAI_REQUESTS.items():
    _SCHEMAS[_name] = _object(_fields, *_required, special=_special)


class _Operation(NamedTuple):
    summary: str
    answer: Any
    """None if the answer is text."""
    problems: tuple[int, ...] = ()
    """Statuses of errors besides those that every operation may have."""
    body: str | None = None
    scope: Permission | None = None
    headers: tuple[str, ...] = ()
    streams: bool = False
    """True if the operation may also answer with server-sent events."""
    error: Any = Error


_ADMIN = (401, 403, 409, 429)
_CLIENT = (401, 403, 404, 413, 429)
_READER = (401, 403, 429, 503)
_OPERATIONS = {
    "act": _Operation(
        "Actions for the agents observed", ActAnswer, (*_CLIENT, 503), "ActRequest", "inference", ("x-session-id", "x-arm"),
    ),
    "batch": _Operation(
        "Many acts at once, each answered by itself", BatchAnswer, (401, 403, 413, 429), "BatchRequest", "inference",
        ("x-session-id", "x-arm"),
    ),
    "assign": _Operation(
        "A session's arm, without a pass", AssignAnswer, (*_CLIENT, 503), "AssignRequest", "inference",
        ("x-session-id", "x-arm"),
    ),
    "generate": _Operation(
        "Text of token policies", GenerateAnswer, (*_CLIENT, 422, 503), "GenerateRequest", "inference",
        ("x-session-id", "x-arm"), streams=True,
    ),
    "completions": _Operation(
        "Text of token policies, as OpenAI's clients ask for it", ChatAnswer, (*_CLIENT, 422, 503), "ChatRequest",
        "inference", ("x-session-id", "x-arm"), streams=True,
    ),
    "text_completions": _Operation(
        "Texts that go on from prompts, as OpenAI's clients ask for them", CompletionAnswer, (*_CLIENT, 422, 503),
        "CompletionRequest", "inference", ("x-session-id", "x-arm"), streams=True,
    ),
    "outcome": _Operation(
        "How a session went", OutcomeAnswer, (*_CLIENT, 409, 503), "OutcomeRequest", "outcomes", ("x-session-id",),
    ),
    "outcomes": _Operation(
        "Many outcomes at once, each answered by itself", OutcomesAnswer, (401, 403, 413, 429, 503), "OutcomesRequest",
        "outcomes", ("x-session-id",),
    ),
    "endpoints": _Operation("What clients act on, and what serves it", EndpointList, _READER, scope="read"),
    "experiments": _Operation("All experiments in a few words", ExperimentList, (401, 403, 429), scope="read"),
    "create": _Operation("Begin an experiment", ExperimentReport, (*_ADMIN, 413, 503), "ExperimentRequest", "admin"),
    "experiment": _Operation("An experiment and what its outcomes prove", ExperimentReport, (404, *_READER), scope="read"),
    "audit": _Operation("Every change of an experiment", Audit, (404, *_READER), scope="read"),
    "series": _Operation("Outcomes over time", Curves, (404, *_READER), scope="read"),
    "change": _Operation("Change an experiment", Changed, (*_ADMIN, 404, 413, 503), "ChangeRequest", "admin"),
    "models": _Operation("The bundles that this replica holds", ModelList, (401, 403, 429), scope="read"),
    **dict.fromkeys(
        ("model", "agent_model"),
        _Operation("What OpenAI's clients may name as `model`", ModelName, (404, *_READER), scope="read"),
    ),
    "load": _Operation("Fetch and verify a bundle ahead of its experiment", Model, (*_ADMIN, 503), scope="admin"),
    "server": _Operation("The server, by the Open Inference Protocol", ServerMetadata, error=InferError),
    "server_live": _Operation("Whether this replica lives, by that protocol", ServerLive, error=InferError),
    "server_ready": _Operation("Whether this replica is ready; 503 while it is not", ServerReady, error=InferError),
    "model_metadata": _Operation(
        "An endpoint's inputs and outputs", ModelMetadata, (404, 422, *_READER), scope="read", error=InferError,
    ),
    "model_ready": _Operation(
        "Whether an endpoint answers; 503 while it does not", ModelReady, (404, *_READER), scope="read", error=InferError,
    ),
    "infer": _Operation(
        "Actions for the agents observed, by the Open Inference Protocol", InferAnswer, (*_CLIENT, 422, 503),
        "InferRequest", "inference", ("x-session-id", "x-arm"), error=InferError,
    ),
    "health": _Operation("Whether this replica lives", Health),
    "ready": _Operation("Whether this replica has all that takes traffic; 503 while it has not", Ready),
    "metrics": _Operation("Numbers for Prometheus, of this replica", None),
    "document": _Operation("This document", None),
}  # fmt: skip
_PROBLEMS = {
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
_PARAMETERS: dict[str, JsonSchema] = {
    "x-request-timeout-seconds": {"type": "number", "exclusiveMinimum": 0},
    "x-session-id": _TEXT | {"description": "The unit, where the body names none."},
    "x-arm": _TEXT | {"description": "Needs an admin key: act with this arm, outside of the experiment."},
    "name": _TEXT | {"pattern": NAME_PATTERN},
    "agent": _TEXT | {"pattern": "^[^/]+$"},
    "version": _TEXT | {"pattern": "^[^/]+:[^/]+$", "description": "NAME:VERSION of the model registry."},
}
_HEADERS: JsonSchema = {"x-request-id": {"schema": _TEXT, "description": "The caller's own if it sent a sane one."}}


@lru_cache(maxsize=8)
def openapi(routes: tuple[Route, ...], base: str, keyed: bool) -> bytes:
    """Return the document, as JSON. `base` is the prefix that the gateway is mounted at; `keyed` says whether it has
    keys."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if not route.template.startswith(PAGES):
            paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, keyed)
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
                "schemas": _SCHEMAS | OPENAI_PARTS | INFER_PARTS | _models(),
                "parameters": {name: _parameter(name, schema) for name, schema in _PARAMETERS.items()},
                "responses": {str(status): _problem(status) for status in _PROBLEMS},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _models() -> dict[str, JsonSchema]:
    models = [
        Error,
        InferError,
        ExperimentConfig,
        *(described.answer for described in _OPERATIONS.values() if described.answer is not None),
    ]
    inputs: Any = [(number, "validation", TypeAdapter(model)) for number, model in enumerate(models)]
    made = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")[1]
    schemas: dict[str, JsonSchema] = made["$defs"]
    schemas["GuardrailConfig"]["required"].remove("better")  # some metrics have a default for it
    new = schemas["ExperimentConfig"]
    parts = {"properties": new["properties"] | {"reason": _REASON}, "required": [*new["required"], "reason"]}
    return schemas | {"ExperimentRequest": new | parts | {"title": "ExperimentRequest"}}


def _operation(route: Route, keyed: bool) -> dict[str, Any]:
    kind, last = route.handler.__name__, route.template.rpartition("/")[2]
    described = _OPERATIONS[kind]
    headers = _HEADERS
    content: JsonSchema = {"application/json": {"schema": {"type": "object"}}}
    if kind == "metrics":
        content = {"text/plain": {"schema": _TEXT}}
    elif described.answer is not None:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{described.answer.__name__}"}}}
    if described.streams:
        content |= {"text/event-stream": {"schema": _EVENT}}
    good = {"description": "Done.", "headers": headers, "content": content}
    statuses = sorted({400, 504, *described.problems})
    responses = {"201" if kind == "create" else "200": good}
    if kind == "ready":
        responses["503"] = good | {"description": "Not ready; `missing` has what for."}
    elif kind in ("server_ready", "model_ready"):
        responses["503"] = good | {"description": "Not ready."}

    def error_response(status: int) -> JsonSchema:
        if described.error is Error:
            return {"$ref": f"#/components/responses/{status}"}
        return _problem(status, described.error.__name__)

    path = [part.strip("{}") for part in route.template.split("/") if part.startswith("{")]
    operation: dict[str, Any] = {
        "operationId": last if kind == "change" else kind,
        "summary": f"{described.summary}: {last}" if kind == "change" else described.summary,
        "parameters": [
            {"$ref": f"#/components/parameters/{name}"}
            for name in (*path, *described.headers, "x-request-timeout-seconds")
        ],
        "responses": {str(status): error_response(status) for status in statuses} | responses,
    }
    if described.body is not None:
        schema = {"$ref": f"#/components/schemas/{described.body}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if described.scope is not None:
        operation["description"] = f"Needs a key with the scope {described.scope!r}, where keys are configured."
        if keyed or described.scope == "admin":
            operation["security"] = [{"key": []}]
    return operation


def _parameter(name: str, schema: JsonSchema) -> JsonSchema:
    where = "header" if name.startswith("x-") else "path"
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _problem(status: int, error: str = "Error") -> JsonSchema:
    retry = {"retry-after": {"schema": {"type": "integer"}, "description": "Seconds."}} if status in (429, 503) else {}
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    return {"description": _PROBLEMS[status], "headers": _HEADERS | retry, "content": content}
