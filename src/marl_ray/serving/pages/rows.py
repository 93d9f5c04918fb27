"""Rows for the templates: plain data in, texts, classes and coordinates out.

A missing value shows as a dash.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from marl_ray.experiments.lifecycle import ALLOWED_STATUSES, FINAL_STATUSES, Action
from marl_ray.json_types import JsonMapping, JsonObject, JsonValue
from marl_ray.serving.pages.charts import (
    display_step,
    evidence_share,
    round_to_step,
    scale_arm_intervals,
    utc_moment,
)

UNKNOWN_TEXT = "—"
_COLOURS = 6
"""Number of colours for treatments. The control has its own colour; a seventh treatment has the first colour with dashes."""
_ACTION_LABELS = {
    Action.START: "Start",
    Action.NEXT_STAGE: "Next stage",
    Action.PAUSE: "Pause",
    Action.RESUME: "Resume",
    Action.STOP: "Stop for good",
}
_BETTER_TEXTS = {"lower": "lower is better", "higher": "higher is better"}
_LINEAGE = ("run", "steps", "seed", "code_version", "config_hash")


def part_of(data: JsonMapping, key: str) -> JsonMapping:
    """Return the mapping under a key; an empty one where there is another value or none."""
    part = data.get(key)
    return part if isinstance(part, Mapping) else {}


def finite_or_none(value: JsonValue) -> float | None:
    """Return the value as a float; None where it is no finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _interval(value: object) -> tuple[float, float] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    low, high = finite_or_none(value[0]), finite_or_none(value[1])
    return None if low is None or high is None else (low, high)


def text_of(value: object) -> str:
    """Return the value as text; UNKNOWN_TEXT where there is none."""
    return UNKNOWN_TEXT if value is None or value == "" else str(value)


def _count_text(value: object) -> str:
    number = finite_or_none(value)
    return UNKNOWN_TEXT if number is None else f"{number:,.0f}"


def _percent_text(value: object) -> str:
    number = finite_or_none(value)
    return UNKNOWN_TEXT if number is None else f"{100 * number:.1f}\N{NARROW NO-BREAK SPACE}%"


def _share_text(value: object) -> str:
    """Return a percentage in a label, with as few digits as it has."""
    number = finite_or_none(value)
    return UNKNOWN_TEXT if number is None else f"{100 * number:.3g}\N{NARROW NO-BREAK SPACE}%"


def _number_text(value: object, step: float | None = None, sign: bool = False) -> str:
    number = finite_or_none(value)
    return (
        UNKNOWN_TEXT
        if number is None
        else round_to_step(number, display_step([number]) if step is None else step, sign)
    )


def _interval_text(interval: tuple[float, float] | None, step: float, sign: bool = False) -> str:
    return (
        ""
        if interval is None
        else f"{round_to_step(interval[0], step, sign)} to {round_to_step(interval[1], step, sign)}"
    )


def time_of(value: object) -> str:
    """Return a time in seconds since 1970 as a date and time in UTC; UNKNOWN_TEXT where it is none."""
    at = utc_moment(finite_or_none(value))
    return UNKNOWN_TEXT if at is None else f"{at:%Y-%m-%dT%H:%M:%SZ}"


def control_of(report: JsonMapping) -> str | None:
    """Return the arm that the others are compared with.

    The arm is the one that the report names, or else its first; None if it has no arm.
    """
    arms = part_of(report, "arms")
    control = report.get("control")
    return control if control in arms else next(iter(arms), None)


def colours_of(arms: Sequence[str], control: str | None) -> dict[str, str]:
    """Return arm -> the classes of its colour."""
    treatments = [arm for arm in dict.fromkeys(arms) if arm != control]
    colours = {arm: f"c{k % _COLOURS + 1}{' dashed' if k >= _COLOURS else ''}" for k, arm in enumerate(treatments)}
    return colours | ({control: "c0"} if control is not None else {})


