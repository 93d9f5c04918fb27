"""Requests of those who run the gateway: endpoints, models, health, metrics."""

import time
from dataclasses import asdict

import orjson
import torch

from marl_ray import __version__
from marl_ray.json_types import JsonObject
from marl_ray.serving.arms.protocol import AnyBundle
from marl_ray.serving.handlers.experiment_actions import run_change
from marl_ray.serving.handlers.openai.models import models_of
from marl_ray.serving.http.messages import Request, RequestError, Response
from marl_ray.serving.logs.metrics import CONTENT_TYPE
from marl_ray.serving.service import Service


async def endpoints(service: Service, request: Request) -> Response:
    """Answer `GET /v1/endpoints`: the names that clients act on, and what is behind each.

    Behind an endpoint are its experiments, and what serves it in production.
    """
    await service.admission.admit_reader(request)

    def read() -> bytes:
        rows = {}
        for router in service.endpoints.routers.values():
            name = router.config.served_as
            if name not in rows:
                newest_first = [r.config.name for r in service.endpoints.routers_of(name)]
                production = service.stores.experiments.production(name)
                rows[name] = {
                    "experiments": newest_first,
                    "production": asdict(production) if production is not None else None,
                }
        return orjson.dumps({"endpoints": rows})

    return Response(await service.shared_reads.read("endpoints", read))


async def models(service: Service, request: Request) -> Response:
    """Answer `GET /v1/models`: every bundle that this replica holds.

    `data` has the values that OpenAI's clients may give as `model`.
    """
    await service.admission.admit_reader(request, "inference")
    rows: dict[str, JsonObject] = {}
    for reference, bundle in list(service.live_experiments.models.items()):
        rows[bundle.digest] = _model_row(bundle, reference)
    for router in service.endpoints.routers.values():
        for arm, part in router.arms.items():
            row = rows.setdefault(part.bundle.digest, _model_row(part.bundle, router.config.arms[arm].reference))
            row["arms"].append(f"{router.config.name}/{arm}")
    names = dict.fromkeys(router.config.served_as for router in service.endpoints.routers.values())
    data = [model for name in names for model in models_of(service.endpoints.routers_of(name))]
    return Response(orjson.dumps({"object": "list", "data": data, "models": list(rows.values())}))


async def load(service: Service, request: Request) -> Response:
    """Answer `POST /models/{version}/load`: fetch and verify a bundle of the registry.

    `version` is NAME:VERSION; another form raises RequestError 400. So the bundle is there before an experiment names it.
    """
    service.admission.admit(request, "admin")
    name, _, version = request.path_params["version"].rpartition(":")
    if not name or not version:
        raise RequestError(400, "version", "expected NAME:VERSION of the model registry")
    reference = f"models:/{name}/{version}"

    def load_bundle() -> AnyBundle:
        bundle = service.bundles.load(reference)
        service.notices.preload(reference, time.time())  # so that the other replicas load it too
        service.live_experiments.hold_model(reference, bundle)
        return bundle

    return Response(orjson.dumps(_model_row(await run_change(service, "version", load_bundle), reference)))


def _model_row(bundle: AnyBundle, reference: str) -> dict[str, object]:
    manifest = bundle.manifest
    return {
        "version": bundle.digest,
        "bundle": reference,
        "family": manifest.family,
        "agents": manifest.agents,
        "lineage": manifest.lineage.model_dump(mode="json"),
        "arms": [],
    }


async def health(service: Service, request: Request) -> Response:
    """Answer `GET /health`: 200 shows that this replica's event loop runs."""
    return Response(orjson.dumps({"status": "ok", "experiments": list(service.endpoints.routers)}))


async def readiness(service: Service, request: Request) -> Response:
    """Answer `GET /ready`: 200 if an answer is available for all experiments with traffic, else 503.

    A treatment without a bundle is named as missing but does not count, because the control answers for it. Neither
    does an experiment that was just created at another replica and still loads: otherwise all replicas would become
    unready at once.
    """
    arms, routers = service.follower.arms.arm_states(), service.endpoints.routers
    not_loaded = [
        f"{name}/{arm}" for name, states in arms.items() for arm, state in states.items() if state != "loaded"
    ]
    loaded = [
        routers[name] for name, states in arms.items() if set(states.values()) != {"loading"} or routers[name].arms
    ]
    answers = all(
        router.answering_arms(arm) for router in loaded for arm, weight in router.state.weights.items() if weight > 0
    )
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
