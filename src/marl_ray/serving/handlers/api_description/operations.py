"""The table of operations: what the OpenAPI document says of each, by its `operationId`."""

from typing import Any, NamedTuple

from marl_ray.experiments.lifecycle import Action
from marl_ray.serving.handlers.api_description.answers import (
    ActAnswer,
    AssignAnswer,
    Audit,
    BatchAnswer,
    Changed,
    Curves,
    EndpointList,
    Error,
    ExperimentList,
    ExperimentReport,
    GenerateAnswer,
    Health,
    Model,
    ModelList,
    OutcomeAnswer,
    OutcomesAnswer,
    Ready,
)
from marl_ray.serving.handlers.open_inference.schemas import (
    InferAnswer,
    InferError,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
)
from marl_ray.serving.handlers.openai.schemas import ChatAnswer, CompletionAnswer, ModelName
from marl_ray.serving.http.keys import Permission


class Operation(NamedTuple):
    """One operation, as the document describes it."""

    summary: str
    answer: Any
    """A pydantic model, or a JSON schema where no model describes the answer."""
    error_statuses: tuple[int, ...] = ()
    """Statuses of errors besides those that every operation may have."""
    body: str | None = None
    """Name of the schema of the request's body; None without a body."""
    scope: Permission | None = None
    """The scope that a key needs; None if no key is needed."""
    headers: tuple[str, ...] = ()
    """Names of the headers that the operation reads."""
    is_streamable: bool = False
    """True if the operation may also answer with server-sent events."""
    error: Any = Error
    """A pydantic model of an error's body."""
    status: int = 200
    """Status of a good answer."""
    media: str = "application/json"
    """Type of a good answer's content."""
    not_ready: str | None = None
    """The meaning of status 503, where it has the same answer as a good one."""


_ADMIN_STATUSES = (401, 403, 409, 429)
"""Statuses of the errors that all operations of the scope `admin` share."""
_CLIENT_STATUSES = (401, 403, 404, 413, 429)
"""Statuses of the errors that requests of a session share."""
_READER_STATUSES = (401, 403, 429, 503)
"""Statuses of the errors that operations of the scope `read` share."""
OPERATIONS: dict[str, Operation] = {
    "act": Operation(
        "Actions for the agents observed", ActAnswer, (*_CLIENT_STATUSES, 503), "ActRequest", "inference",
        ("x-session-id", "x-arm"),
    ),
    "batch": Operation(
        "Many acts at once, each answered by itself", BatchAnswer, (401, 403, 413, 429), "BatchRequest", "inference",
        ("x-session-id", "x-arm"),
    ),
    "assign": Operation(
        "A session's arm, without a pass", AssignAnswer, (*_CLIENT_STATUSES, 503), "AssignRequest", "inference",
        ("x-session-id", "x-arm"),
    ),
    "generate": Operation(
        "Text of token policies", GenerateAnswer, (*_CLIENT_STATUSES, 422, 503), "GenerateRequest", "inference",
        ("x-session-id", "x-arm"), is_streamable=True,
    ),
    "completions": Operation(
        "Text of token policies, as OpenAI's clients ask for it", ChatAnswer, (*_CLIENT_STATUSES, 422, 503), "ChatRequest",
        "inference", ("x-session-id", "x-arm"), is_streamable=True,
    ),
    "text_completions": Operation(
        "Texts that continue prompts, as OpenAI's clients ask for them", CompletionAnswer, (*_CLIENT_STATUSES, 422, 503),
        "CompletionRequest", "inference", ("x-session-id", "x-arm"), is_streamable=True,
    ),
    "outcome": Operation(
        "The outcome of a session", OutcomeAnswer, (*_CLIENT_STATUSES, 409, 503), "OutcomeRequest", "outcomes",
        ("x-session-id",),
    ),
    "outcomes": Operation(
        "Many outcomes at once, each answered by itself", OutcomesAnswer, (401, 403, 413, 429, 503), "OutcomesRequest",
        "outcomes", ("x-session-id",),
    ),
    "endpoints": Operation(
        "Endpoints, their experiments, and what serves them in production", EndpointList, _READER_STATUSES, scope="read",
    ),
    "experiments": Operation("All experiments, a row each", ExperimentList, (401, 403, 429), scope="read"),
    "create": Operation(
        "Begin an experiment", ExperimentReport, (*_ADMIN_STATUSES, 413, 503), "ExperimentRequest", "admin", status=201,
    ),
    "experiment": Operation(
        "An experiment and what its outcomes prove", ExperimentReport, (404, *_READER_STATUSES), scope="read"
    ),
    "audit": Operation("Every change of an experiment", Audit, (404, *_READER_STATUSES), scope="read"),
    "curves": Operation("Outcomes over time", Curves, (404, *_READER_STATUSES), scope="read"),
    **{
        action.value: Operation(
            f"Change an experiment: {action.value}", Changed, (*_ADMIN_STATUSES, 404, 413, 503), "ChangeRequest",
            "admin",
        )
        for action in Action
    },
    "models": Operation("The bundles that this replica has loaded", ModelList, (401, 403, 429), scope="read"),
    **dict.fromkeys(
        ("model", "agent_model"),
        Operation("A name that OpenAI's clients may give as `model`", ModelName, (404, *_READER_STATUSES), scope="read"),
    ),
    "load": Operation("Fetch and verify a bundle ahead of its experiment", Model, (*_ADMIN_STATUSES, 503), scope="admin"),
    "server": Operation("The server, by the Open Inference Protocol", ServerMetadata, error=InferError),
    "server_live": Operation("Whether this replica lives, by that protocol", ServerLive, error=InferError),
    "server_ready": Operation(
        "Whether this replica is ready; 503 if not", ServerReady, error=InferError, not_ready="Not ready.",
    ),
    "model_metadata": Operation(
        "An endpoint's inputs and outputs", ModelMetadata, (404, 422, *_READER_STATUSES), scope="read", error=InferError,
    ),
    "model_ready": Operation(
        "Whether an endpoint answers; 503 if not", ModelReady, (404, *_READER_STATUSES), scope="read",
        error=InferError, not_ready="Not ready.",
    ),
    "infer": Operation(
        "Actions for the agents observed, by the Open Inference Protocol", InferAnswer, (*_CLIENT_STATUSES, 422, 503),
        "InferRequest", "inference", ("x-session-id", "x-arm"), error=InferError,
    ),
    "health": Operation("Whether this replica lives", Health),
    "ready": Operation(
        "Whether this replica can answer for all experiments with traffic; 503 if not", Ready,
        not_ready="Not ready; `missing` has the arms that are not loaded.",
    ),
    "metrics": Operation("Numbers for Prometheus, of this replica", {"type": "string"}, media="text/plain"),
    "document": Operation("This document", {"type": "object"}),
}  # fmt: skip
