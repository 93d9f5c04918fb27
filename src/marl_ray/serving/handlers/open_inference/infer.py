"""`POST /v2/models/{name}/infer`: `/v1/act` in the protocol's words, by the same code."""

import math
from collections.abc import Collection, Mapping

import numpy as np
import orjson

from marl_ray.json_types import JsonMapping
from marl_ray.policies.actor_critic.spaces import consists_of
from marl_ray.serving.handlers.actions.act import answer_act
from marl_ray.serving.handlers.open_inference.models import (
    ACTION_SUFFIX,
    DATATYPES,
    LOG_PROB_SUFFIX,
    Tensor,
    actor_critics,
    inputs_of,
    newest,
    outputs_of,
)
from marl_ray.serving.http.messages import Request, RequestError, Response
from marl_ray.serving.service import Service
from marl_ray.stored_files.folder_kinds import DIGEST_DIGITS

INFER_FIELDS = frozenset({"id", "parameters", "inputs", "outputs"})
MASK_SUFFIX = ".action_mask"
"""Suffix of the inputs that hold action masks; the agent's name precedes it."""
READ_PARAMETERS = ("session_id", "cluster_id", "attributes", "mode")
"""Parameters with the meaning of the equally named fields of `/v1/act`; others are ignored."""
BINARY_REFUSAL = "the binary data extension is not supported, expected data as JSON"
JSON_TYPES: dict[str, set[type]] = {"B": {bool}, "I": {int}, "U": {int}, "F": {int, float}}
"""First letter of a datatype -> the types of its data in JSON."""


async def infer(service: Service, request: Request) -> Response:
    """Answer an inference request.

    The request's session is `session_id` among its `parameters`, else the header `x-session-id`, else `id`.
    Raises RequestError 400 that names the field of the request.
    """
    service.admission.admit(request, "inference")
    if request.header(b"inference-header-content-length") is not None:
        raise RequestError(400, "inference-header-content-length", BINARY_REFUSAL)
    data = await request.read_object(INFER_FIELDS)
    router = newest(service, request)
    bundle = actor_critics(router.arms)
    number = data.get("id")
    parameters = _read_parameters("parameters", data)
    if number is not None and not isinstance(number, str):
        raise RequestError(400, "id", "expected a text")
    act_fields = {name: parameters[name] for name in READ_PARAMETERS if name in parameters}
    if "session_id" not in act_fields and request.header(b"x-session-id") is None:
        act_fields["session_id"] = number
    inputs = _read_tensors("inputs", data.get("inputs"))
    all_outputs = outputs_of(bundle)
    requested_outputs = _read_tensors("outputs", data["outputs"]) if data.get("outputs") is not None else all_outputs
    for name in requested_outputs:
        if name not in all_outputs:
            raise RequestError(400, "outputs", f"unknown output {name!r}, expected some of {', '.join(all_outputs)}")
    tensors = inputs_of(bundle)
    act_fields["observations"] = {
        name: _parse_observation(inputs[name], tensors[name]) for name in _list_agents(inputs, tensors, "")
    }
    act_fields["action_masks"] = {
        agent: _parse_mask(inputs[agent + MASK_SUFFIX]) for agent in _list_agents(inputs, tensors, MASK_SUFFIX)
    }
    answered_act = await answer_act(service, request, act_fields | {"experiment": request.path_params["name"]})
    outputs = []
    log_probs = answered_act.body["log_probs"]
    for agent, action in answered_act.body["actions"].items():
        for name, value in ((agent + ACTION_SUFFIX, action), (agent + LOG_PROB_SUFFIX, log_probs[agent])):
            if name in requested_outputs:
                flat = np.asarray(value).reshape(-1).tolist()
                outputs.append(all_outputs[name].describe(name) | {"data": flat})
    body = {
        "model_name": router.config.served_as,
        "model_version": answered_act.digest[:DIGEST_DIGITS],
        "parameters": {
            name: value for name, value in answered_act.body.items() if name not in ("actions", "log_probs")
        },
        "outputs": outputs,
    }
    return Response(orjson.dumps(body | ({"id": number} if number is not None else {})))


def _read_parameters(where: str, part: Mapping[str, object]) -> dict[str, object]:
    parameters = part.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(400, where, "expected an object")
    if parameters.get("binary_data") or "binary_data_size" in parameters:
        raise RequestError(400, where, BINARY_REFUSAL)
    return parameters


def _read_tensors(where: str, parts: object) -> dict[str, Mapping[str, object]]:
    """Return the inputs or outputs by name."""
    if not isinstance(parts, list) or not parts:
        raise RequestError(400, where, "expected a list of objects with a name")
    by_name: dict[str, Mapping[str, object]] = {}
    for k, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("name"), str):
            raise RequestError(400, f"{where}.{k}", "expected an object with a name")
        _read_parameters(f"{where}.{k}.parameters", part)
        if part["name"] in by_name:
            raise RequestError(400, f"{where}.{k}.name", f"{part['name']!r} is there twice")
        by_name[part["name"]] = part
    return by_name


def _list_agents(inputs: Collection[str], tensors: Collection[str], end: str) -> list[str]:
    """Return the agents that have an input with the suffix `end`.

    Raises RequestError if an input is neither an agent's observation nor its mask.
    """
    for name in inputs:
        if name not in tensors and not (name.endswith(MASK_SUFFIX) and name.removesuffix(MASK_SUFFIX) in tensors):
            raise RequestError(400, "inputs", f"unknown input {name!r}, expected some of {', '.join(tensors)}")
    return [agent for agent in tensors if agent + end in inputs]


def _parse_observation(tensor_input: Mapping[str, object], tensor: Tensor) -> object:
    """Return an observation in the form of `/v1/act`."""
    array = _parse_array(tensor_input)
    if tensor_input["datatype"] != tensor.datatype:
        raise RequestError(400, f"inputs.{tensor_input['name']}.datatype", f"expected {tensor.datatype}")
    if array.shape != tensor.shape:
        raise RequestError(400, f"inputs.{tensor_input['name']}.shape", f"expected {list(tensor.shape)}")
    return array[0].item() if tensor.is_single else array.tolist()


def _parse_mask(tensor_input: Mapping[str, object]) -> object:
    array = _parse_array(tensor_input)
    if tensor_input["datatype"] not in ("BOOL", "UINT8", "INT8", "INT64"):
        raise RequestError(400, f"inputs.{tensor_input['name']}.datatype", "expected BOOL")
    return array.tolist()


def _parse_array(tensor_input: JsonMapping) -> np.ndarray:
    """Return the tensor of an input, from data that is nested or flat (row-major)."""
    where = f"inputs.{tensor_input['name']}"
    shape = tensor_input.get("shape")
    if tensor_input.get("datatype") not in DATATYPES.values():
        raise RequestError(400, f"{where}.datatype", f"expected one of {', '.join(DATATYPES.values())}")
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise RequestError(400, f"{where}.shape", "expected a list of sizes")
    if not isinstance(tensor_input.get("data"), list):
        raise RequestError(400, f"{where}.data", "expected a list")
    try:
        has_right_types = consists_of(tensor_input["data"], JSON_TYPES[tensor_input["datatype"][0]])
        array = np.array(tensor_input["data"]) if has_right_types else np.empty(0)
    except (ValueError, OverflowError):  # lists of different lengths
        has_right_types = False
        array = np.empty(0)
    if not has_right_types or array.size != math.prod(shape) or (array.ndim > 1 and list(array.shape) != shape):
        raise RequestError(
            400, f"{where}.data", f"expected {math.prod(shape)} values of the type {tensor_input['datatype']}"
        )
    return array.reshape(shape)
