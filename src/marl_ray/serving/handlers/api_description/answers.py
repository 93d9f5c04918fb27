"""The answers of our own paths, as pydantic models."""
# ruff: noqa: UP013, UP035 (with a line per field the answers would take three pages; pydantic wants this TypedDict)

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.lifecycle import ExperimentStatus
from marl_ray.experiments.ramp_steps import RampStep
from marl_ray.experiments.statistics.intervals import Verdict
from marl_ray.experiments.store.records import AuditEntry, Production
from marl_ray.json_types import JsonObject
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.serving.handlers.openai.schemas import Finish, ModelName

# fmt: off
ErrorDetail = TypedDict("ErrorDetail", {
    "field": str | None, "message": str,
    # Of OpenAI's paths, for its clients:
    "type": NotRequired[str], "param": NotRequired[str | None], "code": NotRequired[str | None],
})
Error = TypedDict("Error", {"error": ErrorDetail})
ActAnswer = TypedDict("ActAnswer", {
    "experiment": str, "arm": str, "epoch": int, "propensity": float, "actions": JsonObject,
    "log_probs": dict[str, float], "fallback_for": NotRequired[str], "holdout": NotRequired[bool],
})
AssignAnswer = TypedDict("AssignAnswer", {
    "experiment": str, "arm": str, "epoch": int, "propensity": float, "bundle": str, "digest": str, "exposed": bool,
    "fallback_for": NotRequired[str], "holdout": NotRequired[bool],
})
PartError = TypedDict("PartError", {"status": int, "error": ErrorDetail})
BatchAnswer = TypedDict("BatchAnswer", {"answers": list[ActAnswer | PartError]})
GenerateAnswer = TypedDict("GenerateAnswer", {
    "experiment": str, "arm": str, "epoch": int, "propensity": float, "text": str, "tokens": list[int],
    "log_probs": list[float], "finish_reason": Finish, "fallback_for": NotRequired[str], "holdout": NotRequired[bool],
})
OutcomeAnswer = TypedDict("OutcomeAnswer", {
    "experiment": str, "arm": str, "value": NotRequired[float], "counts": bool, "note": NotRequired[str],
})
OutcomesAnswer = TypedDict("OutcomesAnswer", {"answers": list[OutcomeAnswer | PartError]})
ExperimentRow = TypedDict("ExperimentRow", {
    "name": str, "endpoint": str, "status": ExperimentStatus, "strategy": str, "stage": int, "stages": list[float],
    "epoch": int, "control": str, "arms": dict[str, float], "created": float,
})
ExperimentList = TypedDict("ExperimentList", {"experiments": list[ExperimentRow]})
IntervalEnds = Annotated[list[float], Field(min_length=2, max_length=2)]
TestReport = TypedDict("TestReport", {
    "margin": float, "alpha": float, "gain": float | None, "bound": float | None, "e_value": float | None, "proven": bool,
})
GuardrailReport = TypedDict("GuardrailReport", {
    "name": str, "arm": str, "better": Literal["lower", "higher"], "n": int, "control_n": int, "mean": float | None,
    "control_mean": float | None, "margin": float, "alpha": float, "gain": float | None, "bound": float | None,
    "e_value": float | None, "proven": bool,
})
ArmReport = TypedDict("ArmReport", {
    "bundle": str | None, "digest": str, "lineage": Lineage | None, "propensity": float, "rolled_back": bool,
    "exposures": int, "judged": int, "in_window": int, "outcomes": int, "observations": int,
    "mean": float | None, "variance": float | None,
    "interval": IntervalEnds | None,
    # Of treatments only:
    "difference": NotRequired[float | None], "difference_interval": NotRequired[IntervalEnds | None],
    "verdict": NotRequired[Verdict], "harm": NotRequired[TestReport], "promotion": NotRequired[TestReport],
})
DecisionReport = TypedDict("DecisionReport", {"step": RampStep, "arm": str | None, "reason": str})
SampleRatio = TypedDict("SampleRatio", {"p_value": float, "alarm": bool})
ReportingReport = TypedDict("ReportingReport", {
    "metric": str, "arm": str, "reported": int, "judged": int, "control_reported": int, "control_judged": int,
    "p_value": float, "alarm": bool,
})
ExperimentReport = TypedDict("ExperimentReport", {
    "name": str, "endpoint": str, "created": float, "status": ExperimentStatus, "winner": str | None, "strategy": str,
    "randomize": str, "stages": list[float], "stage": int, "epoch": int, "control": str, "decision": DecisionReport,
    "srm": SampleRatio, "reporting": list[ReportingReport], "warnings": list[str], "guardrails": list[GuardrailReport],
    "shadow": dict[str, dict[str, float]],
    "config": ExperimentConfig, "arms": dict[str, ArmReport],
})
Audit = TypedDict("Audit", {"experiment": str, "audit": list[AuditEntry]})
# Seconds since 1970, observations until then, their mean and its bounds.
Point = Annotated[list[float | None], Field(min_length=5, max_length=5)]
Curves = TypedDict("Curves", {"experiment": str, "curves": dict[str, list[Point]]})
Changed = TypedDict("Changed", {"experiment": str, "status": ExperimentStatus, "epoch": int})
Endpoint = TypedDict("Endpoint", {"experiments": list[str], "production": Production | None})
EndpointList = TypedDict("EndpointList", {"endpoints": dict[str, Endpoint]})
Model = TypedDict("Model", {
    "version": str, "bundle": str, "family": str, "agents": dict[str, str], "lineage": Lineage, "arms": list[str],
})
ModelList = TypedDict("ModelList", {"object": Literal["list"], "data": list[ModelName], "models": list[Model]})
Health = TypedDict("Health", {"status": Literal["ok"], "experiments": list[str]})
ArmLoading = Literal["loaded", "loading", "missing"]
Ready = TypedDict("Ready", {
    "ready": bool, "arms": dict[str, dict[str, ArmLoading]], "missing": list[str], "device": str, "version": str,
    "since": float | None, "uptime_s": float | None,
})
# fmt: on
