"""The report of a sweep: one self-contained HTML file, made from the sweep's folder.

The page has no script and loads nothing. It can be made at any time, also while the sweep runs or when its
driver is dead.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from marl_ray import __version__
from marl_ray.config import parse_config
from marl_ray.config.sweep import MetricConfig, SweepConfig
from marl_ray.drawing import read_stylesheet
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.statistics import BootstrapInterval
from marl_ray.json_types import JsonObject
from marl_ray.stored_files.folder_kinds import SWEEP_FILE
from marl_ray.tuning.folder import Folder, read_rows
from marl_ray.tuning.records import (
    FAILED_STATUSES,
    REPORT_FILE,
    SweepRecords,
    TrialRecord,
    end_reason,
    ranked_trials,
    signed_objectives,
    values_line,
)
from marl_ray.tuning.reporting.compare import (
    MIN_TRIALS,
    Curve,
    curve_of,
    differ_by_rank_sum,
    end_of,
    importances,
    improvement,
    winner_certainty,
)
from marl_ray.tuning.reporting.costs import budgets_of, cost_cells, seed_summary, share_cells
from marl_ray.tuning.reporting.figures import (
    COLOURED_CURVES,
    draw_curve_chart,
    draw_parallel_axes,
    format_number,
    scale_trial_intervals,
    strokes,
)

WINNER_FILE = "winner.yaml"
"""File in a sweep's folder with the run config of the winner's registered seed."""
COMPARED_TRIALS = 10
"""Number of the best trials that are compared with each other."""
AllRows = Mapping[int, Sequence[Mapping[str, float]]]
"""Trial -> its rows."""
PAGES = Path(__file__).with_name("pages")
"""Folder of the page's template and its style sheet."""
_SIZES = (("wide", 1180.0, 420.0), ("narrow", 360.0, 300.0))
"""Two sizes of each chart; the window's width decides which one shows, because text must not shrink with the chart."""


def write_report(folder: Folder, records: SweepRecords) -> str:
    """Write a sweep's report into its folder, and return the report's path or URI.

    The files are `report.html` and, if there is a winner, `winner.yaml`. Raises MarlRayError if the records' config
    is not a sweep's, and OSError if the files cannot be written.
    """
    winner = winner_config(records)
    if winner is not None:
        folder.write(WINNER_FILE, yaml.safe_dump(winner, sort_keys=False).encode())
    folder.write(REPORT_FILE, report_page(folder, records))
    return f"{folder.uri}/{REPORT_FILE}"


def winner_config(records: SweepRecords) -> dict[str, object] | None:
    """Return the run config of the winner's registered seed; None without a winner.

    The config has the form that `marl-ray train` takes.
    """
    if records.winner is None:
        return None
    configs = records.trials[records.winner].configs
    return next((config for config in configs if config["seed"] == records.winner_seed), None)


def winner_comparison(
    folder: Folder, config: SweepConfig, records: SweepRecords
) -> tuple[str, dict[int, BootstrapInterval]]:
    """Return the line of `winner_certainty`, and trial -> the interval of its curve's end, the winner's first.

    Trials without a curve are left out. Without a winner the line is empty.
    """
    order = _order(config, records)
    curves = _curves(config, order, {record.number: _read_trial_rows(folder, record) for record in order})
    return _certainty(config, records, order, curves), {trial: end_of(curve) for trial, curve in curves.items()}


def _certainty(
    config: SweepConfig, records: SweepRecords, order: Sequence[TrialRecord], curves: Mapping[int, Curve]
) -> str:
    if records.winner not in curves:
        return ""
    best = [(_name(record), curves[record.number]) for record in order if record.number in curves]
    return winner_certainty(best[:COMPARED_TRIALS], config.metric[0])


def _order(config: SweepConfig, records: SweepRecords) -> list[TrialRecord]:
    """Return the trials with a result, the winner first."""
    return sorted(ranked_trials(records, config.metric), key=lambda record: record.number != records.winner)


def _curves(config: SweepConfig, order: Sequence[TrialRecord], rows: AllRows) -> dict[int, Curve]:
    """Return trial -> its curve of the first metric, for those that have one."""
    curves = {record.number: curve_of(rows[record.number], config.seeds, config.metric[0]) for record in order}
    return {trial: curve for trial, curve in curves.items() if curve is not None}


