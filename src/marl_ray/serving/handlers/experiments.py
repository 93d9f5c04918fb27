"""Requests of people and their tools: experiments, models, health, metrics."""

import math
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
import torch
from pydantic import ValidationError

from marl_ray import __version__
from marl_ray.config import ExperimentConfig
from marl_ray.errors import MarlRayError
from marl_ray.experiments.states import RETREATS, Action, StaleEpochError
from marl_ray.experiments.store import StoreError
from marl_ray.serving.arms.actor_critic import AnyBundle, pin
from marl_ray.serving.evidence.report import curves, describe
from marl_ray.serving.evidence.rollout_control import findings
from marl_ray.serving.handlers.openai.chat import models_of
from marl_ray.serving.http.protocol import Request, RequestError, Response
from marl_ray.serving.loading import API, load_whole
from marl_ray.serving.logs.metrics import CONTENT_TYPE
from marl_ray.serving.routing.router import Router

if TYPE_CHECKING:
    from marl_ray.serving.asgi import Gateway

PLOT_S, PLOT_TIMES = 5.0, 20.0
"""Curves are read again after this time, and after so many times as long as reading them took."""
REASON_LENGTH = 1_000
CHANGE_FIELDS = frozenset({"reason", "arm", "epoch"})


def _name(request: Request, part: int = 3) -> str:
    return request.path.split("/")[part]


def rows(gateway: "Gateway") -> list[dict[str, Any]]:
    """Every experiment of this replica in a few words."""
    return [
        {
            "name": name,
            "endpoint": router.config.served_as,
            "status": router.state.status.value,
            "strategy": router.config.strategy,
            "stage": router.state.stage,
            "stages": list(router.config.stages) if router.config.strategy == "gradual" else [1.0],
            "epoch": router.table.epoch,
            "control": router.control,
            "arms": router.table.propensities,
            "created": router.created,
        }
        for name, router in gateway.endpoints.routers.items()
    ]


async def experiments(gateway: "Gateway", request: Request) -> Response:
    """`GET /v1/experiments`."""
    await gateway.admit_reader(request)
    return Response(orjson.dumps({"experiments": rows(gateway)}))


async def create(gateway: "Gateway", request: Request) -> Response:
    """`POST /v1/experiments`: a new experiment from an `ExperimentConfig`; every replica takes it up by itself."""
    actor = gateway.admit(request, "admin")
    data = await request.object(frozenset({*ExperimentConfig.model_fields, "reason"}))
    reason = _reason(data.pop("reason", None))
    config = _config(data)

    def open_it() -> bytes:
        if gateway.store.experiment(config.name) is not None:
            raise RequestError(409, "name", f"experiment {config.name!r} exists already; expected a new name")
        fixed = pin(config, gateway.config.tracking_uri)
        router = gateway.open(load_whole(fixed, gateway.bundles), actor, reason, origin=API)
        return report(gateway, router)

    return Response(await _tried(gateway, "experiment", open_it), 201)


def _config(data: dict[str, Any]) -> ExperimentConfig:
    """The config in a request, or RequestError 400. Strict, because "Infinity" is a number otherwise."""
    try:
        text = orjson.dumps(data)
        config = ExperimentConfig.model_validate_json(text, strict=True)
    except TypeError:
        raise RequestError(400, "body", "expected an ExperimentConfig, got JSON that is nested too deeply") from None
    except ValidationError as error:
        first = error.errors()[0]
        field, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if not field:  # what concerns several keys names them itself
            field, _, message = message.partition(": ")
        raise RequestError(400, field, message) from None
    if rb"\u0000" in text:  # which no path and no text of PostgreSQL may have
        raise RequestError(400, "body", "expected no NUL characters")
    return config


async def experiment(gateway: "Gateway", request: Request) -> Response:
    """`GET /v1/experiments/{name}`."""
    await gateway.admit_reader(request)
    router = gateway.endpoints.experiment(_name(request))
    return Response(await gateway.readings.read(("report", router.config.name), partial(report, gateway, router)))


def report(gateway: "Gateway", router: Router) -> bytes:
    """JSON of an experiment and what its outcomes prove; blocks on the database."""
    return orjson.dumps(described(gateway, router))


