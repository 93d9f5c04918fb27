"""`/v1/models/{id}`: the names that OpenAI's clients may use as `model`."""

from collections.abc import Sequence

import orjson

from marl_ray.serving.http.messages import Request, RequestError, Response
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.service import Service


async def model(service: Service, request: Request) -> Response:
    """Answer `GET /v1/models/ENDPOINT` and `GET /v1/models/ENDPOINT/AGENT`. Raises RequestError 404 for another model."""
    await service.admission.admit_reader(request, "inference")
    model_id = "/".join(request.path_params.values())
    for row in models_of(service.endpoints.routers_of(request.path_params["name"])):
        if row["id"] == model_id:
            return Response(orjson.dumps(row))
    raise RequestError(404, "model", f"no such model {model_id!r}, expected one of those in /v1/models")


def models_of(routers: Sequence[Router]) -> list[dict[str, object]]:
    """Return the values that `model` may have for an endpoint's experiments (newest first).

    The values are the endpoint's name where one policy plays all agents, else one name per agent. An endpoint without
    language models has none.
    """
    newest = routers[0]
    arms = newest.arms
    if not arms.is_text:
        return []
    agents = arms.bundle_of(arms.state.control).agents
    name = newest.config.served_as
    names = [name] if len(set(agents.values())) == 1 else [f"{name}/{agent}" for agent in agents]
    created = int(newest.created)
    return [{"id": model_id, "object": "model", "created": created, "owned_by": "marl-ray"} for model_id in names]
