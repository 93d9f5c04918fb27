"""Requests about experiments: to list, open, read, change, chart and audit them."""

from dataclasses import asdict
from functools import partial

import orjson
from pydantic import ValidationError

from marl_ray.config import ExperimentConfig
from marl_ray.config.mistakes.wording import message_of
from marl_ray.experiments.lifecycle import Action
from marl_ray.serving.arm_loading.loaded_bundles import load_all_arms, pin_aliases
from marl_ray.serving.arm_loading.needed_arms import API_ORIGIN
from marl_ray.serving.handlers.experiment_actions import (
    apply_change,
    check_reason,
    describe_experiment,
    experiment_rows,
    is_storable,
    read_curves,
    run_change,
)
from marl_ray.serving.http.messages import Request, RequestError, Response
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.service import Service

CREATE_FIELDS = frozenset({"reason", "succeeds"})
"""Fields of a request for a new experiment beside its config."""
CHANGE_FIELDS = frozenset({"reason", "arm", "epoch"})
"""Fields of a request for a change of an experiment."""


async def experiments(service: Service, request: Request) -> Response:
    """Answer `GET /v1/experiments`."""
    await service.admission.admit_reader(request)
    return Response(orjson.dumps({"experiments": experiment_rows(service)}))


async def create(service: Service, request: Request) -> Response:
    """Answer `POST /v1/experiments`: a new experiment from an `ExperimentConfig`.

    Every replica takes it up by itself. The experiment that it `succeeds` ends with the new one's first epoch, and is left
    as it is if the new one is refused. Raises RequestError 409 if the name is taken, and 400 naming a wrong key.
    """
    actor = service.admission.admit(request, "admin")
    data = await request.read_object(frozenset({*ExperimentConfig.model_fields, *CREATE_FIELDS}))
    reason = check_reason(data.pop("reason", None))
    succeeds = data.pop("succeeds", None)
    if succeeds is not None and not (isinstance(succeeds, str) and is_storable(succeeds)):
        raise RequestError(400, "succeeds", "expected the name of an experiment")
    config = _read_config(data)

    def open_experiment() -> bytes:
        if service.stores.experiments.read(config.name) is not None:
            raise RequestError(409, "name", f"experiment {config.name!r} exists already; expected a new name")
        pinned = pin_aliases(config, service.config.tracking_uri)
        loaded = load_all_arms(pinned, service.bundles)
        router = service.live_experiments.open(loaded, actor, reason, succeeds, origin=API_ORIGIN)
        if succeeds is not None:
            service.follower.poll()  # apply its new state to this replica at once
        return report(service, router)

    return Response(await run_change(service, "experiment", open_experiment), 201)


def _read_config(data: dict[str, object]) -> ExperimentConfig:
    """Return the config in a request. Raises RequestError 400 naming the key.

    The config is validated strictly, because "Infinity" is a number otherwise.
    """
    try:
        text = orjson.dumps(data)
        config = ExperimentConfig.model_validate_json(text, strict=True)
    except TypeError:
        raise RequestError(400, "body", "expected an ExperimentConfig, got JSON that is nested too deeply") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        message = message_of(first)
        if not field:  # a message about several keys names them itself
            field, _, message = message.partition(": ")
        raise RequestError(400, field, message) from None
    if rb"\u0000" in text:  # no path and no text of PostgreSQL may contain it
        raise RequestError(400, "body", "expected no NUL characters")
    return config


async def experiment(service: Service, request: Request) -> Response:
    """Answer `GET /v1/experiments/{name}`."""
    await service.admission.admit_reader(request)
    router = service.endpoints.experiment(request.path_params["name"])
    return Response(await service.shared_reads.read(("report", router.config.name), partial(report, service, router)))


def report(service: Service, router: Router) -> bytes:
    """Return the JSON of an experiment and what its outcomes prove; blocks on the database."""
    return orjson.dumps(describe_experiment(service, router))


async def curves(service: Service, request: Request) -> Response:
    """Answer `GET /v1/experiments/{name}/curves`: outcomes over time with confidence sequences."""
    await service.admission.admit_reader(request)
    router = service.endpoints.experiment(request.path_params["name"])

    def read() -> bytes:
        return orjson.dumps({"experiment": router.config.name, "curves": read_curves(service, router)})

    return Response(await service.shared_reads.read(("curves", router.config.name), read))


async def audit(service: Service, request: Request) -> Response:
    """Answer `GET /v1/experiments/{name}/audit`."""
    await service.admission.admit_reader(request)
    name = service.endpoints.experiment(request.path_params["name"]).config.name

    def read() -> bytes:
        return orjson.dumps(
            {"experiment": name, "audit": [asdict(entry) for entry in service.stores.experiments.audit(name)]}
        )

    return Response(await service.shared_reads.read(("audit", name), read))


async def change(action: Action, service: Service, request: Request) -> Response:
    """Answer `POST /v1/experiments/{name}/{action}`."""
    actor = service.admission.admit(request, "admin")
    router = service.endpoints.experiment(request.path_params["name"])
    data = await request.read_object(CHANGE_FIELDS)
    state = await apply_change(service, router, actor, action, data)
    return Response(orjson.dumps({"experiment": router.config.name} | state))
