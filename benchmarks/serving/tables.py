"""The results of `gateway.py` as Markdown."""

import statistics
from typing import Any, NamedTuple

from benchmarks.tables import median_range

TITLES = {
    "bare": "1. bare, one hop, passes shared as in the gateway",
    "bare_alone": "1a. bare, one hop, a pass per request",
    "bare_turns": "1b. as 1, two bundles by turns",
    "gateway": "2. gateway, one hop, two arms, exposures logged",
    "default": "3. Serve's defaults, two hops",
    "bare_two_hops": "4. bare, two hops",
    "bare_two_hops_turns": "4b. as 4, two bundles by turns, a deployment each",
    "gateway_two_hops": "5. gateway, `placement: deployment`",
}


class Goal(NamedTuple):
    """The requested rate, and the measured numbers."""

    text: str
    measured: str
    met: bool


def speed_goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals of speed; ratios are of measurements of the same pass."""
    goals = []
    for subject, reference, least, text in (
        ("gateway", "bare", 0.95, "2 makes at least 95 % of the requests/s of 1"),
        ("gateway", "bare_alone", 0.95, "2 makes at least 95 % of the requests/s of 1a"),
        ("gateway", "bare_turns", 0.95, "2 makes at least 95 % of the requests/s of 1b"),
        ("gateway", "default", 25.0, "2 makes at least 25 times the requests/s of 3"),
        ("gateway_two_hops", "bare_two_hops", 0.97, "5 makes at least 97 % of the requests/s of 4"),
        ("gateway_two_hops", "bare_two_hops_turns", 0.97, "5 makes at least 97 % of the requests/s of 4b"),
    ):
        if ratios := pair_ratios(rows, subject, reference, "rps"):
            goals.append(Goal(text, median_range(ratios, 3), statistics.median(ratios) >= least))
    if has_all(rows, "gateway", "bare"):
        added = [row["gateway"]["p50_ms"] - row["bare"]["p50_ms"] for row in rows]
        goals.append(
            Goal(
                "2 adds at most 0.1 ms to the median of 1 at one connection",
                f"{median_range(added, 3)} ms",
                statistics.median(added) <= 0.1,
            )
        )
    return goals


def has_all(rows: list[dict[str, Any]], *names: str) -> bool:
    return all(name in row for row in rows for name in names)


def pair_ratios(rows: list[dict[str, Any]], subject: str, reference: str, key: str) -> list[float]:
    """Return the ratio in every pass; nothing if one of the two was not measured."""
    return [row[subject][key] / row[reference][key] for row in rows] if has_all(rows, subject, reference) else []


def speed_table(part: dict[str, Any]) -> list[str]:
    rows = part["rows"]
    lines = [
        "## Requests",
        "",
        f"The gridworld's team, two agents a request; {part['acts_per_session']} requests a session; keep-alive.",
        f"{len(rows)} passes in turn of {part['seconds']} s each, median (least-most). Requests/s and loaded latency at",
        f"{part['connections']} connections, the last two columns at one. CPU is of all of an application's replicas.",
        "1, 2, 4 and 5 stand behind HAProxy with Serve's throughput mode, 3 behind its default proxy; 3 at the better of",
        f"{part['connections']} and {part['few_connections']} connections.",
        "",
        "| | requests/s | of 1 (of 4) | loaded median ms | loaded p99 ms | CPU us a request | median ms | p99 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        if not has_all(rows, name):
            continue
        peer = "bare_two_hops" if "two_hops" in name else "bare"
        ratio = median_range(ratios, 2) if name != peer and (ratios := pair_ratios(rows, name, peer, "rps")) else ""
        cells = [median_range([row[name][key] for row in rows], digits) for key, digits in COLUMNS.items()]
        lines.append(f"| {title} | {cells[0]} | {ratio} | {' | '.join(cells[1:])} |")
    return lines + goal_table(speed_goals(rows))


def epochs_table(part: dict[str, Any]) -> list[str]:
    rows = part["rows"]
    lines = [
        "## After the first epoch",
        "",
        f"One gateway in the first epoch of a ramp (stages {', '.join(map(str, part['stages']))}) and one in its third,",
        f"measured in turn, {part['seconds']} s each at {part['connections']} connections, one hop; median (least-most).",
        "Ratios are of measurements side by side.",
        "",
        "| acts a session | requests/s, epoch 1 | epoch 3 | CPU us a request, epoch 1 | epoch 3 | CPU, epoch 3 of 1 |",
        "|---|---|---|---|---|---|",
    ]
    goals = []
    for acts in dict.fromkeys(row["acts"] for row in rows):
        of_acts = [row for row in rows if row["acts"] == acts]
        cells = [
            median_range([row[name][key] for row in of_acts])
            for key in ("rps", "cpu_us")
            for name in ("first", "third")
        ]
        cost = [row["third"]["cpu_us"] / row["first"]["cpu_us"] for row in of_acts]
        lines.append(f"| {acts} | {' | '.join(cells)} | {median_range(cost, 2)} |")
        rate = [row["first"]["rps"] / row["third"]["rps"] for row in of_acts]
        text = f"{acts} acts a session: an act of epoch 3 takes at most 1.25 times one of epoch 1"
        goals.append(Goal(text, median_range(rate, 3), statistics.median(rate) <= 1.25))
    return lines + goal_table(goals)


COLUMNS = {"rps": 0, "loaded_p50_ms": 2, "loaded_p99_ms": 1, "cpu_us": 0, "p50_ms": 3, "p99_ms": 2}


def soak_table(part: dict[str, Any]) -> list[str]:
    growth = part["growth_mb"]
    full = part["full_mb"]
    return [
        "## Memory",
        "",
        f"{part['requests']:,} requests of {part['sessions']:,} sessions, one replica, {part['seconds']:,.0f} s.",
        f"It remembers {part['remembered']:,} sessions of an experiment at most;",
        f"their objects take {part['remembered_mb']:.0f} MB.",
        f"Until then its memory (RSS) grows from {part['start_mb']:.0f} to {full:.0f} MB:",
        "by the sessions and what stands beside them, and by what the allocator and SQLite hold.",
        *goal_table(
            [
                Goal(
                    "afterwards it grows by less than 1 %",
                    f"{growth:+.1f} MB over {part['requests_after']:,} requests, {growth / full:+.1%} (straight line)",
                    growth < 0.01 * full,
                )
            ]
        ),
    ]


def rollback_table(part: dict[str, Any]) -> list[str]:
    repeats = part["repeats"]
    late = [repeat["after_acknowledgement_s"] for repeat in repeats]
    lines = [
        "## Rollback",
        "",
        f"{len(repeats)} experiments, two replicas (shares of CPU {', '.join(f'{s:.0%}' for s in part['shares_of_cpu'])}),",
        f"{part['connections']} connections, {median_range([r['rps'] for r in repeats])} requests/s; `on_rollback: cut`;",
        f"{part['closed']} connections closed without an answer.",
        "The last request that the rolled-back arm answered was sent this long after",
        "",
        "| seconds | median | p99 | most |",
        "|---|---|---|---|",
    ]
    for title, key in (
        ("... the decision was acknowledged", "after_acknowledgement_s"),
        ("... the decision was sent", "after_decision_s"),
        ("(from sending to acknowledgement)", "acknowledged_s"),
    ):
        values = [repeat[key] for repeat in repeats]
        lines.append(f"| {title} | {statistics.median(values):.3f} | {p99(values):.3f} | {max(values):.3f} |")
    return lines + goal_table(
        [Goal("p99 from the acknowledgement is below 1 s", f"{p99(late):.3f} s", p99(late) < 1.0)]
    )


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def srm_table(part: dict[str, Any]) -> list[str]:
    rows = part["rows"]
    lines = [
        "## Sample ratios",
        "",
        f"{sum(rows[0]['counts'].values()):,} sessions assigned; p-values of the sequential test, looked at 100 times.",
        "",
        "| weights | counts | p at the end | smallest p | us per assignment |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        weights, counts = (" : ".join(f"{n:,}" for n in row[key].values()) for key in ("weights", "counts"))
        values = f"{row['p_value']:.3f} | {row['smallest_p_value']:.3f} | {row['us_per_key']:.2f}"
        lines.append(f"| {weights} | {counts} | {values} |")
    alarms = sum(row["alarm"] for row in rows)
    return lines + goal_table([Goal("no alarm (p <= 0.001) at any look", f"{alarms} alarms", not alarms)])


def goal_table(goals: list[Goal]) -> list[str]:
    if not goals:
        return [""]
    lines = ["", "| goal | found | |", "|---|---|---|"]
    return [
        *lines,
        *(f"| {goal.text} | {goal.measured} | {'met' if goal.met else '**not met**'} |" for goal in goals),
        "",
    ]


TABLES = {
    "speed": speed_table,
    "epochs": epochs_table,
    "soak": soak_table,
    "rollback": rollback_table,
    "srm": srm_table,
}


def markdown(result: dict[str, Any]) -> str:
    """Return all parts that were measured as Markdown."""
    lines = ["# Serving: what the gateway costs", ""]
    for name, table in TABLES.items():
        if name in result:
            part = result[name]
            described = ", ".join(f"{key} {value}" for key, value in part["machine"].items())
            lines += [*table(part), f"Machine: {described}; load before {part['load_before']:.2f}.", ""]
    return "\n".join([*lines, "`benchmarks/serving/gateway.py` writes this file.", ""])
