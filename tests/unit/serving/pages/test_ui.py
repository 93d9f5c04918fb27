"""The page for people, as text: what it shows, what it escapes, and what a form may say."""

import copy
import math
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.drawing import read_stylesheet
from marl_ray.experiments.lifecycle import ALLOWED_STATUSES, Action, ExperimentStatus
from marl_ray.serving.http.messages import RequestError
from marl_ray.serving.pages.render import FORM_FIELDS, HEADERS, experiment_page, index_page, parse_form

NOON = 1_795_262_400.0  # 2026-11-21T12:00:00Z
VOID = {"meta", "link", "input", "br", "img", "hr"}
TEST = {"gain": -0.01, "bound": 0.02, "e_value": 3.2, "proven": False}
ARM = {"propensity": 0.25, "exposures": 1200, "outcomes": 1100, "mean": 0.52, "interval": [0.5, 0.54]}
REPORT: dict[str, Any] = {
    "name": "grid",
    "endpoint": "grid-world",
    "status": "running",
    "strategy": "gradual",
    "stages": [0.01, 0.25, 1.0],
    "stage": 1,
    "epoch": 3,
    "randomize": "session",
    "created": NOON,
    "control": "old",
    "config": {"alpha": 0.05, "alpha_rollback": 0.05, "margin": 0.02},
    "decision": {"step": "hold", "reason": "40 of 100 exposures in this stage"},
    "srm": {"p_value": 0.42, "alarm": False},
    "arms": {
        "old": ARM | {"rolled_back": False},
        "new": ARM
        | {"difference": -0.01, "difference_interval": [-0.05, 0.03], "verdict": "undecided", "rolled_back": False}
        | {"harm": TEST, "promotion": TEST | {"e_value": 1e30, "proven": True}},
    },
    "guardrails": [
        {"name": "cost", "arm": "new", "better": "lower", "margin": 0.1, "alpha": 0.05, "n": 1100, "control_n": 1090}
        | {"mean": 1.4, "control_mean": 1.3}
        | TEST
    ],
    "shadow": {"new": {"acts": 10, "errors": 1, "dropped": 0, "decisions": 20, "agreed": 15, "seconds": 0.05}},
}
CURVES = {
    "old": [[NOON + 60 * k, k, 0.5, 0.4 if k > 3 else None, 0.6 if k > 3 else None] for k in range(1, 200)],
    "new": [[NOON + 60 * k, k, 0.52, 0.45, 0.58] for k in range(1, 200)],
}
AUDIT = [
    {"id": 1, "at": NOON, "actor": "config", "action": "open", "arm": None, "reason": "opened", "epoch": 1}
    | {"before": None, "after": {"status": "running"}},
    {"id": 2, "at": NOON + 90, "actor": "ada", "action": "pause", "arm": None, "reason": "lunch", "epoch": 2}
    | {"before": {"status": "running"}, "after": {"status": "paused"}},
]


class Page(HTMLParser):
    """A page taken apart; every tag must be closed in its turn."""

    def __init__(self, body: bytes):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(body.decode())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in <{tag}>"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).replace("\N{NARROW NO-BREAK SPACE}", " ").split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page(
    report: dict[str, Any] | None = None, curves=CURVES, audit=AUDIT, base="/ab", *more: Any, **named: Any
) -> Page:
    return Page(experiment_page(REPORT if report is None else report, curves, audit, base, *more, **named))


def test_the_page_shows_arms_tests_shadow_and_the_next_step():
    text = page().text
    for part in (
        "grid-world",
        "25.0 %",
        "1,200",
        "0.5200",
        "0.5000 to 0.5400",
        "\N{MINUS SIGN}0.0100",
        "40 of 100 exposures",
    ):
        assert part in text
    for part in (
        "cost",
        "lower is better",
        "3.20 of 20",
        "proof at < \N{MINUS SIGN}0.1",
        "> 1,000 of 20",
        "proven",
        "75.0 %",
        "5.0 ms",
    ):
        assert part in text
    assert "p 0.420, agrees with the weights" in text


def test_the_arms_and_where_their_weights_come_from_are_sections():
    words = page().text.split()
    assert "Arms" in words and "Bundles" in words


def test_the_audit_log_has_the_newest_change_first_in_utc():
    for audit in (AUDIT, AUDIT[::-1]):
        text = page(audit=audit).text
        log = text[text.index("Audit log") :]
        assert log.index("2026-11-21T12:01:30Z") < log.index("2026-11-21T12:00:00Z")
        assert "running → paused" in log
        assert "Last change Pause by ada · lunch" in text


def test_each_arm_has_a_line_and_a_band_in_both_charts():
    shown = page()
    assert [svg["aria-label"] for svg in shown.all("svg") if "chart" in (svg.get("class") or "")] == [
        "Mean outcome of each arm over time, with confidence bands"
    ] * 2
    assert sorted(str(path["class"]) for path in shown.all("path")) == sorted(
        2 * ["band c0", "band c1", "line c0", "line c1"]
    )