def index_row(row: JsonMapping) -> JsonObject:
    """Return the row of one experiment in the list of all, with the share of traffic of each arm."""
    arms = part_of(row, "arms")
    colours = colours_of(list(arms), control_of(row))
    stages = row.get("stages")
    stage = finite_or_none(row.get("stage"))
    stage_count = len(stages) if isinstance(stages, list | tuple) else None
    return {
        "name": row["name"],
        "endpoint": text_of(row.get("endpoint")),
        "status": row.get("status"),
        "stage": UNKNOWN_TEXT
        if stage is None or stage_count == 1
        else f"{stage + 1:.0f}{f' of {stage_count}' if stage_count else ''}",
        "epoch": _count_text(row.get("epoch")),
        "shares": [
            {
                "arm": arm,
                "colour": colours[arm],
                "share": _share_text(share),
                "width": round(100 * (finite_or_none(share) or 0), 2),
            }
            for arm, share in arms.items()
        ],
    }


def _stages(report: JsonMapping) -> list[str]:
    """Return the labels of the steps between draft and the end."""
    stages = report.get("stages") or part_of(report, "config").get("stages")
    strategy = report.get("strategy")
    if strategy not in (None, "gradual") or not isinstance(stages, list | tuple) or len(stages) < 2:
        return ["shadowing" if strategy == "shadow" else "running"]
    return [_share_text(share) for share in stages]


def steps_of(report: JsonMapping) -> list[tuple[str, str]]:
    """Return (label, class) of the stations.

    A class is `done`, `here`, `ahead`, or `skipped` where the end came before.
    """
    status = report["status"]
    stages = _stages(report)
    labels = ["draft", *stages, status if status in FINAL_STATUSES else "promoted"]
    stage = min(int(finite_or_none(report.get("stage")) or 0), len(stages) - 1)
    reached = 0 if status == "draft" else 1 + stage
    position = len(labels) - 1 if status in FINAL_STATUSES else reached
    later = "skipped" if status in FINAL_STATUSES else "ahead"
    marks = ["done" if k <= reached else later for k in range(len(labels))]
    marks[position] = f"here {status}"
    return list(zip(labels, marks, strict=True))


def decision_of(report: JsonMapping) -> JsonObject | None:
    """Return the step, the arm and the reason of the last decision; None where nothing was decided."""
    decision = part_of(report, "decision")
    return (
        {"step": text_of(decision.get("step")), "arm": decision.get("arm"), "reason": text_of(decision.get("reason"))}
        if decision
        else None
    )


def arm_rows(report: JsonMapping, colours: Mapping[str, str]) -> list[JsonObject]:
    """Return the row of each arm, with its units, its mean, and its difference from the control."""
    arms = {name: arm if isinstance(arm, Mapping) else {} for name, arm in part_of(report, "arms").items()}
    of_means = []
    of_gaps = []
    gaps = {}
    for name, arm in arms.items():
        mean = finite_or_none(arm.get("mean"))
        gap = finite_or_none(arm.get("difference"))
        around = _interval(arm.get("interval"))
        of_means += [value for value in (mean, *(around or ())) if value is not None]
        between = _interval(arm.get("difference_interval"))
        of_gaps += [value for value in (gap, *(between or ())) if value is not None]
        if between is not None and gap is not None:
            gaps[name] = (between[0], gap, between[1])
    step = display_step(of_means)
    gap_step = display_step(of_gaps)
    scale = scale_arm_intervals(gaps, margin_of(report) or 0.0)
    return [
        {
            "name": name,
            "colour": colours[name],
            "is_control": name == control_of(report),
            "rolled_back": bool(arm.get("rolled_back")),
            "is_winner": name == report.get("winner"),
            "traffic": _percent_text(arm.get("propensity")),
            "exposures": _count_text(arm.get("exposures")),
            "in_window": _count_text(arm.get("in_window")),
            "judged": _count_text(arm.get("judged")),
            "outcomes": _count_text(arm.get("outcomes")),
            "mean": _number_text(arm.get("mean"), step),
            "interval": _interval_text(_interval(arm.get("interval")), step),
            "difference": _number_text(arm.get("difference"), gap_step, sign=True),
            "difference_interval": _interval_text(_interval(arm.get("difference_interval")), gap_step, sign=True),
            "span": scale.get(name),
            "verdict": arm.get("verdict"),
            "bundle": text_of(arm.get("bundle")),
            "digest": text_of(arm.get("digest")),
            "lineage": [(key, text_of(value)) for key, value in part_of(arm, "lineage").items() if key in _LINEAGE],
        }
        for name, arm in arms.items()
    ]


