"""Requests that report the outcomes of sessions: `/v1/outcomes`, and `/v1/outcomes/batch` for many of them."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from marl_ray.config.serving.arms import max_replicas
from marl_ray.errors import MarlRayError
from marl_ray.experiments.store.reports import (
    MAX_METRIC_LENGTH,
    OutcomeConflictError,
    RecordedReport,
    Report,
    UnknownUnitError,
)
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.serving.errors import ServingError
from marl_ray.serving.http.fields import is_identifier, session_id
from marl_ray.serving.http.messages import Request, RequestError, Response, known_fields
from marl_ray.serving.http.statuses import as_request_error
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.routing.unit_reports import COST, counts_cost
from marl_ray.serving.service import Service

MAX_OUTCOME = 1e100
"""Larger numbers would overflow the database's sums of squares."""
RETRY_PAUSES_S = (0.1, 0.2, 0.4)
"""Seconds of the pauses before an outcome is refused, in which another replica's queued exposure can reach the store."""
MAX_CLOCK_LEAD_S = 5.0
"""Seconds by which a client's clock may be ahead of this one."""
OUTCOME_FIELDS = frozenset({"experiment", "session_id", "value", "metrics", "at"})


@dataclass(frozen=True, slots=True)
class _ReadReport:
    """The checked report of one request about a session."""

    name: str
    """The endpoint or experiment that the report names, or the only one."""
    routers: Sequence[Router]
    """Experiments that may know the session, the newest first."""
    session: str
    values: Mapping[str, float]
    """`outcome` or name of a metric -> its value."""
    at: float | None
    """Moment of the outcome, in seconds since 1970; None if the client names none."""


OutcomeResult = JsonObject | RequestError


async def outcome(service: Service, request: Request) -> Response:
    """Answer `POST /v1/outcomes`."""
    key = service.admission.admit(request, "outcomes")
    report = _read_report(service, request, await request.read_object(OUTCOME_FIELDS))
    answer = (await _record(service, key, [report]))[0]
    if isinstance(answer, RequestError):
        raise answer
    return Response(orjson.dumps(answer))


async def outcomes(service: Service, request: Request) -> Response:
    """Answer `POST /v1/outcomes/batch`: each part as by `/v1/outcomes`.

    A part that fails is answered with its own status and error. Raises RequestError if the parts are no list, or too many.
    """
    key = service.admission.keys.check(request, "outcomes")
    parts = (await request.read_object(frozenset({"outcomes"}))).get("outcomes")
    limit = service.config.max_batch_requests
    if not isinstance(parts, list) or not parts:
        raise RequestError(400, "outcomes", "expected a list with at least one outcome")
    if len(parts) > limit:
        raise RequestError(413, "outcomes", f"expected at most {limit} outcomes, got {len(parts)}")
    service.admission.limit(key, len(parts))

    def read(part: object) -> _ReadReport | RequestError:
        try:
            return _read_report(service, request, known_fields(part, OUTCOME_FIELDS))
        except ServingError as error:
            return as_request_error(error)

    read_parts = [read(part) for part in parts]
    recorded = iter(
        await _record(service, key, [read_part for read_part in read_parts if isinstance(read_part, _ReadReport)])
    )
    answers = [next(recorded) if isinstance(read_part, _ReadReport) else read_part for read_part in read_parts]
    return Response(orjson.dumps({"answers": [_format_answer(answer) for answer in answers]}))


def _format_answer(answer: OutcomeResult) -> dict[str, object]:
    if isinstance(answer, RequestError):
        return {"status": answer.status, **orjson.loads(answer.body())}
    return answer


def _read_report(service: Service, request: Request, data: JsonMapping) -> _ReadReport:
    """Read and check the fields of one report. Raises ServingError naming the wrong one."""
    routers = service.endpoints.routers_of(data.get("experiment"))
    session = session_id(data.get("session_id"), request)
    metrics = data.get("metrics", {})
    if not isinstance(metrics, dict) or not all(_is_number(number) for number in metrics.values()):
        raise RequestError(400, "metrics", "expected an object of numbers by name")
    if not all(is_identifier(name, MAX_METRIC_LENGTH) and name != "outcome" for name in metrics):
        names = f"names of 1 to {MAX_METRIC_LENGTH} printable characters other than 'outcome'"
        raise RequestError(400, "metrics", f"expected {names}")
    values = {name: float(number) for name, number in metrics.items()}
    if "value" in data or not metrics:
        value: Any = data.get("value")
        if not _is_number(value):
            raise RequestError(400, "value", f"expected a number of size {MAX_OUTCOME:g} at most")
        values["outcome"] = float(value)
    return _ReadReport(
        data.get("experiment") or routers[0].config.served_as, routers, session, values, _read_moment(data.get("at"))
    )