def described(gateway: "Gateway", router: Router) -> dict[str, Any]:
    """`report` as plain data."""
    gateway.exposures.flush()
    store, name = gateway.store, router.config.name
    record = store.experiment(name)
    if record is None:
        raise StoreError(f"experiment {name!r} is not in the database any more")
    bundles = {
        arm: {"digest": part.bundle.digest, "lineage": part.bundle.manifest.lineage.model_dump(mode="json")}
        for arm, part in router.arms.items()
    }
    found = findings(store, record, router.config)
    return describe(record, router.config, bundles, found, store.shadow_totals(name))


async def series(gateway: "Gateway", request: Request) -> Response:
    """`GET /v1/experiments/{name}/curves`: outcomes over time, with their confidence sequences."""
    await gateway.admit_reader(request)
    router = gateway.endpoints.experiment(_name(request))

    def read() -> bytes:
        return orjson.dumps({"experiment": router.config.name, "curves": plotted(gateway, router)})

    return Response(await gateway.readings.read(("curves", router.config.name), read))


def plotted(gateway: "Gateway", router: Router) -> dict[str, list[list[float | None]]]:
    """Outcomes over time, by arm; blocks on the database. Every outcome is read for it, so pages that reload share one
    reading for some seconds."""
    name, began = router.config.name, time.monotonic()
    until, found = gateway.plots.get(name, (-math.inf, {}))
    if began > until:
        found = curves(gateway.store.series(name), router.config)
        now = time.monotonic()
        gateway.plots[name] = now + max(PLOT_S, PLOT_TIMES * (now - began)), found
    return found


async def audit(gateway: "Gateway", request: Request) -> Response:
    """`GET /v1/experiments/{name}/audit`."""
    await gateway.admit_reader(request)
    name = gateway.endpoints.experiment(_name(request)).config.name

    def read() -> bytes:
        return orjson.dumps({"experiment": name, "audit": [asdict(entry) for entry in gateway.store.audit(name)]})

    return Response(await gateway.readings.read(("audit", name), read))


async def change(gateway: "Gateway", request: Request) -> Response:
    """`POST /v1/experiments/{name}/{action}`."""
    actor = gateway.admit(request, "admin")
    router = gateway.endpoints.experiment(_name(request))
    data = await request.object(CHANGE_FIELDS)
    state = await changed(gateway, router, actor, _name(request, 4), data)
    return Response(orjson.dumps({"experiment": router.config.name} | state))


async def changed(gateway: "Gateway", router: Router, actor: str, action: str, data: dict[str, Any]) -> dict[str, Any]:
    """Do what a person asks of an experiment; the state that came of it, or RequestError."""
    reason = _reason(data.get("reason"))
    # What only takes traffic away is right on any epoch, and must not fail because another change was faster.
    arm, epoch = data.get("arm"), data.get("epoch", None if Action(action) in RETREATS else router.state.epoch)
    arms = list(router.config.arms)  # a list, as JSON has values that cannot be looked up
    if arm is not None and arm not in arms:
        raise RequestError(400, "arm", f"expected one of {', '.join(arms)}")
    if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int)):
        raise RequestError(400, "epoch", "expected the epoch that the change was decided on")

    def write() -> dict[str, Any]:
        gateway.store.change(router.config.name, Action(action), epoch=epoch, actor=actor, reason=reason, arm=arm)
        gateway.follower.look()  # this replica answers by the new state from now on
        return {"status": router.state.status.value, "epoch": router.state.epoch}

    return await _tried(gateway, action, write)


async def _tried(gateway: "Gateway", field: str, function: Any) -> Any:
    try:
        return await gateway.in_thread(function)
    except StaleEpochError as error:
        raise RequestError(409, "epoch", str(error).removeprefix("epoch: ")) from None
    except (StoreError, RequestError):
        raise
    except MarlRayError as error:
        raise RequestError(409, field, str(error)) from None


def _reason(reason: Any) -> str:
    if not isinstance(reason, str) or not 0 < len(reason.strip()) <= REASON_LENGTH or not _is_text(reason):
        raise RequestError(400, "reason", f"expected why, for the audit log, in 1 to {REASON_LENGTH} characters")
    return reason


def _is_text(value: str) -> bool:
    """Whether every database keeps it: neither NUL nor half a surrogate pair."""
    return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)


