"""Requests about experiments: to list, open, read, change, chart and audit them."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import orjson
from pydantic import ValidationError

from marl_ray.config import ExperimentConfig
from marl_ray.config.base import message_of
from marl_ray.errors import MAX_COMPARED, MarlRayError, did_you_mean
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.lifecycle import RETREATS, Action, StaleEpochError
from marl_ray.json_types import JsonObject
from marl_ray.serving.holding.loaded_bundles import load_all_arms, pin_aliases
from marl_ray.serving.holding.needed_arms import API_ORIGIN
from marl_ray.serving.http.protocol import Request, RequestError, Response
from marl_ray.serving.rollout_decisions.curve_cache import CurveRows
from marl_ray.serving.rollout_decisions.report import curves, describe
from marl_ray.serving.rollout_decisions.rollout_control import read_results
from marl_ray.serving.routing.router import Router
from marl_ray.serving.service import Service

MAX_REASON_LENGTH = 1_000
"""Maximum number of characters of a reason."""
CREATE_FIELDS = frozenset({"reason", "succeeds"})
"""Fields of a request for a new experiment beside its config."""
CHANGE_FIELDS = frozenset({"reason", "arm", "epoch"})
"""Fields of a request for a change of an experiment."""
T = TypeVar("T")


def experiment_rows(service: Service) -> list[JsonObject]:
    """Return one row for each experiment of this replica."""
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
        for name, router in service.endpoints.routers.items()
    ]


async def experiments(service: Service, request: Request) -> Response:
    """Answer `GET /v1/experiments`."""
    await service.admission.admit_reader(request)
    return Response(orjson.dumps({"experiments": experiment_rows(service)}))


async def create(service: Service, request: Request) -> Response:
    """Answer `POST /v1/experiments`: a new experiment from an `ExperimentConfig`.

    Every replica takes it up by itself. The experiment that it `succeeds` ends with the new one's first epoch, and is left
    as it is if the new one is refused.
    """
    actor = service.admission.admit(request, "admin")
    data = await request.read_object(frozenset({*ExperimentConfig.model_fields, *CREATE_FIELDS}))
    reason, succeeds = _check_reason(data.pop("reason", None)), data.pop("succeeds", None)
    if succeeds is not None and not (isinstance(succeeds, str) and _is_storable(succeeds)):
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

    It is validated strictly, because "Infinity" is a number otherwise.
    """
    try:
        text = orjson.dumps(data)
        config = ExperimentConfig.model_validate_json(text, strict=True)
    except TypeError:
        raise RequestError(400, "body", "expected an ExperimentConfig, got JSON that is nested too deeply") from None
    except ValidationError as error:
        first = error.errors()[0]
        field, message = ".".join(map(str, first["loc"])), message_of(first)
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


def describe_experiment(service: Service, router: Router) -> dict[str, object]:
    """Return `report` as plain data."""
    service.exposures.flush()
    stores, name = service.stores, router.config.name
    record = stores.experiments.read(name)
    if record is None:
        raise StoreError(f"experiment {name!r} is not in the database any more")
    bundles = {
        arm: {"digest": part.bundle.digest, "lineage": part.bundle.manifest.lineage.model_dump(mode="json")}
        for arm, part in router.arms.items()
    }
    results = read_results(stores.evidence, record, router.config)
    return describe(record, router.config, bundles, results, stores.units.shadow_totals(name))


async def series(service: Service, request: Request) -> Response:
    """Answer `GET /v1/experiments/{name}/curves`: outcomes over time with confidence sequences."""
    await service.admission.admit_reader(request)
    router = service.endpoints.experiment(request.path_params["name"])

    def read() -> bytes:
        return orjson.dumps({"experiment": router.config.name, "curves": read_curves(service, router)})

    return Response(await service.shared_reads.read(("curves", router.config.name), read))


def read_curves(service: Service, router: Router) -> CurveRows:
    """Return the outcomes over time, by arm, as `CurveCache` has them; blocks on the database."""
    name = router.config.name
    return service.curves.read(name, lambda: curves(service.stores.evidence.series(name), router.config))


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


async def apply_change(
    service: Service, router: Router, actor: str, action: Action, data: dict[str, object]
) -> dict[str, object]:
    """Take a person's action on an experiment and return the new state.

    `data` has the fields of the request. Raises RequestError if the action is not possible.
    """
    reason = _check_reason(data.get("reason"))
    # An action that only takes traffic away is right on any epoch, and must not fail because another change came first.
    arm, epoch = data.get("arm"), data.get("epoch", None if action in RETREATS else router.state.epoch)
    arms = list(router.config.arms)  # a list, because JSON has values that are not hashable
    if arm is not None and arm not in arms:
        name = arm[:MAX_COMPARED] if isinstance(arm, str) else ""
        raise RequestError(400, "arm", f"{name!r} is unknown{did_you_mean(name, arms)}")
    if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int)):
        raise RequestError(400, "epoch", "expected the epoch that the change was decided on")

    def write() -> JsonObject:
        service.stores.experiments.change(router.config.name, action, epoch=epoch, actor=actor, reason=reason, arm=arm)
        service.follower.poll()  # apply the new state to this replica at once
        return {"status": router.state.status.value, "epoch": router.state.epoch}

    return await run_change(service, action.value, write)


async def run_change(service: Service, field: str, function: Callable[[], T]) -> T:
    """Run a change of an experiment in a thread.

    Raises RequestError 409 with the field if the state forbids the change.
    """
    try:
        return await service.in_thread(function)
    except StaleEpochError as error:
        raise RequestError(409, error.field, error.message) from None
    except (StoreError, RequestError):
        raise
    except MarlRayError as error:
        raise RequestError(409, field, str(error).removeprefix(f"{field}: ")) from None


def _check_reason(reason: object) -> str:
    if not isinstance(reason, str) or not 0 < len(reason.strip()) <= MAX_REASON_LENGTH or not _is_storable(reason):
        raise RequestError(400, "reason", f"expected why, for the audit log, in 1 to {MAX_REASON_LENGTH} characters")
    return reason


def _is_storable(value: str) -> bool:
    """Return True if every database can keep the text: it has neither NUL nor half a surrogate pair."""
    return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)
