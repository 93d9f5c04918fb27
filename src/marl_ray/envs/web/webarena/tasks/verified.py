"""The task format of WebArena-Verified (https://github.com/ServiceNow/webarena-verified, webarena-verified.json)."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from marl_ray.envs.text.tasks import StrictRecord
from marl_ray.envs.web.webarena.tasks.schema import (
    Check,
    RequestCheck,
    ResponseCheck,
    WebTask,
    is_pattern,
    unknown_placeholders,
)
from marl_ray.envs.web.webarena.tasks.webarena import SiteName
from marl_ray.json_types import JsonObject

ResponseStatus = Literal[
    "SUCCESS",
    "ACTION_NOT_ALLOWED_ERROR",
    "PERMISSION_DENIED_ERROR",
    "NOT_FOUND_ERROR",
    "DATA_VALIDATION_ERROR",
    "UNKNOWN_ERROR",
]


class ResponseRecord(StrictRecord):
    """The answer that is expected."""

    task_type: Literal["retrieve", "navigate", "mutate"]
    status: ResponseStatus
    retrieved_data: list[Any] | None = None


class SchemaRecord(StrictRecord):
    """The JSON schema of an answer's data, or of a part of it."""

    type: Literal["array", "object", "string", "number", "integer", "boolean", "null"] | None = None
    format: str | None = None
    title: str = ""
    items: "SchemaRecord | None" = None
    properties: dict[str, "SchemaRecord"] = {}


class ResponseEvaluatorRecord(StrictRecord):
    """An element of `eval`."""

    evaluator: Literal["AgentResponseEvaluator"]
    expected: ResponseRecord
    results_schema: SchemaRecord
    ordered: bool = False

    @model_validator(mode="after")
    def _check_data(self) -> "ResponseEvaluatorRecord":
        for value in self.expected.retrieved_data or ():
            _check_value(value, self.results_schema.items or SchemaRecord())
        return self


class RequestRecord(StrictRecord):
    """The request that is expected."""

    url: str | list[str]
    http_method: str = "GET"
    response_status: int = 200
    query_params: JsonObject | None = None
    post_data: JsonObject | None = None
    headers: JsonObject | None = None
    response_content: JsonObject | None = None
    response_cookies: JsonObject | None = None


class RequestEvaluatorRecord(StrictRecord):
    """An element of `eval`."""

    evaluator: Literal["NetworkEventEvaluator"]
    expected: RequestRecord
    last_event_only: bool = True
    ignored_query_params: list[str] = []
    ignored_query_params_patterns: list[str] = []
    ignored_post_data_params_patterns: list[str] = []
    decode_base64_query: bool = False
    query_params_schema: JsonObject | None = None
    post_data_schema: JsonObject | None = None
    should_not_exist: bool = False


class VerifiedRecord(StrictRecord):
    """An element of a file of tasks."""

    task_id: int = Field(ge=0)
    sites: list[SiteName] = Field(min_length=1)
    start_urls: list[str] = Field(min_length=1)
    intent: str = Field(min_length=1)
    intent_template: str
    intent_template_id: int
    instantiation_dict: JsonObject
    revision: int = Field(ge=1)
    eval: list[Annotated[ResponseEvaluatorRecord | RequestEvaluatorRecord, Field(discriminator="evaluator")]] = Field(
        min_length=1
    )

    @field_validator("start_urls")
    @classmethod
    def _check_start(cls, value: list[str]) -> list[str]:
        for url in value:
            if unknown := unknown_placeholders(url):
                raise ValueError(f"{unknown[0]} is the placeholder of no site")
        return value


def _check_value(value: Any, schema: SchemaRecord) -> None:
    """Raise ValueError for an expected value that is not of its schema, or that is a pattern which cannot be read."""
    if schema.type in ("array", "object"):
        kind = list if schema.type == "array" else dict
        if not isinstance(value, kind):
            raise ValueError(
                f"expected.retrieved_data: {str(value)[:40]!r} is no {schema.type}, as results_schema says"
            )
        if isinstance(value, dict):
            for name, part in schema.properties.items():
                if name in value:
                    _check_value(value[name], part)
        else:
            for item in value:
                _check_value(item, schema.items or SchemaRecord())
        return
    if schema.type == "null" or schema.format == "null":
        raise ValueError("expected.retrieved_data: expected nothing where results_schema has the type null")
    for item in value if isinstance(value, list) else [value]:
        if is_pattern(item):
            try:
                re.compile(item)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"expected.retrieved_data: the pattern {item[:40]!r} is wrong: {error}") from error


def verified_task(record: VerifiedRecord) -> WebTask:
    """Return the task of a record."""
    return WebTask(
        task_id=str(record.task_id),
        prompt=record.intent,
        sites=tuple(record.sites),
        start_urls=tuple(record.start_urls),
        checks=tuple(_make_check(item) for item in record.eval),
        template=record.intent_template_id,
    )


def _make_check(record: ResponseEvaluatorRecord | RequestEvaluatorRecord) -> Check:
    if isinstance(record, ResponseEvaluatorRecord):
        expected = record.expected
        return ResponseCheck(
            expected.task_type,
            expected.status,
            expected.retrieved_data,
            record.results_schema.model_dump(exclude_none=True),
            record.ordered,
        )
    request = record.expected
    other = {
        "headers": request.headers,
        "response_content": request.response_content,
        "response_cookies": request.response_cookies,
        "query_params_schema": record.query_params_schema,
        "post_data_schema": record.post_data_schema,
        "decode_base64_query": record.decode_base64_query or None,
    }
    names = tuple(f"^{name}$" for name in record.ignored_query_params)
    return RequestCheck(
        urls=(request.url,) if isinstance(request.url, str) else tuple(request.url),
        method=request.http_method,
        status=request.response_status,
        query=request.query_params,
        posted=request.post_data,
        other={name: value for name, value in other.items() if value is not None} or None,
        ignored_query=names + tuple(record.ignored_query_params_patterns),
        ignored_posted=tuple(record.ignored_post_data_params_patterns),
        last_only=record.last_event_only,
        absent=record.should_not_exist,
    )