@pytest.mark.parametrize("status", list(ExperimentStatus))
def test_the_forms_offer_what_the_state_allows(status):
    report = REPORT | {"status": status.value}
    offered = {str(b["formaction"]).rpartition("/")[2] for b in page(report).all("button") if "formaction" in b}
    assert offered == {action.value for action in Action if status in ALLOWED_STATUSES[action]}
    assert all(str(b["formaction"]).startswith("/ab/ui/experiments/grid/") for b in page(report).all("button")[1:])


def test_the_last_stage_has_no_next_one_and_other_strategies_have_no_stages():
    for report in (REPORT | {"stage": 2}, REPORT | {"strategy": "ab"}, REPORT | {"stages": None}):
        assert not any("next_stage" in str(button.get("formaction")) for button in page(report).all("button"))


def test_rolled_back_arms_and_the_control_can_be_neither_promoted_nor_rolled_back():
    report = copy.deepcopy(REPORT)
    report["arms"]["newer"] = ARM | {"rolled_back": True}
    assert {button["value"] for button in page(report).all("button") if button.get("name") == "arm"} == {"new"}


def test_the_return_key_presses_no_action():
    first = page().all("button")[0]
    assert "disabled" in first
    assert "formaction" not in first


def test_a_form_carries_the_key_the_reason_and_the_epoch():
    inputs = {field["name"]: field for field in page().all("input")}
    assert (inputs["key"]["type"], inputs["key"]["autocomplete"]) == ("password", "current-password")
    assert inputs["epoch"]["value"] == "3"
    assert "value" not in inputs["key"]
    assert page().all("textarea")[0]["maxlength"] == str(FORM_FIELDS["reason"])


def test_steps_tell_where_the_experiment_stands():
    def marks(**more: Any) -> list[str]:
        items = [item for item in page(REPORT | more).all("li") if item.get("class")]
        return [str(item["class"]) for item in items]

    assert marks(status="draft", stage=0) == ["here draft", "ahead", "ahead", "ahead", "ahead"]
    assert marks() == ["done", "done", "here running", "ahead", "ahead"]
    assert marks(status="paused") == ["done", "done", "here paused", "ahead", "ahead"]
    assert marks(status="rolled_back") == ["done", "done", "done", "skipped", "here rolled_back"]
    assert marks(status="promoted", stage=2) == ["done", "done", "done", "done", "here promoted"]
    assert marks(status="stopped", strategy="ab", stage=0) == ["done", "done", "here stopped"]


def test_a_sample_ratio_mismatch_is_said_first():
    text = page(REPORT | {"srm": {"p_value": 1e-9, "alarm": True}}).text
    assert "Sample ratio mismatch (p < 0.001" in text
    assert text.index("Sample ratio mismatch") < text.index("Mean outcome")


def test_a_live_page_reloads_and_has_no_form_and_any_other_keeps_what_is_typed():
    live, still = page(live=True), page()
    assert [meta.get("content") for meta in live.all("meta") if meta.get("http-equiv") == "refresh"] == ["5"]
    assert live.all("form") == []
    assert not any(meta.get("http-equiv") for meta in still.all("meta"))
    assert len(still.all("form")) == 1


def test_a_refusal_shows_its_message_and_keeps_the_reason_but_not_the_key():
    body = experiment_page(REPORT, {}, [], "", "key: unknown", form={"reason": "too slow", "key": "secret"})
    assert "key: unknown" in Page(body).text
    assert b">too slow</textarea>" in body
    assert b"secret" not in body


HOSTILE = "\"'><script>alert(1)</script><b x=&amp;{{ 7 * 7 }}"


def test_hostile_texts_stay_texts():
    report = copy.deepcopy(REPORT)
    report |= {"name": HOSTILE, "endpoint": HOSTILE, "decision": {"step": HOSTILE, "reason": HOSTILE}}
    report["arms"] = {HOSTILE: report["arms"]["old"], HOSTILE + "2": report["arms"]["new"] | {"verdict": HOSTILE}}
    report["arms"][HOSTILE] |= {"bundle": HOSTILE, "digest": HOSTILE, "lineage": {"run": HOSTILE}}
    report["guardrails"][0] |= {"name": HOSTILE, "arm": HOSTILE}
    report |= {"control": None, "shadow": {HOSTILE: {}}}
    audit = [{"actor": HOSTILE, "action": HOSTILE, "arm": HOSTILE, "reason": HOSTILE, "after": {"status": HOSTILE}}]
    curves = {HOSTILE: CURVES["old"]}
    for hostile in (
        page(report, curves, audit, "", HOSTILE, form={"reason": HOSTILE}),
        Page(index_page([{"name": HOSTILE, "endpoint": HOSTILE, "status": HOSTILE, "arms": {HOSTILE: 1.0}}], "")),
    ):
        assert hostile.all("script") == []
        assert not any("x" in attributes for attributes in hostile.all("b"))
        assert HOSTILE in "".join(hostile.texts)
        assert "49" not in hostile.text.split()
        targets = [str(tag.get("formaction") or tag.get("href")) for _, tag in hostile.tags if "formaction" in tag]
        assert not any('"' in target or "<" in target or "'" in target for target in targets)