def margin_of(report: JsonMapping) -> float | None:
    """Return the accepted loss in units of the outcome; None if the report has none.

    For a relative margin it is the value that the tests use.
    """
    tests = (part_of(part_of(part_of(report, "arms"), arm), "harm") for arm in part_of(report, "arms"))
    margins = (finite_or_none(test.get("margin")) for test in tests)
    first_margin = next((margin for margin in margins if margin is not None), None)
    return finite_or_none(part_of(report, "config").get("margin")) if first_margin is None else first_margin


def warnings_of(report: JsonMapping) -> list[str]:
    """Return the warnings of the report as texts."""
    return [text_of(line) for line in report.get("warnings") or ()]


def harm_rows(report: JsonMapping, colours: Mapping[str, str]) -> list[JsonObject]:
    """Return the tests that can roll an arm back, arm by arm: the outcome's first, then those of the guardrails."""
    rails = [rail for rail in report.get("guardrails") or () if isinstance(rail, Mapping)]
    tests = _outcome_tests(report, "harm", "alpha_rollback") + rails
    order = list(part_of(report, "arms"))
    tests.sort(key=lambda test: order.index(test["arm"]) if test.get("arm") in order else len(order))
    return [_test_row(test, "<", colours) for test in tests]


def promotion_rows(report: JsonMapping, colours: Mapping[str, str]) -> list[JsonObject]:
    """Return the tests that can promote an arm."""
    return [_test_row(test, ">", colours) for test in _outcome_tests(report, "promotion", "alpha")]


def _outcome_tests(report: JsonMapping, key: str, level: str) -> list[JsonMapping]:
    """Return the outcome's tests, one per treatment, in the form of a guardrail."""
    arms = part_of(report, "arms")
    config = part_of(report, "config")
    control = part_of(arms, str(control_of(report)))
    tests: list[JsonMapping] = []
    for name in arms:
        arm = part_of(arms, name)
        part = part_of(arm, key)
        if part:
            means = {"mean": arm.get("mean"), "control_mean": control.get("mean")}
            counts = {"n": _observation_count(arm), "control_n": _observation_count(control)}
            accepted = {"margin": config.get("margin"), "alpha": config.get(level)}
            tests.append({"name": "outcome", "better": "higher", "arm": name} | means | counts | accepted | dict(part))
    return tests


def _observation_count(arm: JsonMapping) -> Any:
    """Return the count that the tests use, of clusters or blocks where these are assigned, else of outcomes."""
    return arm.get("observations", arm.get("outcomes"))


def _test_row(test: JsonMapping, wants: str, colours: Mapping[str, str]) -> JsonObject:
    """Return the row of one test; `wants` is the side of -margin on which its bound is a proof."""
    e_value, alpha, margin = (finite_or_none(test.get(key)) for key in ("e_value", "alpha", "margin"))
    level = alpha if alpha is not None and 0 < alpha < 1 else None
    means = [mean for key in ("mean", "control_mean") if (mean := finite_or_none(test.get(key))) is not None]
    step = display_step(means)
    return {
        "metric": text_of(test.get("name")),
        "better": _BETTER_TEXTS.get(str(test.get("better")), ""),
        "arm": text_of(test.get("arm")),
        "colour": colours.get(str(test.get("arm")), "c0"),
        "mean": _number_text(test.get("mean"), step),
        "control_mean": _number_text(test.get("control_mean"), step),
        "n": _count_text(test.get("n")),
        "control_n": _count_text(test.get("control_n")),
        "gain": _number_text(test.get("gain"), step, sign=True),
        "bound": _number_text(test.get("bound"), step, sign=True),
        "needs": "" if margin is None else f"{wants} {0 - margin:g}".replace("-", "\N{MINUS SIGN}"),
        "e_value": _e_value_text(e_value),
        "needed": UNKNOWN_TEXT if level is None else f"{1 / level:.3g}",
        "width": 0 if level is None or e_value is None else round(100 * evidence_share(e_value, level), 1),
        "proven": bool(test.get("proven")),
    }


