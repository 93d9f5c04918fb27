"""The report of a benchmark in a browser: success with its interval, the episodes' ends and costs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from marl_ray.envs.text.base import COSTS
from marl_ray.evaluation.scoring.report import make_report, width_notes
from marl_ray.evaluation.web_agents.playing import VERDICT_MODE, WebRow
from marl_ray.json_types import JsonMapping, JsonObject


def web_report(manifest: JsonMapping, task_ids: Sequence[str], rows: Sequence[WebRow], ks: Sequence[int]) -> JsonObject:
    """Compute the report of `make_report`, with counts and means by ending and by group.

    `endings` has them by how episodes ended, `groups` by the page or the sites of a task. An episode that a fault ended
    counts as failed, with what it had cost until then.
    """
    report = make_report(manifest, list(dict.fromkeys(task_ids)), rows, (VERDICT_MODE,), ks)
    return report | {
        "mean_score": fmean(row["score"] for row in rows),
        "all": _means(rows),
        "endings": {name: _means(several) for name, several in _group_rows(rows, "ending").items()},
        "groups": {name: _means(several) for name, several in _group_rows(rows, "group").items()},
    }


def _group_rows(rows: Sequence[WebRow], key: str) -> dict[str, list[WebRow]]:
    parts = defaultdict(list)
    for row in rows:
        parts[row[key]].append(row)
    return dict(sorted(parts.items()))


def _means(rows: Sequence[WebRow]) -> dict[str, float]:
    """Return the numbers of episodes and of those solved, and the means of their actions and costs."""
    costs = {name: fmean(row["cost"][name] for row in rows) for name in COSTS}
    solved = sum(row[VERDICT_MODE]["passed"] for row in rows)
    return {"episodes": len(rows), "solved": solved, "actions": fmean(row["actions"] for row in rows), **costs}


def web_lines(report: JsonMapping) -> list[str]:
    """Return the report in a few lines, without its folder."""
    lines = [str(report["evaluation"]["variant"])]
    for number, score in report["scores"][VERDICT_MODE].items():
        lines.append(f"  {number:<9} {score['value']:.4f} ({score['low']:.4f} to {score['high']:.4f})")
    lines += [f"  {note}" for note in width_notes(report)]
    all_means = report["all"]
    lines.append(f"  {all_means['solved']} of {all_means['episodes']} episodes solved; each took {_costs(all_means)}")
    for name, part in report["endings"].items():
        lines.append(f"  {name:<17} {part['episodes']}, {part['solved']} solved; {_costs(part)}")
    return lines


def _costs(means: Mapping[str, float]) -> str:
    return f"{means['actions']:.1f} actions, {means['tokens']:.0f} tokens, {means['seconds']:.1f} s"


def web_markdown(report: JsonMapping) -> str:
    """Write the report as Markdown, for people."""
    lines = [f"# {report['evaluation']['variant']}", "", "| number | value | 95 % interval |", "|---|---|---|"]
    for number, score in report["scores"][VERDICT_MODE].items():
        lines.append(f"| {number} | {score['value']:.4f} | {score['low']:.4f} to {score['high']:.4f} |")
    lines += ["", *(f"{note[0].upper()}{note[1:]}.\n" for note in width_notes(report))]
    lines += ["Intervals are over tasks (bootstrap). Actions, tokens and seconds are means of an episode.", ""]
    for title, parts in (("ending", report["endings"]), ("page or sites", report["groups"])):
        lines += [f"| {title} | episodes | solved | actions | tokens | seconds |", "|---|---|---|---|---|---|"]
        for name, part in {**parts, "all": report["all"]}.items():
            numbers = f"{part['actions']:.1f} | {part['tokens']:.0f} | {part['seconds']:.2f}"
            lines.append(f"| {name} | {part['episodes']} | {part['solved']} | {numbers} |")
        lines.append("")
    return "\n".join(lines)
