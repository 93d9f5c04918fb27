"""Requests for an arm without actions, by clients that compute actions themselves: `/v1/assign`."""

import orjson

from marl_ray.serving.http.fields import attributes_of, cluster_of, session_id
from marl_ray.serving.http.messages import Request, RequestError, Response
from marl_ray.serving.service import Service

ASSIGN_FIELDS = frozenset({"experiment", "session_id", "cluster_id", "attributes", "expose"})


async def assign(service: Service, request: Request) -> Response:
    """Answer `POST /v1/assign`: the session's arm and its bundle, without a pass.

    Unless `expose` is false, this exposes the session to the arm, so that its outcome counts. Raises RequestError for a
    wrong field, and ServingError if no arm is loaded.
    """
    service.admission.admit(request, "inference")
    data = await request.read_object(ASSIGN_FIELDS)
    routers = service.endpoints.acting_routers(data.get("experiment"))
    session = session_id(data.get("session_id"), request)
    cluster_id = cluster_of(data)
    attributes = attributes_of(data)
    is_exposing = data.get("expose", True)
    if not isinstance(is_exposing, bool):
        raise RequestError(400, "expose", "expected true or false")
    session_arm = await service.assigner.assign(
        routers, session, cluster_id, attributes, service.admission.forced_arm(request)
    )
    arms = session_arm.arms
    # Before the exposure, because it raises an error if no arm is loaded.
    arm = arms.first_answering_arm(session_arm.assignment.arm)
    assignment = service.assigner.expose(session_arm) if is_exposing else session_arm.assignment
    if assignment.arm != session_arm.assignment.arm:  # a concurrent request has exposed the session to another one
        arm = arms.first_answering_arm(assignment.arm)
    answer_fields = {
        "bundle": session_arm.router.config.arms[arm].reference,
        "digest": arms[arm].bundle.digest,
        "exposed": is_exposing and session_arm.is_unit,
    }
    return Response(orjson.dumps(session_arm.head(assignment, arm) | answer_fields))
