"""The page for people: experiments as HTML, from plain data.

The page has no script and no cookie, and loads nothing from elsewhere. Every change carries the admin key in its form, so
a foreign page cannot make changes in a user's name. A page with a form never reloads by itself; the live page does, and
has no form.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from marl_ray.serving.http.messages import RequestError
from marl_ray.serving.pages import openapi_rows, rows
from marl_ray.serving.pages.charts import draw_time_chart

HTML = b"text/html; charset=utf-8"
CSS = b"text/css; charset=utf-8"
_SECURITY_POLICY = (
    b"default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = (
    (b"content-security-policy", _SECURITY_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
"""The headers of every page."""

FORM_FIELDS = {"key": 512, "reason": 1000, "arm": 100, "epoch": 12}
"""Fields of a form and their greatest lengths in characters."""
LIVE_S = 5
"""Seconds after which a live page and the list reload."""
PAGES = Path(__file__).parent


def index_page(experiments: Sequence[Mapping[str, object]], base: str) -> bytes:
    """Return the list of experiments; it reloads by itself.

    A row has `name` and, as far as known, `endpoint`, `status`, `stage` (from 0), `stages` (shares), `epoch`, `control`
    and `arms` (arm -> share of the units). `base` is the prefix that the application is mounted at.
    """
    return _render("index.html", base=base, refresh=LIVE_S, rows=[rows.index_row(row) for row in experiments])


def experiment_page(
    report: Mapping[str, object],
    curves: Mapping[str, Sequence[Sequence[float | None]]],
    audit: Sequence[Mapping[str, object]],
    base: str,
    message: str | None = None,
    *,
    form: Mapping[str, str] | None = None,
    live: bool = False,
    at: float | None = None,
) -> bytes:
    """Return one experiment: where it stands, what is known, and forms for what may be done.

    `report` is the JSON of `GET /v1/experiments/{name}`; all of it but name, status and arms may be missing or null.
    `curves` are rows (seconds since 1970, n, mean, low or None, high or None) per arm. `audit` may have any order.
    `message` says why the last request was refused, and `form` is its form, so that the reason need not be written
    again. `live` reloads every few seconds and has no forms. `at` is when the report was made, in seconds since 1970.
    """
    colours = rows.colours_of([*rows.part_of(report, "arms"), *curves], rows.control_of(report))
    changes = sorted(
        audit, key=lambda entry: (rows.finite_or_none(entry.get("at")) or 0, entry.get("id") or 0), reverse=True
    )
    arms = rows.arm_rows(report, colours)
    # The window's width selects the chart, because text must not shrink with it.
    sizes = (("wide", 1180 if live else 820, 380), ("narrow", 360, 280))
    return _render(
        "experiment.html",
        base=base,
        refresh=LIVE_S if live else None,
        live=live,
        message=message,
        reason=(form or {}).get("reason", ""),
        limits=FORM_FIELDS,
        at=rows.time_of(at),
        name=report["name"],
        status=report["status"],
        facts=[(label, rows.text_of(report.get(key))) for label, key in _FACT_ROWS]
        + [("Created", rows.time_of(report.get("created")))],
        epoch=report.get("epoch"),
        steps=rows.steps_of(report),
        decision=rows.decision_of(report),
        arms=arms,
        lines=[arm for arm in arms if arm["name"] in curves],
        charts=[(size, draw_time_chart(curves, width, height)) for size, width, height in sizes],
        colours=colours,
        margin=rows.margin_of(report),
        warnings=rows.warnings_of(report),
        rollback=rows.harm_rows(report, colours),
        promotion=rows.promotion_rows(report, colours),
        split=rows.split_of(report),
        shadow=rows.shadow_rows(report, colours),
        changes=[rows.change_row(entry) for entry in changes],
        actions=rows.actions_of(report),
    )


def docs_page(document: bytes, base: str) -> bytes:
    """Return the OpenAPI document (JSON), for people to read."""
    parsed = orjson.loads(document)
    info = parsed["info"]
    return _render(
        "docs.html",
        base=base,
        refresh=None,
        title=info["title"],
        version=info["version"],
        text=info["description"],
        operations=openapi_rows.operations(parsed),
        models=openapi_rows.models(parsed),
    )


def parse_form(body: bytes) -> dict[str, str]:
    """Return the fields of a posted form, of `FORM_FIELDS` only and each once.

    Raises RequestError 400 naming the field otherwise.
    """
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(body),
            errors="strict",
            max_num_fields=len(FORM_FIELDS),
        )
    except ValueError:
        raise RequestError(400, "body", f"expected a form with the fields {', '.join(FORM_FIELDS)}") from None
    form: dict[str, str] = {}
    for field, value in pairs:
        if field not in FORM_FIELDS:
            raise RequestError(400, field[:100], f"unknown field, expected {', '.join(FORM_FIELDS)}")
        if field in form:
            raise RequestError(400, field, "expected this field once")
        if len(value) > FORM_FIELDS[field]:
            raise RequestError(400, field, f"expected at most {FORM_FIELDS[field]} characters")
        form[field] = value
    if "epoch" in form and not (form["epoch"].isascii() and form["epoch"].isdigit()):
        raise RequestError(400, "epoch", "expected the epoch that the change was decided on")
    return form


_FACT_ROWS = (("Endpoint", "endpoint"), ("Strategy", "strategy"), ("Assigned by", "randomize"), ("Epoch", "epoch"))


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(PAGES)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["segment"] = lambda name: quote(str(name), safe="")
    environment.filters["label"] = _label
    environment.filters["sentence"] = lambda text: _label(text)[:1].upper() + _label(text)[1:]
    return environment


def _label(text: object) -> str:
    return str(text).replace("_", " ")


def _render(template: str, **values: Any) -> bytes:
    # A database may hold a lone surrogate, which UTF-8 cannot encode.
    return _environment().get_template(template).render(values).encode("utf-8", "replace")