def _read_moment(moment: Any) -> float | None:
    """Return the seconds since 1970 of a request's `at`; None without one. Raises RequestError 400."""
    if moment is None:
        return None
    expected = "expected seconds since 1970, or a time with its zone such as 2026-01-31T12:00:00Z"
    seconds = math.nan
    if isinstance(moment, str):
        try:
            parsed = datetime.fromisoformat(moment)
            seconds = parsed.timestamp() if parsed.tzinfo is not None else math.nan
        except (ValueError, OverflowError):
            pass
    elif _is_number(moment):
        seconds = float(moment)
    if not seconds >= 0:
        raise RequestError(400, "at", expected)
    now = time.time()
    if seconds > now + MAX_CLOCK_LEAD_S:
        raise RequestError(400, "at", f"{expected}, that is not in the future")
    return min(seconds, now)


async def _record(service: Service, actor: str, reports: Sequence[_ReadReport]) -> list[OutcomeResult]:
    """Write outcomes, each to the newest of its experiments that knows the session."""
    results = await service.in_thread(_store_reports, service, actor, reports)
    # Another replica's queue may hold a session's exposure for some moments.
    for pause in RETRY_PAUSES_S if max_replicas(service.config.replicas) > 1 else ():
        unknown = [k for k, result in enumerate(results) if isinstance(result, UnknownUnitError)]
        if not unknown:
            break
        await asyncio.sleep(pause)
        repeated_results = await service.in_thread(_store_reports, service, actor, [reports[k] for k in unknown])
        for k, result in zip(unknown, repeated_results, strict=True):
            results[k] = result
    return [_describe_result(report, result) for report, result in zip(reports, results, strict=True)]


def _store_reports(
    service: Service, actor: str, reported: Sequence[_ReadReport]
) -> list[tuple[Router, RecordedReport] | MarlRayError]:
    """Store the reports, in one transaction for each experiment."""
    service.exposures.flush()  # the session's exposure may still be queued here
    service.unit_reports.write()
    results: dict[int, tuple[Router, RecordedReport] | MarlRayError] = {}
    pending = list(range(len(reported)))
    depth = 0
    while pending:
        of_router: dict[str, tuple[Router, list[int]]] = {}
        for k in pending:
            router = reported[k].routers[depth]
            of_router.setdefault(router.config.name, (router, []))[1].append(k)
        for name, (router, numbers) in of_router.items():
            reports = [_report(router, reported[k]) for k in numbers]
            for k, recorded in zip(numbers, service.stores.units.record(name, reports, actor), strict=True):
                results[k] = recorded if isinstance(recorded, MarlRayError) else (router, recorded)
                if router.rules.state.is_over and not isinstance(recorded, MarlRayError):
                    service.follower.ended.note_due(name)  # it may prove harm once its window is over
        depth += 1
        pending = [k for k in pending if isinstance(results[k], UnknownUnitError) and depth < len(reported[k].routers)]
    return [results[k] for k in range(len(reported))]


def _report(router: Router, reported: _ReadReport) -> Report:
    """Return the report for the store.

    The report includes what this replica has measured of the session, if a guardrail needs it.
    """
    remembered = router.remembered.units.get(reported.session)
    wanted_metrics = {rail.name for rail in router.config.guardrails}
    measured: dict[str, float] = {}
    if remembered is not None and "outcome" in reported.values:
        measured["error"] = float(remembered.failed)
        if remembered.acts:
            measured["latency_s"] = remembered.seconds / remembered.acts
    if "outcome" in reported.values:
        measured[COST] = 0.0  # 0 if no cost is noted, see `UnitReports`
    wanted_metrics -= set() if counts_cost(router.config) else {COST}
    measured = {
        name: value for name, value in measured.items() if name in wanted_metrics and name not in reported.values
    }
    return Report(reported.session, reported.values, reported.at, measured)


def _describe_result(reported: _ReadReport, result: tuple[Router, RecordedReport] | MarlRayError) -> OutcomeResult:
    if isinstance(result, UnknownUnitError):
        return RequestError(
            404, "session_id", f"no session {reported.session!r} has acted in experiment {reported.name!r}"
        )
    if isinstance(result, MarlRayError):
        field, _, message = str(result).partition(": ")
        return RequestError(409 if isinstance(result, OutcomeConflictError) else 400, field, message)
    router, recorded = result
    answer: dict[str, object] = {"experiment": router.config.name, "arm": recorded.assignment.arm}
    if "outcome" in reported.values:
        answer["value"] = reported.values["outcome"]
    answer["counts"] = recorded.late_s is None
    if recorded.late_s is not None:
        window = router.config.outcome_window_s
        late = f"{recorded.late_s:.1f} s after the session's outcome window of {window:g} s"
        answer["note"] = f"it came {late}: it is kept and does not count"
    return answer


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= MAX_OUTCOME
