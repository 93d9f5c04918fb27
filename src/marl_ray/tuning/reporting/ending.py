"""The end of a sweep as a document for programs and as lines for people."""

from collections import Counter
from collections.abc import Iterator

from marl_ray.config.sweep import SweepConfig
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.stored_files.folder_kinds import SWEEP_FILE
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.records import SweepRecords, TrialRecord, values_line
from marl_ray.tuning.reporting.report import winner_comparison

SHOWN_TRIALS = 5
"""Trials whose scores are printed, the winner among them; the report has all."""


def ending_document(folder: Folder, config: SweepConfig, records: SweepRecords, report: str) -> JsonObject:
    """Return the end of a sweep; `report` is the path or URI of its page, or empty."""
    certainty, ends = winner_comparison(folder, config, records)
    winner = None
    if records.winner is not None:
        winner = _trial_scores(config, records.trials[records.winner]) | {
            "seed": records.winner_seed,
            "model": records.winner_model or None,
            "certainty": certainty or None,
        }
    intervals = {number: [end.low, end.high] for number, end in ends.items() if len(config.seeds) > 1}
    ranking = [_trial_scores(config, records.trials[number]) | {"interval": intervals.get(number)} for number in ends]
    return {
        "name": records.name,
        "status": records.status,
        "error": records.error or None,
        "trials": dict(Counter(record.status or record.state for record in records.trials)),
        "steps": records.played,
        "seconds": records.seconds,
        "winner": winner,
        "ranking": ranking,
        "report": report or None,
        "records": f"{folder.uri}/{SWEEP_FILE}",
    }


def ending_lines(document: JsonMapping) -> Iterator[str]:
    """Yield the lines that end a sweep: its trials, its winner and the next best, its folder."""
    counts, winner = document["trials"], document["winner"]
    kinds = ", ".join(f"{count} {status}" for status, count in counts.items())
    yield (
        f"{document['name']}: {sum(counts.values())} trials ({kinds}), {document['steps']:,} steps, "
        f"{document['seconds']:.0f} s"
    )
    if document["error"]:
        yield f"  {document['error']}"
    if document["report"]:
        yield f"  report  {document['report']}"
    if winner is None:
        yield "  no winner: no trial has a result"
        return
    intervals = {trial["trial"]: trial["interval"] for trial in document["ranking"]}
    yield f"  winner  {_line(winner, intervals.get(winner['trial']))}"
    if winner["certainty"]:
        yield f"          {winner['certainty']}"
    if winner["model"]:
        yield f"  bundle  {winner['model']}"
    for trial in document["ranking"][:SHOWN_TRIALS]:
        if trial["trial"] != winner["trial"]:
            yield f"  next    {_line(trial, trial['interval'])}"
    yield f"  records {document['records']}"


def _trial_scores(config: SweepConfig, record: TrialRecord) -> JsonObject:
    scores = dict(zip((metric.name for metric in config.metric), record.objectives or [], strict=False))
    return {"trial": record.number, "values": record.values, "scores": scores}


def _line(trial: JsonMapping, interval: tuple[float, float] | None) -> str:
    """Return a trial with its scores, and the interval of the first of them."""
    scores = [f"{name} {value:.4g}" for name, value in trial["scores"].items()]
    if interval is not None and scores:
        scores[0] += " ({:.4g} to {:.4g})".format(*interval)
    return f"trial {trial['trial']:04d} ({values_line(trial['values'])}): {', '.join(scores)}"
