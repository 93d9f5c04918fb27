"""The JSON schemas of requests' bodies, made of the fields that the handlers read."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from marl_ray.config.serving.population import MAX_ATTRIBUTE_LENGTH, MAX_ATTRIBUTE_NAME, MAX_ATTRIBUTES
from marl_ray.json_types import JsonSchema
from marl_ray.serving.handlers.actions.act import ACT_FIELDS
from marl_ray.serving.handlers.actions.assign import ASSIGN_FIELDS
from marl_ray.serving.handlers.experiment_actions import MAX_REASON_LENGTH
from marl_ray.serving.handlers.experiments import CHANGE_FIELDS
from marl_ray.serving.handlers.openai.schemas import OPENAI_REQUESTS
from marl_ray.serving.handlers.outcomes import MAX_OUTCOME, OUTCOME_FIELDS
from marl_ray.serving.handlers.texts.generate import GENERATE_FIELDS
from marl_ray.serving.http.fields import MAX_SESSION_LENGTH
from marl_ray.serving.http.text_settings import MAX_STOP_LENGTH, MAX_STOPS, MAX_TEMPERATURE, MAX_TOKENS, SEEDS

_IDENTIFIER: JsonSchema = {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_SESSION_LENGTH}
_NUMBER: JsonSchema = {"type": "number", "minimum": -MAX_OUTCOME, "maximum": MAX_OUTCOME}
SUCCEEDS: JsonSchema = {
    "type": ["string", "null"],
    "description": "An open experiment of one arm at the same endpoint, which is stopped when the new one begins.",
}
REASON: JsonSchema = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_REASON_LENGTH,
    "description": "For the audit log.",
}
_TOKENS: JsonSchema = {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_TOKENS}
_STOP: JsonSchema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_FLAG: JsonSchema = {"type": ["boolean", "null"]}
_FIELDS: dict[str, JsonSchema] = {
    "experiment": {"type": ["string", "null"], "description": "Endpoint or experiment; optional if there is only one."},
    "session_id": _IDENTIFIER | {"description": "The unit, in printable characters; without it the header x-session-id."},
    "cluster_id": _IDENTIFIER | {"description": "The unit's cluster (a match, a lobby), where clusters are randomized."},
    "attributes": {
        "type": ["object", "null"],
        "maxProperties": MAX_ATTRIBUTES,
        "propertyNames": {"minLength": 1, "maxLength": MAX_ATTRIBUTE_NAME},
        "additionalProperties": {"anyOf": [
            {"type": ["number", "boolean"]}, {"type": "string", "minLength": 1, "maxLength": MAX_ATTRIBUTE_LENGTH},
        ]},
        "description": "The unit's attributes by name, by which populations choose; in printable characters.",
    },
    "observations": {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#/components/schemas/Array"}},
    "action_masks": {
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"enum": [0, 1, False, True]}},
        "description": "Agent -> whether each of its actions is allowed.",
    },
    "mode": {"enum": ["sample", "greedy"], "default": "sample"},
    "expose": {"type": "boolean", "default": True, "description": "Whether this exposes the session to the arm."},
    "agent": {"type": ["string", "null"], "description": "The agent that writes; optional if one policy plays all agents."},
    "prompt": {"type": "string"},
    "max_tokens": _TOKENS,
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": MAX_TEMPERATURE, "description": "0 is greedy."},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_TOKENS, "description": "0 is all tokens."},
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]},
    "seed": {"type": ["integer", "null"], "minimum": -SEEDS, "maximum": SEEDS - 1},
    "stream": _FLAG | {"description": "Answer by server-sent events."},
    "model": {"type": "string", "description": "An endpoint, or ENDPOINT/AGENT, as /v1/models lists them."},
    "user": _IDENTIFIER | {"description": "The unit; without it the header x-session-id, or this request alone."},
    "value": _NUMBER | {"description": "The session's outcome; larger is better. Optional if there are metrics."},
    "at": {
        "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "format": "date-time"}, {"type": "null"}],
        "description": "Moment of the outcome, for charts and exports: seconds since 1970, or a time with its zone.",
    },
    "metrics": {
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": 100, "not": {"const": "outcome"}},
        "additionalProperties": _NUMBER,
        "description": "Further numbers by name, for guardrails.",
    },
    "reason": REASON,
    "arm": {"type": ["string", "null"], "description": "The treatment to change; optional if there is only one."},
    "epoch": {"type": ["integer", "null"], "description": "The epoch that the change was decided on."},
}  # fmt: skip


def _object_schema(
    fields: Iterable[str],
    *required: str,
    example: JsonSchema | None = None,
    special: Mapping[str, JsonSchema] = MappingProxyType({}),
) -> JsonSchema:
    """Return the schema of an object with these fields.

    Fields in `special` mean something else here than on other paths.
    """
    schemas = {**_FIELDS, **special}
    properties = {field: schemas[field] for field in sorted(fields)}
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return schema | ({"examples": [example]} if example is not None else {})


REQUESTS: dict[str, JsonSchema] = {
    "Array": {
        "anyOf": [{"type": ["number", "boolean"]}, {"type": "array", "items": {"$ref": "#/components/schemas/Array"}}]
    },
    "ActRequest": _object_schema(ACT_FIELDS, "observations", example={
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
    "AssignRequest": _object_schema(ASSIGN_FIELDS, example={"session_id": "episode-18"}),
    "GenerateRequest": _object_schema(GENERATE_FIELDS, "prompt"),
    "OutcomeRequest": _object_schema(OUTCOME_FIELDS, example={
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
    "ChangeRequest": _object_schema(CHANGE_FIELDS, "reason", example={"reason": "players complain", "epoch": 1}),
    **{
        name: _object_schema(fields, *required, special=special)
        for name, (special, fields, required) in OPENAI_REQUESTS.items()
    },
}  # fmt: skip
