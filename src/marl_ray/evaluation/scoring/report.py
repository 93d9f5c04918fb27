"""The report of an evaluation: its numbers, their variant and every problem, as JSON and as Markdown."""

import json
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from marl_ray import __version__
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks.base import Mode
from marl_ray.evaluation.pass_at_k import pass_at_k
from marl_ray.evaluation.statistics import BootstrapInterval, problem_bootstrap
from marl_ray.json_types import JsonMapping, JsonObject

REPORT_FILE, MARKDOWN_FILE = "report.json", "report.md"
MAX_LISTED_TASKS = 50
"""Number of task ids of a kind that the Markdown lists."""


def make_report(
    manifest: JsonMapping,
    task_ids: Sequence[str],
    rows: Iterable[JsonMapping],
    modes: Sequence[Mode],
    ks: Sequence[int],
    filtered: Sequence[str] = (),
    unchecked: int = 0,
) -> JsonObject:
    """Compute the report. `filtered` problems (their references fail) are counted and left out.

    Problems are in the order of `task_ids`, so the means do not depend on the order in which samples were scored.
    A mode in which no problem can be judged has no scores. Raises MarlRayError if that is every mode, or if the references
    of all problems fail, because nothing is left to score.
    """
    left_out = set(filtered)
    reported = [task_id for task_id in task_ids if task_id not in left_out]
    by_task: dict[str, list[JsonMapping]] = defaultdict(list)
    for row in rows:
        by_task[row["task_id"]].append(row)
    if not reported:
        raise MarlRayError("evaluate: the references of all problems fail here, so there is nothing to score")
    for results in by_task.values():
        results.sort(key=lambda row: row["sample"])
    reported_rows = [row for task_id in reported for row in by_task[task_id]]
    verdicts = [(row, mode, row[mode]) for row in reported_rows for mode in modes if row[mode]]
    extra_scores = {
        mode: sorted({name for _, judged_mode, v in verdicts if judged_mode == mode for name in v.get("scores", ())})
        for mode in modes
    }
    problems = {task_id: _problem(by_task[task_id], extra_scores, ks) for task_id in reported}
    judged_modes = [mode for mode in modes if any(mode in problem["passed"] for problem in problems.values())]
    if not judged_modes:
        raise MarlRayError(
            f"evaluate: no problem can be judged in {' or '.join(modes)} mode, so there is nothing to score"
        )
    names = [name for mode in judged_modes for name in (mode, *(f"{mode} {score}" for score in extra_scores[mode]))]
    return {
        "evaluation": dict(manifest),
        "scores": {name: _scores(problems, name, ks) for name in names},
        "problems": problems,
        "filtered": list(filtered),
        "not_judged": {mode: [t for t in reported if not by_task[t][0][mode]] for mode in modes},
        "without_reference": unchecked,
        "suspected_hacks": [_sample_name(row) for row in reported_rows if row["suspected_hack"]],
        "flagged": {
            _sample_name(row): verdict["flags"]
            for row, _, verdict in verdicts
            if verdict["flags"] and verdict["passed"]
        },
        "verdicts": {
            mode: dict(
                Counter(
                    _verdict_kind(verdict["result"]) for _, judged_mode, verdict in verdicts if judged_mode == mode
                ).most_common()
            )
            for mode in modes
        },
        "levels": sorted({verdict["level"] for _, _, verdict in verdicts} - {""}),
        "samples": len(reported_rows),
        "marl_ray": __version__,
        "python": platform.python_version(),
    }


def _scores(problems: Mapping[str, JsonMapping], name: str, ks: Sequence[int]) -> dict[str, dict[str, float]]:
    judged = [problem[name] for problem in problems.values() if name in problem["passed"]]
    numbers = (f"pass@{k}" for k in ks)
    return {
        number: problem_bootstrap([np.array([scores[number] for scores in judged])], [1.0])._asdict()
        for number in numbers
    }


def _problem(rows: Sequence[JsonMapping], extra_scores: Mapping[Mode, Sequence[str]], ks: Sequence[int]) -> JsonObject:
    """Compute the number of samples that passed, and pass@k, for each mode and each further score of a mode.

    `extra_scores` names these scores; the one named `base` of the mode `official` is called `official base`.
    """
    correct: dict[str, int] = {}
    for mode, names in extra_scores.items():
        if not rows[0][mode]:
            continue
        correct[mode] = sum(row[mode]["passed"] for row in rows)
        for name in names:
            correct[f"{mode} {name}"] = sum(row[mode].get("scores", {}).get(name, False) for row in rows)
    scores = {name: {f"pass@{k}": pass_at_k(len(rows), passed, k) for k in ks} for name, passed in correct.items()}
    return {"samples": len(rows), "passed": correct} | scores


