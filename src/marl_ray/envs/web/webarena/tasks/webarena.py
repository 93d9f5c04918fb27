"""The task format of WebArena (https://github.com/web-arena-x/webarena, config_files/test.raw.json)."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from marl_ray.envs.text.tasks import StrictRecord
from marl_ray.envs.web.webarena.tasks.programs import is_program, parse_program
from marl_ray.envs.web.webarena.tasks.schema import (
    NOT_ACHIEVABLE,
    AddressCheck,
    AnswerCheck,
    Check,
    PageCheck,
    PageContent,
    WebTask,
    unknown_placeholders,
)

OR_SEPARATOR, AND_SEPARATOR = " |OR| ", " |AND| "
SCRIPT_BEGINNINGS = "document.", "[...document."
"""Beginnings of JavaScript that selects a part of a page."""
SiteName = Literal["shopping", "shopping_admin", "gitlab", "reddit", "wikipedia", "map", "homepage"]
"""A site of `marl_ray.envs.web.webarena.tasks.schema.SITES`."""


class ContentRecord(StrictRecord):
    """One of `required_contents`: exactly one of the two."""

    exact_match: str | None = None
    must_include: list[str] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "ContentRecord":
        if (self.exact_match is None) == (self.must_include is None):
            raise ValueError("expected either exact_match or must_include")
        return self


class PageRecord(StrictRecord):
    """An element of `program_html`."""

    url: str = Field(min_length=1)
    locator: str
    required_contents: ContentRecord
    prep_actions: list[str] = []

    @field_validator("url", "locator")
    @classmethod
    def _check_program(cls, value: str) -> str:
        if is_program(value):
            parse_program(value)
        return value

    @field_validator("locator")
    @classmethod
    def _check_script(cls, value: str) -> str:
        if value.strip() and not value.startswith(SCRIPT_BEGINNINGS) and not is_program(value):
            raise ValueError(
                f"expected JavaScript from {' or '.join(SCRIPT_BEGINNINGS)} on, a func: or nothing, got {value[:40]!r}"
            )
        return value

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        return _with_known_sites(value)


class AnswerRecord(StrictRecord):
    """The dictionary `reference_answers`."""

    exact_match: str | None = None
    must_include: list[str] | None = None
    fuzzy_match: list[str] | Literal["N/A"] | None = None

    @model_validator(mode="after")
    def _check_any(self) -> "AnswerRecord":
        if self.exact_match is None and self.must_include is None and self.fuzzy_match is None:
            raise ValueError("expected exact_match, must_include or fuzzy_match")
        return self


class EvalRecord(StrictRecord):
    """The dictionary `eval`."""

    eval_types: list[Literal["string_match", "url_match", "program_html"]] = Field(min_length=1)
    reference_answers: AnswerRecord | None
    reference_url: str | None
    program_html: list[PageRecord]
    string_note: str = ""
    reference_answer_raw_annotation: str = ""
    annotation_note: str = ""
    url_note: Literal["GOLD in PRED"] = "GOLD in PRED"

    @model_validator(mode="after")
    def _check_references(self) -> "EvalRecord":
        answers = self.reference_answers
        if "string_match" in self.eval_types and answers is None:
            raise ValueError("reference_answers: expected with string_match")
        if "url_match" in self.eval_types and not self.reference_url:
            raise ValueError("reference_url: expected with url_match")
        if "program_html" in self.eval_types and not self.program_html:
            raise ValueError("program_html: expected an element with program_html")
        if answers is not None and answers.fuzzy_match == NOT_ACHIEVABLE and not self.string_note:
            raise ValueError("string_note: expected with fuzzy_match N/A, the reason why the task is not achievable")
        for url in _with_known_sites(self.reference_url or "").split(OR_SEPARATOR):
            try:
                urlsplit(url)
            except ValueError as error:
                raise ValueError(f"reference_url: {url[:80]!r} is no address: {error}") from error
        return self


class WebArenaRecord(StrictRecord):
    """An element of a file of tasks."""

    task_id: int = Field(ge=0)
    sites: list[SiteName] = Field(min_length=1)
    start_url: str = Field(min_length=1)
    intent: str = Field(min_length=1)
    intent_template: str
    intent_template_id: int
    instantiation_dict: dict[str, object]
    eval: EvalRecord
    require_login: bool = False
    storage_state: str | None = None
    geolocation: None = None
    require_reset: bool = False
    string_note: str = ""

    @field_validator("start_url")
    @classmethod
    def _check_start(cls, value: str) -> str:
        return _with_known_sites(value)

    @model_validator(mode="after")
    def _check_programs(self) -> "WebArenaRecord":
        for page in self.eval.program_html:
            for text in (page.url, page.locator):
                if (
                    is_program(text)
                    and parse_program(text).name.startswith("shopping_")
                    and "shopping" not in self.sites
                ):
                    raise ValueError(f"sites: expected shopping, which {text[:60]} asks")
        return self


def webarena_task(record: WebArenaRecord) -> WebTask:
    """Return the task of a record. `|AND|` parts the start pages, `|OR|` alternatives."""
    return WebTask(
        task_id=str(record.task_id),
        prompt=record.intent,
        sites=tuple(record.sites),
        start_urls=tuple(record.start_url.split(AND_SEPARATOR)),
        checks=tuple(_make_check(kind, record.eval) for kind in record.eval.eval_types),
        template=record.intent_template_id,
        login=record.storage_state or "",
    )


def _make_check(kind: str, record: EvalRecord) -> Check:
    if kind == "url_match":
        return AddressCheck(tuple((record.reference_url or "").split(OR_SEPARATOR)))
    if kind == "program_html":
        return PageCheck(tuple(_page_content(page) for page in record.program_html))
    answers = record.reference_answers
    assert answers is not None  # EvalRecord checks it
    not_achievable = answers.fuzzy_match == NOT_ACHIEVABLE
    return AnswerCheck(
        exact=answers.exact_match,
        include=tuple(answers.must_include or ()),
        fuzzy=() if not_achievable else tuple(answers.fuzzy_match or ()),
        not_achievable=not_achievable,
        reason=record.string_note if not_achievable else "",
    )


def _page_content(record: PageRecord) -> PageContent:
    contents = record.required_contents
    return PageContent(
        url=record.url,
        locator=record.locator,
        prepare=tuple(record.prep_actions),
        exact=contents.exact_match,
        include=tuple(tuple(item.split(OR_SEPARATOR)) for item in contents.must_include or ()),
    )


def _with_known_sites(text: str) -> str:
    unknown = unknown_placeholders(text)
    if unknown:
        raise ValueError(f"{unknown[0]} is the placeholder of no site")
    return text