def _e_value_text(value: float | None) -> str:
    if value is None:
        return UNKNOWN_TEXT
    return f"{value:.2f}" if value < 1000 else "> 1,000"


def split_of(report: JsonMapping) -> JsonObject | None:
    """Return the test of the split between arms as the page shows it; None if the report has none."""
    ratio = part_of(report, "srm")
    p_value = finite_or_none(ratio.get("p_value"))
    p_value_text = UNKNOWN_TEXT
    if p_value is not None:
        p_value_text = f"{p_value:.3f}" if p_value >= 0.001 else "< 0.001"
    return {"p_value": p_value_text, "alarm": bool(ratio.get("alarm"))} if ratio else None


def shadow_rows(report: JsonMapping, colours: Mapping[str, str]) -> list[JsonObject]:
    """Return one row for each shadowed arm of the report, with numbers as text and its colour (arm -> CSS class)."""
    rows = []
    for arm in part_of(report, "shadow"):
        totals = part_of(report["shadow"], arm)
        acts = finite_or_none(totals.get("acts"))
        seconds = finite_or_none(totals.get("seconds"))
        decisions = finite_or_none(totals.get("decisions"))
        agreed = finite_or_none(totals.get("agreed"))
        rows.append(
            {
                "arm": arm,
                "colour": colours.get(arm, "c0"),
                **{key: _count_text(totals.get(key)) for key in ("acts", "errors", "dropped", "decisions")},
                "agreed": _percent_text(agreed / decisions) if decisions and agreed is not None else UNKNOWN_TEXT,
                "nats_per_token": _per_token(totals),
                "pass": f"{1000 * seconds / acts:,.1f} ms" if acts and seconds is not None else UNKNOWN_TEXT,
            }
        )
    return rows


def _per_token(totals: JsonMapping) -> str | None:
    """Return the mean log-probability per served token in nats.

    The mean is the shadow's, beside the one that the text was served with; None where there were no texts.
    """
    tokens, log_prob, served = (finite_or_none(totals.get(key)) for key in ("tokens", "log_prob", "served_log_prob"))
    return (
        f"{log_prob / tokens:.2f} (served {served / tokens:.2f})"
        if tokens and log_prob is not None and served is not None
        else None
    )


def change_row(entry: JsonMapping) -> JsonObject:
    """Return one row of the audit; the status before and after is None where it did not change."""
    before, after = part_of(entry, "before").get("status"), part_of(entry, "after").get("status")
    return {
        "at": time_of(entry.get("at")),
        "action": text_of(entry.get("action")),
        "arm": entry.get("arm"),
        "before": before if before != after else None,
        "after": after if before != after else None,
        "actor": text_of(entry.get("actor")),
        "reason": text_of(entry.get("reason")),
        "epoch": _count_text(entry.get("epoch")),
    }


def actions_of(report: JsonMapping) -> JsonObject:
    """Return the possible actions: for each treatment, and for the experiment as (action, label)."""
    allowed = {action for action in Action if report["status"] in ALLOWED_STATUSES[action]}
    stage = int(finite_or_none(report.get("stage")) or 0)
    stages = _stages(report)
    if stage + 1 >= len(stages):
        allowed.discard(Action.NEXT_STAGE)
    labels = _ACTION_LABELS | {Action.NEXT_STAGE: f"Next stage: {stages[min(stage + 1, len(stages) - 1)]}"}
    arms = part_of(report, "arms")
    remaining = [arm for arm in arms if arm != control_of(report) and not part_of(arms, arm).get("rolled_back")]
    return {
        "arms": [{"name": arm, "can_promote": Action.PROMOTE in allowed} for arm in remaining],
        "experiment": [(action.value, label) for action, label in labels.items() if action in allowed],
    }
