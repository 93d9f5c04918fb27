"""A web task: what an agent shall do, where it starts, and what is checked at the end."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from marl_ray.errors import MarlRayError, did_you_mean
from marl_ray.json_types import JsonMapping

SITES = ("shopping", "shopping_admin", "gitlab", "reddit", "wikipedia", "map", "homepage")
"""The sites of WebArena. A URL of a task begins with the placeholder of one, such as `__SHOPPING__`."""
NOT_ACHIEVABLE = "N/A"
"""The reference answer of a task that cannot be done."""
_PLACEHOLDER = re.compile(r"__[A-Z][A-Z_]*[A-Z]__")
T = TypeVar("T")


@dataclass(frozen=True)
class AnswerCheck:
    """The answer is compared with references: all of those that are given must match."""

    exact: str | None = None
    include: tuple[str, ...] = ()
    """Phrases, each of which the answer contains."""
    fuzzy: tuple[str, ...] = ()
    """Texts, each of which a judge must hold to say the same as the answer."""
    not_achievable: bool = False
    """True if the right answer is that the task cannot be done."""
    reason: str = ""
    """The reason why it cannot be done."""


@dataclass(frozen=True)
class AddressCheck:
    """The address of the last page is one of these."""

    references: tuple[str, ...]


@dataclass(frozen=True)
class PageContent:
    """A part of a page, and what it must say."""

    url: str
    """`last` for the page on which the episode ends, else an address, or `func:` with a program that returns one."""
    locator: str
    """JavaScript that selects the part, or `func:` with a program; empty for the whole page."""
    prepare: tuple[str, ...] = ()
    """JavaScript to run before."""
    exact: str | None = None
    include: tuple[tuple[str, ...], ...] = ()
    """Tuples of alternatives: one text of each is in the part."""


@dataclass(frozen=True)
class PageCheck:
    """All of these parts of pages say what they must."""

    contents: tuple[PageContent, ...]


@dataclass(frozen=True)
class ResponseCheck:
    """WebArena-Verified's check of an answer in JSON: `task_type`, `status` and `retrieved_data`."""

    task_type: str
    status: str
    data: Any
    """None, or a list; a list within it holds alternatives."""
    schema: JsonMapping
    """JSON schema of `data`, whose `format` says how values are compared."""
    ordered: bool = False


@dataclass(frozen=True)
class RequestCheck:
    """WebArena-Verified's check of the requests that the browser made."""

    urls: tuple[str, ...]
    """Alternatives."""
    method: str = "GET"
    status: int = 200
    query: JsonMapping | None = None
    posted: Mapping[str, object] | None = None
    other: JsonMapping | None = None
    """Further expectations: headers, cookies, contents of the response, schemas."""
    ignored_query: tuple[str, ...] = ()
    """Regular expressions of names of parameters."""
    ignored_posted: tuple[str, ...] = ()
    last_only: bool = True
    """True if only the last request to this address counts, else any."""
    absent: bool = False
    """True if no such request may have been made."""


Check = AnswerCheck | AddressCheck | PageCheck | ResponseCheck | RequestCheck


@dataclass(frozen=True)
class WebTask:
    """A task of a web agent, whose score is the product of its checks'."""

    task_id: str
    prompt: str
    """The intent: what the agent shall do."""
    sites: tuple[str, ...]
    start_urls: tuple[str, ...]
    """Addresses, opened in a tab each."""
    checks: tuple[Check, ...]
    template: int
    """Tasks of one template differ in words alone."""
    login: str = ""
    """The file with cookies of a logged-in user, as the task names it; empty if none is needed."""
    level: float = 0.0


def placeholder(site: str) -> str:
    """Return the text in a task that stands for the base URL of a site."""
    return f"__{site.upper()}__"


def is_pattern(value: object) -> bool:
    """Return True if an expected value is a regular expression, which WebArena-Verified writes from ^ to $."""
    return isinstance(value, str) and len(value) >= 2 and value.startswith("^") and value.endswith("$")


def unknown_placeholders(text: str) -> list[str]:
    """Return the placeholders in a text that belong to no site of `SITES`."""
    placeholders = {placeholder(site) for site in SITES}
    return [name for name in _PLACEHOLDER.findall(text) if name not in placeholders]


def with_site_urls(value: T, sites: Mapping[str, str]) -> T:
    """Return a task, or a part of one, with the base URLs of `sites` in place of all placeholders.

    Raises MarlRayError for a site that is unknown, and for a placeholder of a site without a base URL.
    """
    unknown = [site for site in sites if site not in SITES]
    if unknown:
        raise MarlRayError(f"sites: {unknown[0]!r} is unknown{did_you_mean(unknown[0], SITES)}")
    urls = {placeholder(site): url.rstrip("/") for site, url in sites.items()}
    replaced: T = _replace_placeholders(value, urls)
    return replaced


def _replace_placeholders(value: object, urls: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for name, url in urls.items():
            value = value.replace(name, url)
        unreplaced = [site for site in SITES if placeholder(site) in value]
        if unreplaced:
            raise MarlRayError(f"sites: expected the base URL of {unreplaced[0]}, which {value[:80]!r} needs")
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: _replace_placeholders(getattr(value, field.name), urls) for field in fields(value)}
        )
    if isinstance(value, tuple | list):
        return type(value)(_replace_placeholders(item, urls) for item in value)
    if isinstance(value, Mapping):
        return {key: _replace_placeholders(item, urls) for key, item in value.items()}
    return value
