"""Readings and changes of experiments that the API and the pages for people share."""

from collections.abc import Callable
from typing import TypeVar

from marl_ray.errors import MAX_COMPARED, MarlRayError, did_you_mean
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.lifecycle import RETREATS, Action, StaleEpochError
from marl_ray.json_types import JsonObject
from marl_ray.serving.errors import ServingError
from marl_ray.serving.http.messages import RequestError
from marl_ray.serving.ramp_decisions.curve_cache import CurveRows
from marl_ray.serving.ramp_decisions.ramp_control import read_results
from marl_ray.serving.ramp_decisions.report import curves, describe
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.service import Service

MAX_REASON_LENGTH = 1_000
"""Maximum number of characters of a reason: a few sentences, which the audit log keeps for good."""
T = TypeVar("T")


def experiment_rows(service: Service) -> list[JsonObject]:
    """Return one row for each experiment of this replica."""
    return [_experiment_row(router) for router in service.endpoints.routers.values()]


def _experiment_row(router: Router) -> JsonObject:
    config = router.config
    rules = router.rules
    return {
        "name": config.name,
        "endpoint": config.served_as,
        "status": rules.state.status.value,
        "strategy": config.strategy,
        "stage": rules.state.stage,
        "stages": list(config.stages) if config.strategy == "gradual" else [1.0],
        "epoch": rules.table.epoch,
        "control": rules.state.control,
        "arms": rules.table.propensities,
        "created": router.created,
    }


def describe_experiment(service: Service, router: Router) -> dict[str, object]:
    """Return an experiment and what its outcomes prove, as plain data; blocks on the database.

    Raises StoreError if the database does not have the experiment any more.
    """
    service.exposures.flush()
    stores = service.stores
    name = router.config.name
    record = stores.experiments.read(name)
    if record is None:
        raise StoreError(f"experiment {name!r} is not in the database any more")
    bundles = {
        name: {"digest": arm.bundle.digest, "lineage": arm.bundle.manifest.lineage.model_dump(mode="json")}
        for name, arm in router.arms.items()
    }
    results = read_results(stores.evidence, record, router.config)
    return describe(record, router.config, bundles, results, stores.units.shadow_totals(name))


def read_curves(service: Service, router: Router) -> CurveRows:
    """Return the outcomes over time, by arm, as `CurveCache` has them; blocks on the database."""
    name = router.config.name
    return service.curves.read(name, lambda: curves(service.stores.evidence.series(name), router.config))


async def apply_change(
    service: Service, router: Router, actor: str, action: Action, data: dict[str, object]
) -> dict[str, object]:
    """Take a person's action on an experiment and return the new state.

    `data` has the fields of the request. Raises RequestError if the action is not possible.
    """
    reason = check_reason(data.get("reason"))
    # An action that only takes traffic away is right on any epoch, and must not fail because another change came first.
    arm = data.get("arm")
    epoch = data.get("epoch", None if action in RETREATS else router.rules.state.epoch)
    arms = list(router.config.arms)  # a list, because JSON has values that are not hashable
    if arm is not None and arm not in arms:
        name = arm[:MAX_COMPARED] if isinstance(arm, str) else ""
        raise RequestError(400, "arm", f"{name!r} is unknown{did_you_mean(name, arms)}")
    if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int)):
        raise RequestError(400, "epoch", "expected the epoch that the change was decided on")

    def write() -> JsonObject:
        service.stores.experiments.change(router.config.name, action, epoch=epoch, actor=actor, reason=reason, arm=arm)
        service.follower.poll()  # apply the new state to this replica at once
        state = router.rules.state
        return {"status": state.status.value, "epoch": state.epoch}

    return await run_change(service, action.value, write)


async def run_change(service: Service, field: str, function: Callable[[], T]) -> T:
    """Run a change of an experiment in a thread.

    Raises RequestError 409 with the field if the state forbids the change.
    """
    try:
        return await service.in_thread(function)
    except StaleEpochError as error:
        raise RequestError(409, error.field, error.message) from None
    except (StoreError, ServingError):
        raise
    except MarlRayError as error:
        raise RequestError(409, field, str(error).removeprefix(f"{field}: ")) from None


def check_reason(reason: object) -> str:
    """Return the reason of a change. Raises RequestError 400 if it is no text, empty, or too long."""
    if not isinstance(reason, str) or not 0 < len(reason.strip()) <= MAX_REASON_LENGTH or not is_storable(reason):
        raise RequestError(400, "reason", f"expected why, for the audit log, in 1 to {MAX_REASON_LENGTH} characters")
    return reason


def is_storable(value: str) -> bool:
    """Return True if every database can keep the text: it has neither NUL nor half a surrogate pair."""
    return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)