def test_nothing_comes_from_elsewhere_and_nothing_runs():
    for body in (experiment_page(REPORT, CURVES, AUDIT, "/ab"), index_page([REPORT], "/ab"), read_stylesheet()):
        for word in (b"http://", b"https://", b"//", b"@import", b"javascript:", b"<script", b" style=", b" onclick"):
            assert word not in body
    for name in ("href", "src", "action", "formaction"):
        links = [str(attributes[name]) for _, attributes in page().tags if name in attributes]
        assert all(link.startswith("/ab/ui") or link == "data:," for link in links)
    policy = dict(HEADERS)[b"content-security-policy"]
    assert b"default-src 'none'" in policy
    assert b"unsafe" not in policy
    assert b"script-src" not in policy


@pytest.mark.parametrize("status", list(ExperimentStatus))
def test_an_experiment_of_which_nothing_is_known_is_a_page_of_dashes(status):
    text = page({"name": "x", "status": status.value, "arms": {"a": {}, "b": None}}, {}, [], "").text
    assert "No outcomes yet." in text
    assert "No changes yet." in text
    assert "—" in text
    page({"name": "x", "status": status.value, "arms": {}}, {"a": []}, [], "")


def paths(data: Any, at: tuple = ()) -> list[tuple]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path for key, value in items for path in ((*at, key), *paths(value, (*at, key)))]


REMOVABLE = [path for path in paths(REPORT) if path not in {("name",), ("status",), ("arms",)}]
ODD = st.sampled_from([None, 0, 1e100, -1e100, 1e-320, math.nan, math.inf])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(REMOVABLE), st.booleans(), ODD), max_size=12))
def test_whatever_is_missing_null_or_out_of_range_the_page_stands(changes):
    report = copy.deepcopy(REPORT)
    for path, remove, odd in changes:
        place: Any = report
        for key in path[:-1]:
            held = (isinstance(place, dict) and key in place) or isinstance(place, list)
            place = place[key] if held else None
        if isinstance(place, dict) and path[-1] in place:
            if remove:
                del place[path[-1]]
            else:
                place[path[-1]] = odd if isinstance(place[path[-1]], float) else None
    assert report["name"] in page(report).text


def test_the_list_links_to_every_experiment_with_its_shares():
    rows = [{"name": "a b/c", "status": "running", "stage": 1, "stages": [0.1, 1], "epoch": 4, "control": "x"}]
    rows[0]["arms"] = {"x": 0.9, "y": 0.1}
    listing = Page(index_page([*rows, {"name": "bare"}], "/ab"))
    assert [link["href"] for link in listing.all("a")] == ["/ab/ui/experiments/a%20b%2Fc", "/ab/ui/experiments/bare"]
    assert "2 of 2" in listing.text
    assert "x 90 %" in listing.text
    assert [rect["width"] for rect in listing.all("rect") if "fill" in str(rect["class"])] == ["90.0", "10.0"]
    assert "No experiments yet." in Page(index_page([], "")).text


def test_a_form_is_read_as_it_was_written():
    sent = {"key": "sécret & more", "reason": "cost = 2 ½ before; ünd", "arm": "new", "epoch": "3"}
    assert parse_form(urlencode(sent).encode()) == sent
    assert parse_form(b"") == {}
    assert parse_form(b"arm=&key=k") == {"arm": "", "key": "k"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"weight=1", "weight"),
        (b"key=a&key=b", "key"),
        (b"key=" + b"a" * 513, "key"),
        (b"reason=" + b"%41" * 1001, "reason"),
        (b"arm=" + b"a" * 101, "arm"),
        (b"epoch=1.5", "epoch"),
        (b"epoch=-1", "epoch"),
        (b"epoch=", "epoch"),
        ("epoch=\u0663".encode(), "body"),
        (b"epoch=%D9%A3", "epoch"),
        (b"key=%FF", "body"),
        (b"key", "body"),
        (b"\xff", "body"),
        (b"key=a&" * 100, "body"),
        (b'{"key": "a"}', "body"),
    ],
)
def test_a_form_that_the_page_did_not_make_is_refused_by_field(body, field):
    with pytest.raises(RequestError) as caught:
        parse_form(body)
    assert (caught.value.status, caught.value.field) == (400, field)
