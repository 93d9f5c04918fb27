"""Requests of those who watch a replica: whether it lives, whether it can answer, and its metrics."""

import time

import orjson
import torch

from marl_ray import __version__
from marl_ray.serving.http.messages import Request, Response
from marl_ray.serving.logs.metrics import CONTENT_TYPE
from marl_ray.serving.service import Service


async def health(service: Service, request: Request) -> Response:
    """Answer `GET /health`: 200 shows that this replica's event loop runs."""
    return Response(orjson.dumps({"status": "ok", "experiments": list(service.endpoints.routers)}))


async def readiness(service: Service, request: Request) -> Response:
    """Answer `GET /ready`: 200 if an answer is available for all experiments with traffic, else 503.

    A treatment without a bundle is named as missing but does not count, because the control answers for it. Neither
    does an experiment that was just created at another replica and still loads: otherwise all replicas would become
    unready at once.
    """
    arms = service.follower.arm_loader.arm_states()
    routers = service.endpoints.routers
    not_loaded = [
        f"{name}/{arm}" for name, states in arms.items() for arm, state in states.items() if state != "loaded"
    ]
    loaded = [
        routers[name] for name, states in arms.items() if set(states.values()) != {"loading"} or routers[name].arms
    ]
    answers = all(router.is_ready for router in loaded)
    is_ready = service.started is not None and answers  # all arms of the start are loaded before `started` is set
    body = {
        "ready": is_ready,
        "arms": arms,
        "missing": not_loaded,
        "device": device(),
        "version": __version__,
        "since": service.started,
        "uptime_s": None if service.started is None else time.time() - service.started,
    }
    return Response(orjson.dumps(body), 200 if is_ready else 503)


def device() -> str:
    """Return the device that policies in this process run on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


async def metrics(service: Service, request: Request) -> Response:
    """Answer `GET /metrics`: the numbers of this replica alone."""
    service.update_gauges()
    return Response(service.metrics.prometheus_text(), content_type=CONTENT_TYPE)
