"""The protocol's paths in our OpenAPI document.

Answers are pydantic models, requests are JSON schemas.
"""
# ruff: noqa: UP013, UP035 (as the other answers; pydantic wants this TypedDict)

from typing import Literal

from typing_extensions import NotRequired, TypedDict

from marl_ray.json_types import JsonSchema
from marl_ray.serving.handlers.open_inference.models import DATATYPES

# fmt: off
InferError = TypedDict("InferError", {"error": str})
ServerMetadata = TypedDict("ServerMetadata", {"name": str, "version": str, "extensions": list[str]})
ServerLive = TypedDict("ServerLive", {"live": bool})
ServerReady = TypedDict("ServerReady", {"ready": bool})
ModelReady = TypedDict("ModelReady", {"name": str, "ready": bool})
TensorMetadata = TypedDict("TensorMetadata", {"name": str, "datatype": str, "shape": list[int]})
ModelMetadata = TypedDict("ModelMetadata", {
    "name": str, "platform": Literal["marl-ray"], "inputs": list[TensorMetadata], "outputs": list[TensorMetadata],
})
InferOutput = TypedDict("InferOutput", {
    "name": str, "datatype": str, "shape": list[int], "data": list[bool | int | float],
})
InferParameters = TypedDict("InferParameters", {
    "experiment": str, "arm": str, "epoch": int, "propensity": float,
    "fallback_for": NotRequired[str], "holdout": NotRequired[bool],
})
InferAnswer = TypedDict("InferAnswer", {
    "model_name": str, "model_version": str, "id": NotRequired[str], "parameters": InferParameters,
    "outputs": list[InferOutput],
})
# fmt: on

_PARAMETERS: JsonSchema = {"type": "object", "properties": {"binary_data": {"const": False}}}
INFER_PARTS: dict[str, JsonSchema] = {
    "InferRequest": {
        "type": "object",
        "properties": {
            "id": {"type": ["string", "null"], "description": "Repeated in the answer; the unit if nothing else names it."},
            "parameters": _PARAMETERS | {"description": "session_id, cluster_id, attributes and mode, as in /v1/act."},
            "inputs": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "description": "An agent, or AGENT.action_mask."},
                        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                        "datatype": {"enum": list(DATATYPES.values())},
                        "parameters": _PARAMETERS,
                        "data": {"type": "array", "description": "Row-major, or nested."},
                    },
                    "required": ["name", "shape", "datatype", "data"],
                },
            },
            "outputs": {
                "type": ["array", "null"],
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
                    "required": ["name"],
                },
                "description": "The outputs to return; all by default.",
            },
        },
        "required": ["inputs"],
        "additionalProperties": False,
        "examples": [{
            "id": "episode-17",
            "inputs": [{"name": "agent_0", "shape": [3], "datatype": "INT64", "data": [0, 1, 2]}],
        }],
    },
}  # fmt: skip
