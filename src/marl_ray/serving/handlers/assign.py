"""Requests for an arm alone: `/v1/assign`, for clients that compute actions themselves."""

from typing import TYPE_CHECKING

import orjson

from marl_ray.serving.http.protocol import Request, RequestError, Response
from marl_ray.serving.routing.assignment import attributes_of, cluster_of, expose, meet, session_id

if TYPE_CHECKING:
    from marl_ray.serving.asgi import Gateway

ASSIGN_FIELDS = frozenset({"experiment", "session_id", "cluster_id", "attributes", "expose"})


async def assign(gateway: "Gateway", request: Request) -> Response:
    """`POST /v1/assign`: the session's arm and its bundle, without a pass. The session meets the arm with this, so that its
    outcome counts, unless `expose` is false."""
    gateway.admit(request, "inference")
    data = await request.object(ASSIGN_FIELDS)
    routers = gateway.endpoints.acting(data.get("experiment"))
    session, cluster_id = session_id(data.get("session_id"), request), cluster_of(data)
    attributes = attributes_of(data)
    exposes = data.get("expose", True)
    if not isinstance(exposes, bool):
        raise RequestError(400, "expose", "expected true or false")
    met = await meet(gateway, request, routers, session, cluster_id, attributes)
    router = met.router
    router.bundle_of(met.assigned.assignment.arm)  # before the exposure: there must be an arm to name
    assignment = expose(gateway, met) if exposes else met.assigned.assignment
    arm = router.answering(assignment.arm)[0]
    told = {
        "bundle": router.config.arms[arm].bundle,
        "digest": router.arms[arm].bundle.digest,
        "exposed": exposes and met.takes_part,
    }
    return Response(orjson.dumps(met.head(assignment, arm) | told))