def report_page(folder: Folder, records: SweepRecords) -> bytes:
    """Return the report as HTML."""
    config = parse_config(SweepConfig, records.config, source=f"{folder.uri}/{SWEEP_FILE}")
    order = _order(config, records)
    rows = {record.number: _read_trial_rows(folder, record) for record in records.trials}
    curves = _curves(config, order, rows)
    best = [record for record in order if record.number in curves]
    colours = {record.number: f"c{place + 1}" for place, record in enumerate(best[:COLOURED_CURVES])}
    drawn = strokes({_name(r): (curves[r.number], [exploit["at"] for exploit in r.exploits]) for r in best})
    ordered = {record.number for record in order}
    results = [
        (_name(r), r.values, r.objectives[0] if r.number in ordered and r.objectives else None) for r in records.trials
    ]
    scored = [(r.values, s[0]) for r in order if (s := signed_objectives(config.metric, r.objectives)) is not None]
    winner = None if records.winner is None else records.trials[records.winner]
    page = _page_templates().get_template("report.html")
    return page.render(
        style=read_stylesheet().decode() + (PAGES / "report.css").read_text(),
        records=records,
        config=config,
        metric=config.metric[0],
        facts=_facts(config, records),
        failed=[(_name(r), r.status, end_reason(r, records)) for r in records.trials if r.status in FAILED_STATUSES],
        winner=None if winner is None else _winner(folder, config, records, winner, rows),
        certainty=_certainty(config, records, order, curves),
        charts=[(size, draw_curve_chart(drawn, width, height)) for size, width, height in _SIZES],
        cost_charts=_cost_charts(config, best, rows),
        budgets=_budgets(records),
        legend=[(colours[r.number], _name(r), values_line(r.values)) for r in best[:COLOURED_CURVES]],
        others=len(best) - len(colours),
        trials=_trials(config, records, order, curves, colours, rows),
        metrics=[metric.name for metric in config.metric],
        matrix=_improvement_matrix(config, best[:COMPARED_TRIALS], curves, colours),
        compared=COMPARED_TRIALS,
        parallel=draw_parallel_axes(
            config.space,
            results,
            config.metric[0].name,
            config.metric[0].mode,
            None if winner is None else _name(winner),
        ),
        importance=list(importances(config.space, scored).items()),
        least=MIN_TRIALS,
        scored=len(scored),
        exploits=_exploits(records),
        config_yaml=yaml.safe_dump(records.config, sort_keys=False),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        version=__version__,
    ).encode()


