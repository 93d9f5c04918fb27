"""Server and models in the protocol's words: `/v2`, `/v2/health/...`, `/v2/models/{name}`.

A model is an endpoint. Inputs are the agents' observations, named as the agents are. Outputs are `AGENT.action` and
`AGENT.log_prob`. There is no dimension for batches: a request is one step of one session.
"""

from typing import Any, NamedTuple

import numpy as np
import orjson

from marl_ray import __version__
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.serving.handlers import health
from marl_ray.serving.http.messages import Request, RequestError, Response
from marl_ray.serving.routing.experiment.loaded_arms import LoadedArms
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.service import Service

DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
"""The protocol's names of numpy's types."""
ACTION_SUFFIX, LOG_PROB_SUFFIX = ".action", ".log_prob"


class Tensor(NamedTuple):
    """The datatype and shape of an input or output."""

    datatype: str
    shape: tuple[int, ...]
    """A single number has [1]."""
    is_single: bool = False
    """True if `/v1/act` has the value as a number instead of a list."""

    def describe(self, name: str) -> dict[str, object]:
        """Return the input or output of this name as the metadata of a model in the Open Inference Protocol has it."""
        return {"name": name, "datatype": self.datatype, "shape": list(self.shape)}


def error_body(error: RequestError) -> bytes:
    """Return an error as a body of the protocol, one text that begins with the field."""
    text = f"{error.field}: {error}" if error.field else str(error)
    return orjson.dumps({"error": text})


async def server(service: Service, request: Request) -> Response:
    """Answer `GET /v2`."""
    return Response(orjson.dumps({"name": "marl-ray", "version": __version__, "extensions": []}))


async def server_live(service: Service, request: Request) -> Response:
    """Answer `GET /v2/health/live`."""
    return Response(orjson.dumps({"live": True}))


async def server_ready(service: Service, request: Request) -> Response:
    """Answer `GET /v2/health/ready`, as `/ready`."""
    response = await health.readiness(service, request)
    return Response(orjson.dumps({"ready": response.status == 200}), response.status)


async def model_ready(service: Service, request: Request) -> Response:
    """Answer `GET /v2/models/{name}/ready`: 200 if every arm that gets traffic is answered for, else 503."""
    await service.admission.admit_reader(request, "inference")
    router = newest(service, request)
    is_ready = router.is_ready
    body = {"name": router.config.served_as, "ready": is_ready}
    return Response(orjson.dumps(body), 200 if is_ready else 503)


async def model_metadata(service: Service, request: Request) -> Response:
    """Answer `GET /v2/models/{name}`."""
    await service.admission.admit_reader(request, "inference")
    router = newest(service, request)
    bundle = actor_critics(router.arms)
    inputs = [tensor.describe(agent) for agent, tensor in inputs_of(bundle).items()]
    outputs = [tensor.describe(name) for name, tensor in outputs_of(bundle).items()]
    body = {"name": router.config.served_as, "platform": "marl-ray", "inputs": inputs, "outputs": outputs}
    return Response(orjson.dumps(body))


def newest(service: Service, request: Request) -> Router:
    """Return the newest experiment of the path's model. Raises UnknownExperimentError if there is none."""
    return service.endpoints.acting_routers(request.path_params["name"])[0]


def actor_critics(arms: LoadedArms) -> ActorCriticBundle:
    """Return the control's bundle.

    Raises WrongKindError if the model writes text, which other routes serve.
    """
    return arms.actor_bundle_of(arms.state.control, "model")


def inputs_of(bundle: ActorCriticBundle) -> dict[str, Tensor]:
    """Return the input name (an agent) -> its tensor."""
    return {agent: _tensor(bundle.policies[policy].observation_space) for agent, policy in bundle.agents.items()}


def outputs_of(bundle: ActorCriticBundle) -> dict[str, Tensor]:
    """Return the output name (`AGENT.action`, `AGENT.log_prob`) -> its tensor."""
    tensors = {}
    for agent, policy in bundle.agents.items():
        tensors[agent + ACTION_SUFFIX] = _tensor(bundle.policies[policy].action_space)
        tensors[agent + LOG_PROB_SUFFIX] = Tensor("FP32", (1,))
    return tensors


def _tensor(space: Any) -> Tensor:
    return Tensor(DATATYPES[np.dtype(space.dtype).name], tuple(space.shape) or (1,), space.shape == ())