async def endpoints(gateway: "Gateway", request: Request) -> Response:
    """`GET /v1/endpoints`: the names that clients act on, their experiments, and what serves them in production."""
    await gateway.admit_reader(request)

    def read() -> bytes:
        found = {}
        for router in gateway.endpoints.routers.values():
            name = router.config.served_as
            if name not in found:
                newest_first = [r.config.name for r in gateway.endpoints.served(name)]
                production = gateway.store.production(name)
                found[name] = {
                    "experiments": newest_first,
                    "production": asdict(production) if production is not None else None,
                }
        return orjson.dumps({"endpoints": found})

    return Response(await gateway.readings.read("endpoints", read))


async def models(gateway: "Gateway", request: Request) -> Response:
    """`GET /v1/models`: every bundle that this replica holds, and `data`, what OpenAI's clients may name as `model`."""
    await gateway.admit_reader(request, "inference")
    found: dict[str, dict[str, Any]] = {}
    for reference, bundle in gateway.models.items():
        found[bundle.digest] = _model(bundle, reference)
    for router in gateway.endpoints.routers.values():
        for arm, part in router.arms.items():
            row = found.setdefault(part.bundle.digest, _model(part.bundle, router.config.arms[arm].bundle))
            row["arms"].append(f"{router.config.name}/{arm}")
    names = dict.fromkeys(router.config.served_as for router in gateway.endpoints.routers.values())
    data = [model for name in names for model in models_of(gateway.endpoints.served(name))]
    return Response(orjson.dumps({"object": "list", "data": data, "models": list(found.values())}))


async def load(gateway: "Gateway", request: Request) -> Response:
    """`POST /models/{version}/load`: fetch NAME:VERSION of the registry and verify it before an experiment names it."""
    gateway.admit(request, "admin")
    name, _, version = _name(request, 2).rpartition(":")
    if not name or not version:
        raise RequestError(400, "version", "expected NAME:VERSION of the model registry")
    reference = f"models:/{name}/{version}"

    def load_it() -> AnyBundle:
        bundle = gateway.bundles.load(reference)
        gateway.notices.preload(reference, time.time())  # the other replicas load it too
        gateway.models = gateway.models | {reference: bundle}
        return bundle

    return Response(orjson.dumps(_model(await _tried(gateway, "version", load_it), reference)))


def _model(bundle: AnyBundle, reference: str) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "version": bundle.digest,
        "bundle": reference,
        "family": manifest.family,
        "agents": manifest.agents,
        "lineage": manifest.lineage.model_dump(mode="json"),
        "arms": [],
    }


async def health(gateway: "Gateway", request: Request) -> Response:
    """`GET /health`: this replica's event loop runs."""
    return Response(orjson.dumps({"status": "ok", "experiments": list(gateway.endpoints.routers)}))


async def ready(gateway: "Gateway", request: Request) -> Response:
    """`GET /ready`: whether something answers for all that takes traffic; 503 while it does not. A treatment whose bundle is
    gone is named as missing and does not count, as the control answers for it, nor does an experiment that has just been
    created elsewhere and loads: else all replicas would go at once."""
    arms, routers = gateway.follower.arms(), gateway.endpoints.routers
    lacking = [f"{name}/{arm}" for name, states in arms.items() for arm, state in states.items() if state != "loaded"]
    here = [routers[name] for name, states in arms.items() if set(states.values()) != {"loading"} or routers[name].arms]
    answers = all(
        router.answering(arm) for router in here for arm, weight in router.state.weights.items() if weight > 0
    )
    is_ready = gateway.started is not None and answers  # what there was at the start is loaded before it
    told = {
        "ready": is_ready,
        "arms": arms,
        "missing": lacking,
        "device": device(),
        "version": __version__,
        "since": gateway.started,
        "uptime_s": None if gateway.started is None else time.time() - gateway.started,
    }
    return Response(orjson.dumps(told), 200 if is_ready else 503)


def device() -> str:
    """What policies in this process run on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


async def metrics(gateway: "Gateway", request: Request) -> Response:
    """`GET /metrics`: the numbers of this replica alone."""
    gateway.measure()
    return Response(gateway.metrics.text(), content_type=CONTENT_TYPE)