@cache
def _page_templates() -> Environment:
    pages = Environment(
        loader=FileSystemLoader(PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"number": format_number, "clock": _format_seconds}
    return pages


def _name(record: TrialRecord) -> str:
    return f"{record.number:04d}"


def _read_trial_rows(folder: Folder, record: TrialRecord) -> list[dict[str, float]]:
    """Return a trial's rows; empty if they cannot be read.

    A trial that failed before its first checkpoint, for example, has none.
    """
    try:
        return read_rows(Folder(folder.uri, "trials", _name(record)))
    except (OSError, MarlRayError):
        return []


def _format_seconds(seconds: float) -> str:
    """Return a number of seconds, written for people."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def _workers(record: TrialRecord) -> int:
    return int(record.configs[0].get("resources", {}).get("workers", 1)) if record.configs else 1


def _facts(config: SweepConfig, records: SweepRecords) -> list[tuple[str, str]]:
    counts = Counter(record.status or record.state for record in records.trials)
    metrics = ", ".join(f"{m.name} ({m.mode}, window {m.window})" for m in config.metric)
    budget = ", ".join(f"{key} {value:g}" for key, value in config.budget.model_dump().items() if value is not None)
    return [
        ("Trials", f"{len(records.trials)}: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common())),
        ("Metric", metrics),
        ("Seeds", ", ".join(map(str, config.seeds))),
        ("Search", config.search.kind),
        ("Scheduler", config.scheduler.kind),
        ("Budget", budget or "none"),
        ("Steps played", f"{records.played:,}"),
        ("Wall time", _format_seconds(records.seconds)),
        ("Worker time", _format_seconds(sum(r.seconds * _workers(r) for r in records.trials))),
        ("MLflow run", records.mlflow_run_id or "none"),
    ]


def _budgets(records: SweepRecords) -> int:
    """Return the greatest number of budgets that a trial has."""
    return max((len(budgets_of(record.configs)) for record in records.trials), default=0)


def _cost_charts(config: SweepConfig, best: Sequence[TrialRecord], rows: AllRows) -> list[JsonObject]:
    """Return, for each budget, charts of the trials' mean cost of an episode over their steps."""
    charts_of_budgets = []
    for k in range(max((len(budgets_of(record.configs)) for record in best), default=0)):
        metric = MetricConfig(name=f"eval/episode_cost_{k}", mode="min")
        costs = {_name(r): (c, ()) for r in best if (c := curve_of(rows[r.number], config.seeds, metric)) is not None}
        budgets = sorted(
            {budgets_of_trial[k] for record in best if len(budgets_of_trial := budgets_of(record.configs)) > k}
        )
        # otherwise the colours would not match the other charts
        drawn = strokes(costs) if len(costs) == len(best) else {}
        charts = [(size, draw_curve_chart(drawn, width, height, budgets)) for size, width, height in _SIZES]
        charts_of_budgets.append({"name": metric.name, "budgets": budgets, "charts": charts})
    return charts_of_budgets


def _winner(
    folder: Folder, config: SweepConfig, records: SweepRecords, winner: TrialRecord, rows: AllRows
) -> dict[str, object]:
    where = folder.uri if "://" in folder.uri else shlex.quote(folder.uri)
    run_config = winner_config(records)
    return {
        "name": _name(winner),
        "values": values_line(winner.values),
        "scores": [(m.name, v) for m, v in zip(config.metric, winner.objectives or [], strict=False)],
        "seed": records.winner_seed,
        "summary": [] if run_config is None else seed_summary(rows[winner.number], run_config),
        "model": records.winner_model,
        "yaml": "" if run_config is None else yaml.safe_dump(run_config, sort_keys=False),
        "train": f"marl-ray train {where}/{WINNER_FILE}",
        "deploy": f"marl-ray deploy --from-sweep {where}",
        "remote": "://" in folder.uri,
        "exploits": len(winner.exploits),
        "finished": winner.status == "finished",
    }


def _trials(
    config: SweepConfig,
    records: SweepRecords,
    order: Sequence[TrialRecord],
    curves: Mapping[int, Curve],
    colours: Mapping[int, str],
    rows: AllRows,
) -> list[dict[str, object]]:
    """Return the rows of the table of trials: trials with a result, the best first, then the others."""
    ends = {trial: end_of(curve) for trial, curve in curves.items()}
    places = scale_trial_intervals(ends)
    front = _pareto_front(config, order)
    ordered = {record.number for record in order}
    unranked = [record for record in records.trials if record.number not in ordered]
    return [
        {
            "name": _name(record),
            "values": values_line(record.values) or "as given",
            "unread": ", ".join(key.removeprefix("hyper.") for key in record.unread),
            "colour": colours.get(record.number, "other"),
            "status": record.status or record.state,
            "why": end_reason(record, records),
            "best": record.number == records.winner,
            "front": record.number in front,
            "scores": record.objectives if record.number in ordered else None,
            "end": ends.get(record.number),
            "span": places.get(record.number),
            "costs": cost_cells(rows[record.number], config.seeds, budgets_of(record.configs)),
            "shares": share_cells(rows[record.number], config.seeds),
            "exploits": [f"{exploit['donor']:04d}" for exploit in record.exploits],
            "steps": record.steps,
            "played": record.played,
            "seconds": record.seconds,
            "worker_seconds": record.seconds * _workers(record),
            "cpus": record.cpus,
            "gpus": record.gpus,
        }
        for record in [*order, *unranked]
    ]


def _pareto_front(config: SweepConfig, order: Sequence[TrialRecord]) -> set[int]:
    """Return the numbers of the trials that no other beats in all metrics; empty if there is one metric."""
    if len(config.metric) == 1 or not order:
        return set()
    scores = np.array([signed_objectives(config.metric, record.objectives) for record in order]).reshape(len(order), -1)
    front = set()
    for record, own_scores in zip(order, scores, strict=True):
        better = (scores >= own_scores).all(1) & (scores != own_scores).any(1)
        if not better.any():
            front.add(record.number)
    return front


def _improvement_matrix(
    config: SweepConfig, best: Sequence[TrialRecord], curves: Mapping[int, Curve], colours: Mapping[int, str]
) -> list[dict[str, object]]:
    """Return the rows of the matrix of probabilities of improvement, with a cell for each column.

    There are none for fewer than two trials.
    """
    if len(best) < 2:
        return []
    matrix: list[dict[str, object]] = []
    for row_trial in best:
        cells: list[dict[str, object] | None] = []
        for column_trial in best:
            if row_trial is column_trial:
                cells.append(None)
                continue
            chance = improvement(curves[row_trial.number], curves[column_trial.number], config.metric[0])
            at = min(curves[row_trial.number].steps[-1], curves[column_trial.number].steps[-1])
            cells.append(
                {
                    "value": chance.value,
                    "shade": round(100 * abs(2 * chance.value - 1)),
                    "sure": differ_by_rank_sum(curves[row_trial.number], curves[column_trial.number]),
                    "text": f"{_name(row_trial)} over {_name(column_trial)} at {at:,.0f} steps: "
                    f"{chance.value:.2f} [{chance.low:.2f}, {chance.high:.2f}]",
                }
            )
        matrix.append({"name": _name(row_trial), "colour": colours.get(row_trial.number, "other"), "cells": cells})
    return matrix


def _exploits(records: SweepRecords) -> list[dict[str, object]]:
    exploits = [
        {
            "at": exploit["at"],
            "name": _name(record),
            "donor": f"{exploit['donor']:04d}",
            "before": values_line(record.history.get(exploit["at"], {})),
            "after": values_line(exploit["values"]),
        }
        for record in records.trials
        for exploit in record.exploits
    ]
    return sorted(exploits, key=lambda exploit: (exploit["at"], exploit["name"]))