def _sample_name(row: JsonMapping) -> str:
    return f"{row['task_id']}#{row['sample']}"


def _verdict_kind(result: str) -> str:
    """Return the kind of a verdict, such as `fail:wrong` for `fail:wrong: 1 is not 2`."""
    first, _, details = result.partition(":")
    return f"fail:{details.partition(':')[0]}" if first == "fail" else first


def markdown(report: JsonMapping) -> str:
    """Write the report as Markdown, for people."""
    about = report["evaluation"]
    lines = [f"# {about['variant']}", "", "| mode | number | value | 95 % interval |", "|---|---|---|---|"]
    for mode, scores in report["scores"].items():
        for name, score in scores.items():
            lines.append(f"| {mode} | {name} | {score['value']:.4f} | {score['low']:.4f} to {score['high']:.4f} |")
    lines += [
        "",
        *(f"{note[0].upper()}{note[1:]}.\n" for note in width_notes(report)),
        f"{report['samples']} samples of {len(report['problems'])} problems, limit {about['timeout_s']:g} s, "
        f"sandbox level {', '.join(report['levels']) or 'none'}, Python {report['python']}, marl-ray {report['marl_ray']}.",
        "Intervals are over problems (bootstrap).",
        "",
        f"- samples: {about['samples']}, sha256 {about['samples_sha256']}",
        f"- problems: {about['data']}, sha256 {about['data_sha256']}",
    ]
    for mode, verdicts in report["verdicts"].items():
        lines.append(f"- verdicts, {mode}: " + ", ".join(f"{name} {count}" for name, count in verdicts.items()))
    if report["filtered"]:
        lines.append(
            f"- left out, their own references fail: {len(report['filtered'])}: {_list_some(report['filtered'])}"
        )
    if report["without_reference"]:
        lines.append(f"- without a reference to check them by: {report['without_reference']}")
    for mode, task_ids in report["not_judged"].items():
        if task_ids:
            lines.append(f"- cannot be judged in {mode} mode and do not count there: {_list_some(task_ids)}")
    hacks = report["suspected_hacks"]
    lines.append(f"- suspected hacks, the modes disagree: {len(hacks)}{': ' + _list_some(hacks) if hacks else ''}")
    if report["flagged"]:
        flagged = [f"{name} ({', '.join(flags)})" for name, flags in report["flagged"].items()]
        lines.append(f"- passed with suspicious words: {len(flagged)}: {_list_some(flagged)}")
    return "\n".join(lines) + "\n"


def width_notes(report: JsonMapping) -> list[str]:
    """Return a sentence for each mode with an interval without width, which is no certainty.

    If no problem or every problem scores, the one-sided exact bound of Clopper and Pearson is known: the share p at which
    that happens with probability 0.05, p^n or (1 - p)^n.
    """
    notes = []
    for mode, scores in report["scores"].items():
        values = {score["value"] for score in scores.values() if score["low"] == score["high"]}
        if not values:
            continue
        count = sum(mode in problem["passed"] for problem in report["problems"].values())
        bound = 0.05 ** (1 / count)
        ends = {0.0: f"with 95 % confidence at most {1 - bound:.4f}", 1.0: f"with 95 % confidence at least {bound:.4f}"}
        bound_text = f": {ends[value]}" if len(values) == 1 and (value := next(iter(values))) in ends else ""
        notes.append(f"{mode}: no width is no certainty, all {count} problems scored alike{bound_text}")
    return notes


def _list_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED_TASKS} more" if len(names) > MAX_LISTED_TASKS else ""
    return ", ".join(names[:MAX_LISTED_TASKS]) + more


def aggregate(
    folders: Mapping[Path, float], number: str, mode: Mode
) -> tuple[BootstrapInterval, dict[str, tuple[float, float]]]:
    """Compute the weighted mean of one number over evaluations, with its interval.

    Returns also the variant, value and share of each evaluation. Raises MarlRayError naming a folder that has no
    report, or whose report lacks this number.
    """
    groups, parts = [], {}
    for folder, weight in folders.items():
        path = folder / REPORT_FILE
        try:
            report = json.loads(path.read_bytes())
        except OSError as error:
            raise MarlRayError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise MarlRayError(f"{path}: not JSON") from error
        try:
            scores = [float(p[mode][number]) for p in report["problems"].values() if mode in p["passed"]]
            value = float(report["scores"][mode][number]["value"])
            variant = report["evaluation"]["variant"]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MarlRayError(f"{path}: has no {number} of mode {mode}") from error
        groups.append(np.array(scores))
        parts[f"{variant} [{folder}]"] = value, weight
    total = problem_bootstrap(groups, list(folders.values()))
    return total, parts
