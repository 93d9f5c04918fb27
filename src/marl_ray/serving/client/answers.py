"""The parts of a gateway's answers that clients read, by path, and their check.

Another service behind the address may answer with JSON too, so no key is read before the check. Further keys are
accepted, for a newer gateway may have more.
"""

import re
from typing import Annotated, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from marl_ray.config.mistakes.wording import first_mistake
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping, JsonObject


class _SessionAnswer(TypedDict):
    """The experiment and the arm of a session, which every answer to one names."""

    experiment: str
    arm: str


class _ActAnswer(_SessionAnswer):
    """The answer to a request for actions."""

    actions: JsonObject
    log_probs: dict[str, float]


class _GenerateAnswer(_SessionAnswer):
    """The answer to a request for a text."""

    text: str


class _ExperimentRow(TypedDict):
    """One experiment of a list."""

    name: str
    status: str
    epoch: int
    arms: dict[str, float]
    """Arm -> share of the traffic."""


class _ExperimentList(TypedDict):
    """The answer to a request for all experiments."""

    experiments: list[_ExperimentRow]


class _ArmReport(TypedDict):
    """One arm of an experiment's report."""

    propensity: float
    rolled_back: bool
    exposures: int
    in_window: int
    judged: int
    outcomes: int
    mean: float | None
    verdict: NotRequired[str]
    difference: NotRequired[float | None]
    difference_interval: NotRequired[Annotated[list[float], Field(min_length=2, max_length=2)] | None]


class _DecisionReport(TypedDict):
    """The next step of an experiment's ramp."""

    step: str
    arm: str | None
    reason: str


class _ArmConfig(TypedDict):
    """One arm of an experiment's config."""

    url: str | None


class _ReportedConfig(TypedDict):
    """The config of an experiment, in its report."""

    arms: dict[str, _ArmConfig]
    outcome_window_s: float


class _ExperimentReport(TypedDict):
    """The report of one experiment."""

    name: str
    status: str
    strategy: str
    stage: int
    epoch: int
    control: str
    decision: _DecisionReport
    arms: dict[str, _ArmReport]
    config: _ReportedConfig
    warnings: NotRequired[list[str]]


class _AuditRow(TypedDict):
    """One change of an experiment."""

    at: float
    """Seconds since 1970."""
    epoch: int
    action: str
    arm: str | None
    actor: str
    reason: str


class _Audit(TypedDict):
    """The answer to a request for the changes of an experiment."""

    audit: list[_AuditRow]


class _ChangeAnswer(TypedDict):
    """The answer to a change of an experiment."""

    status: str
    epoch: int


class _ProductionArm(TypedDict):
    """The arm that serves an endpoint."""

    experiment: str
    arm: str
    bundle: str


class _Endpoint(TypedDict):
    """One endpoint: its experiments, the newest first, and what serves it."""

    experiments: Annotated[list[str], Field(min_length=1)]
    production: _ProductionArm | None


class _EndpointList(TypedDict):
    """The answer to a request for all endpoints."""

    endpoints: dict[str, _Endpoint]


_EXPERIMENT = "/v1/experiments/[^/]+"
ANSWERS: dict[tuple[str, str], TypeAdapter[object]] = {
    ("POST", "/v1/act"): TypeAdapter(_ActAnswer),
    ("POST", "/generate"): TypeAdapter(_GenerateAnswer),
    ("POST", "/v1/outcomes"): TypeAdapter(_SessionAnswer),
    ("GET", "/v1/endpoints"): TypeAdapter(_EndpointList),
    ("GET", "/v1/experiments"): TypeAdapter(_ExperimentList),
    ("POST", "/v1/experiments"): TypeAdapter(_ExperimentReport),
    ("GET", _EXPERIMENT): TypeAdapter(_ExperimentReport),
    ("GET", f"{_EXPERIMENT}/audit"): TypeAdapter(_Audit),
    ("POST", f"{_EXPERIMENT}/[^/]+"): TypeAdapter(_ChangeAnswer),
}
"""Method and pattern of a path -> the answer to it. A gateway's address may put a prefix before the path."""


def check_answer(method: str, path: str, answer: JsonMapping) -> None:
    """Raise MarlRayError, which names the key, unless an answer has what a gateway's has to a request of this path.

    An answer to a path that is none of the above may hold anything.
    """
    for (route_method, pattern), form in ANSWERS.items():
        if method == route_method and re.search(f"{pattern}$", path):
            try:
                form.validate_python(answer, strict=True)
            except ValidationError as error:
                raise MarlRayError(first_mistake(error, answer)) from error
            return
