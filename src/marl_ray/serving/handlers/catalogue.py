"""Requests about what a replica serves: its endpoints, the bundles that it has loaded, and one more to load."""

import time
from dataclasses import asdict

import orjson

from marl_ray.json_types import JsonObject
from marl_ray.serving.arms.protocol import AnyBundle
from marl_ray.serving.handlers.experiment_actions import run_change
from marl_ray.serving.handlers.openai.models import models_of
from marl_ray.serving.http.messages import Request, RequestError, Response
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
    """Answer `GET /v1/models`: every bundle that this replica has loaded.

    `data` has the values that OpenAI's clients may give as `model`.
    """
    await service.admission.admit_reader(request, "inference")
    rows: dict[str, JsonObject] = {}
    for reference, bundle in list(service.live_experiments.models.items()):
        rows[bundle.digest] = _model_row(bundle, reference)
    for router in service.endpoints.routers.values():
        for name, arm in router.arms.items():
            row = rows.setdefault(arm.bundle.digest, _model_row(arm.bundle, router.config.arms[name].reference))
            row["arms"].append(f"{router.config.name}/{name}")
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
        service.live_experiments.keep_model(reference, bundle)
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
