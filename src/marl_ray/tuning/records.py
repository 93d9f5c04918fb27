"""The records of a sweep: every trial's values, state, cost and files, and the winner.

`sweep.json` holds all of them as they were after `changes` changes; each line of `sweep.jsonl` is a later change and holds
the fields that it changed. `read_records` puts the two together.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marl_ray.config.sweep import MetricConfig, SweepConfig
from marl_ray.errors import MarlRayError, did_you_mean, one_line
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.stored_files.appended_file import AppendedFile
from marl_ray.stored_files.folder_kinds import SWEEP_FILE
from marl_ray.tuning.folder import Folder

CHANGES_FILE, REPORT_FILE = "sweep.jsonl", "report.html"
"""Files of a sweep beside its records: the later changes of these, and the page for people."""
FORMAT = 1
"""Version of the layout of `sweep.json` and `sweep.jsonl`."""
FAILED_STATUSES = ("failed", "lost", "refused")
"""Statuses of trials that failed for reasons other than their configuration's worth."""
MIN_LOG_BYTES = 1 << 16
"""Bytes of changes that are never worth writing all records anew."""
READ_ATTEMPTS = 5
"""Attempts to read records while their writer replaces `sweep.json` and empties `sweep.jsonl`."""


@dataclass
class TrialRecord:
    """One trial: a configuration with all its seeds."""

    number: int
    values: JsonObject
    """Dotted key -> value, for the keys that vary; after an exploit the new values."""
    state: str = "running"
    """`running` (until the next decision point), `waiting` (at a decision point) or `ended`."""
    status: str = ""
    """Status of an ended trial: `finished`, `stopped`, `failed`, `lost`, `refused` or `cut`.

    The scheduler has stopped it (`stopped`); its process died too often (`lost`); the cluster cannot run it (`refused`); or
    the budget ended it (`cut`), and it continues when the budget is raised.
    """
    error: str = ""
    """One line that says why the trial failed, was lost or was refused."""
    legs: int = 0
    """Number of legs that have begun."""
    scores: dict[int, float] = field(default_factory=dict)
    """Decision point -> score, greater is better."""
    history: dict[int, JsonObject] = field(default_factory=dict)
    """Decision point of an exploit -> the values before it."""
    exploits: list[JsonObject] = field(default_factory=list)
    """One mapping per takeover, with `at`, `donor` and `values`."""
    objectives: list[float] | None = None
    """The metrics at the end, in their own sign: interquartile means over the seeds, smoothed."""
    steps: int = 0
    """Environment steps that every seed has played."""
    played: int = 0
    """Environment steps paid for, all seeds together."""
    seconds: float = 0.0
    """Wall time in seconds."""
    cpus: float = 0.0
    """CPUs that the trial occupies; `seconds * cpus` is its cost."""
    gpus: float = 0.0
    """GPUs that the trial occupies."""
    configs: list[JsonObject] = field(default_factory=list)
    """The run config of each seed, as a user would write it; `marl-ray train` takes one as a file."""
    unread: list[str] = field(default_factory=list)
    """Hyper-parameters of the sweep that the trial did not get, because its algorithms do not read them."""
    mlflow_run_id: str = ""


@dataclass
class SweepRecords:
    """The records of a whole sweep."""

    name: str
    config: JsonObject
    """The sweep's config, resolved."""
    identity: JsonObject
    """The part of the config that must be equal to continue the sweep."""
    status: str = "running"
    """`running` (also if its driver was killed), `finished`, `cut` (by the budget or a person) or `failed`."""
    error: str = ""
    seconds: float = 0.0
    """Wall time in seconds, over all times that the sweep ran."""
    mlflow_run_id: str = ""
    winner: int | None = None
    """Number of the winner's trial; None while there is none."""
    winner_seed: int | None = None
    """Seed of the winner's registered bundle: the seed with the median score, so never just the lucky one."""
    winner_model: str = ""
    """Name of the registered model version: `models:/name/version`."""
    changes: int = 0
    """Number of times that the records have been written."""
    trials: list[TrialRecord] = field(default_factory=list)

    @property
    def played(self) -> int:
        """Environment steps that all trials have played."""
        return sum(record.played for record in self.trials)


def find_sweep(sweep: str, storage: str = "runs") -> tuple[Folder, SweepRecords]:
    """Find a sweep by its folder (or URI), or by its name under the storage. Raises MarlRayError if there is none."""
    parent, _, name = sweep.rstrip("/").rpartition("/")
    places = [Folder(parent or ".", name)] + ([] if parent else [Folder(storage, name)])
    for folder in places:
        if folder.exists(SWEEP_FILE):
            return folder, _load_existing(folder)
    tried = " or ".join(f"{place.uri}/{SWEEP_FILE}" for place in places)
    names = [
        folder for folder in Folder(parent or storage).folders() if Folder(parent or storage, folder).exists(SWEEP_FILE)
    ]
    suggestion = did_you_mean(name, names) if names else ""
    raise MarlRayError(f"sweep {sweep!r}: expected a sweep's folder or name, but there is no {tried}{suggestion}")


def _load_existing(folder: Folder) -> SweepRecords:
    try:
        records = load_records(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MarlRayError(f"{folder.uri}/{SWEEP_FILE} is not the record of a sweep: {one_line(error)}") from error
    if records is None:
        raise MarlRayError(f"{folder.uri}/{SWEEP_FILE} has gone")
    return records


def winner_of(sweep: str, storage: str = "runs") -> tuple[str, str]:
    """Return the registered model of a sweep's winner, and a description of it.

    Raises MarlRayError if there is no winner.
    """
    folder, records = find_sweep(sweep, storage)
    if records.winner is None:
        why_not = {"running": "it has not ended", "cut": f"it was cut short ({records.error})", "failed": records.error}
        reason = why_not.get(records.status, "no trial has a result")
        raise MarlRayError(f"sweep {records.name!r} has no winner: {reason}; see {folder.uri}/{REPORT_FILE}")
    if not records.winner_model:
        raise MarlRayError(
            f"sweep {records.name!r}: the bundle of its winner, trial {records.winner:04d}, is not registered in MLflow; "
            "run the sweep's command again, it registers the bundle and trains nothing"
        )
    values = values_line(records.trials[records.winner].values)
    return records.winner_model, f"winner of sweep {records.name}: trial {records.winner:04d} ({values})"


def identity_of(config: SweepConfig) -> JsonObject:
    """Return the part of the config that may not change when a sweep is continued."""
    data = config.resolve()
    return {key: value for key, value in data.items() if key not in ("budget", "max_concurrent", "storage")}


def read_records(folder: Folder) -> JsonObject | None:
    """Return the records of a sweep as plain data, whoever writes them meanwhile.

    Returns None if there is no file. Raises ValueError, TypeError or KeyError, which name the line of `sweep.jsonl`, if
    the files are not a sweep's, and MarlRayError if they are of another version of marl-ray.
    """
    for _ in range(READ_ATTEMPTS):
        data = folder.read_json(SWEEP_FILE)
        if data is None:
            return None
        if not isinstance(data, dict):
            raise TypeError(f"expected an object, got {type(data).__name__}")
        if data["format"] != FORMAT:
            raise MarlRayError(
                f"{folder.uri}/{SWEEP_FILE} has sweep format {data['format']}, expected {FORMAT}; it can be read by the "
                "version of marl-ray that wrote it"
            )
        if _apply_changes(data, folder.lines(CHANGES_FILE)):
            return data
    raise ValueError(f"{CHANGES_FILE} lacks the changes that follow number {data.get('changes', 0)}")


def _apply_changes(data: JsonObject, lines: Sequence[str]) -> bool:
    """Put the later changes, a line each, into the records `data`.

    Returns False if the first of them is missing, because all records were written anew meanwhile.
    """
    number = data.get("changes", 0)
    for at, line in enumerate(lines, 1):
        try:
            change = json.loads(line)
            if change["changes"] <= number:
                # sweep.json is newer.
                continue
            if change["changes"] != number + 1:
                return False
            number, trials = number + 1, data["trials"]
            for fields in change.pop("trials"):
                if fields["number"] == len(trials):
                    trials.append({})
                trials[fields["number"]] |= fields
            data |= change
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{CHANGES_FILE}, line {at}: expected a change of the records: {one_line(error)}"
            ) from error
    return True


def load_records(folder: Folder) -> SweepRecords | None:
    """Read a sweep's records.

    Returns None if there is no file. Raises as `read_records` does.
    """
    data = read_records(folder)
    if data is None:
        return None
    del data["format"]
    data["trials"] = [_trial_record(trial) for trial in data["trials"]]
    return SweepRecords(**data)


def _trial_record(data: JsonObject) -> TrialRecord:
    for key in ("rows", "bundles"):
        data.pop(key, None)
    for key in ("scores", "history"):
        data[key] = {int(at): value for at, value in dict(data[key]).items()}
    return TrialRecord(**data)


class RecordsFile:
    """Writes the records of a sweep as they change. Only one process may do so.

    A change costs one line of `sweep.jsonl` with the fields that it changed. Once these lines have more bytes than
    `sweep.json`, all records are written anew, so the cost of a change does not depend on the number of trials.
    """

    def __init__(self, folder: Folder, records: SweepRecords):
        self.folder, self.records = folder, records
        self.lines: AppendedFile | None = None
        """None until `sweep.json` has been written."""
        self.written: dict[int | None, dict[str, str]] = {}
        """Number of a trial (None for the sweep's own fields) -> field -> its JSON, as the files have it."""
        self.marked: set[int] = {record.number for record in records.trials}
        """Trials that have changed since."""
        self.log_bytes = self.snapshot_bytes = 0

    def mark(self, record: TrialRecord) -> None:
        """Let the next change write this trial too."""
        self.marked.add(record.number)

    def save(self, *changed: TrialRecord, durable: bool = False) -> None:
        """Write the sweep's fields, these trials and the marked ones.

        When it returns, the change survives the death of this process and, if `durable`, that of the machine. Raises
        OSError; then the next call writes this change too.
        """
        self.marked.update(record.number for record in changed)
        if self.lines is None or self.log_bytes > max(MIN_LOG_BYTES, self.snapshot_bytes):
            self.save_all()
            return
        self.records.changes += 1
        fields = self._fields()
        parts = {number: _changed_fields(texts, self.written.get(number, {})) for number, texts in fields.items()}
        trials = [_json_line({"number": str(number)} | part) for number, part in parts.items() if number is not None]
        line = _json_line(parts[None] | {"trials": f"[{', '.join(trials)}]"})
        try:
            # Lines of an object store that are not uploaded die with this process.
            self.lines.append([line], durable or not self.folder.is_local)
        except OSError:
            self.records.changes -= 1
            raise
        self.log_bytes += len(line) + 1
        self.written |= fields
        self.marked.clear()

    def save_all(self) -> None:
        """Write `sweep.json` with all records, a trial per line, and empty `sweep.jsonl`. Raises OSError."""
        self.records.changes += 1
        self.marked.update(record.number for record in self.records.trials)  # also what nobody has marked
        self.written |= self._fields()
        self.marked.clear()
        sweep_fields = self.written[None]
        trials = (_json_line(self.written[record.number]) for record in self.records.trials)
        text = _json_line({"format": str(FORMAT)} | sweep_fields | {"trials": "[\n" + ",\n".join(trials) + "\n]"})
        self.folder.write(SWEEP_FILE, text.encode())
        lines = self.lines or self.folder.open_lines(CHANGES_FILE)
        lines.keep(0)
        self.lines = lines
        self.log_bytes, self.snapshot_bytes = 0, len(text)

    def _fields(self) -> dict[int | None, dict[str, str]]:
        """Return the sweep's own fields, and those of the marked trials, as JSON."""
        sweep_fields = {key: json.dumps(value) for key, value in vars(self.records).items() if key != "trials"}
        return {None: sweep_fields} | {
            number: _field_texts(self.records.trials[number]) for number in sorted(self.marked)
        }


def _field_texts(record: TrialRecord) -> dict[str, str]:
    """Return the fields of a trial as JSON, with the place of its rows and bundles relative to the sweep's folder."""
    home = f"trials/{record.number:04d}"
    bundles = {str(config["seed"]): f"{home}/bundles/seed-{config['seed']}" for config in record.configs}
    places = {"rows": f"{home}/rows.jsonl", "bundles": bundles}
    return {key: json.dumps(value) for key, value in (vars(record) | places).items()}


def _changed_fields(texts: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in texts.items() if before.get(key) != text}


def _json_line(texts: Mapping[str, str]) -> str:
    """Return one line of JSON from the JSON of its values."""
    return "{" + ", ".join(f'"{key}": {text}' for key, text in texts.items()) + "}"


def signed_objectives(metrics: Sequence[MetricConfig], objectives: Sequence[float] | None) -> list[float] | None:
    """Return the objectives as scores, for which greater is better; None without objectives."""
    if objectives is None:
        return None
    return [value if m.mode == "max" else -value for m, value in zip(metrics, objectives, strict=True)]


def ranked_trials(records: SweepRecords, metrics: Sequence[MetricConfig]) -> list[TrialRecord]:
    """Return the trials that have a result, in their rank.

    The finished ones come first, by their first metric, then the others by the steps that they reached.
    """
    scored = [
        record for record in records.trials if record.objectives is not None and record.status not in FAILED_STATUSES
    ]

    def merit(record: TrialRecord) -> tuple[bool, int, float]:
        scores = signed_objectives(metrics, record.objectives)
        value = -math.inf if scores is None else scores[0]
        finished = record.status == "finished"
        return finished, 0 if finished else record.steps, value

    return sorted(scored, key=merit, reverse=True)


def end_reason(record: TrialRecord, records: SweepRecords) -> str:
    """Return the reason why a trial did not train to its end; empty if it did, or has not ended."""
    if record.status == "stopped" and record.scores:
        at = max(record.scores)
        scores = [other.scores[at] for other in records.trials if at in other.scores]
        place = 1 + sum(score > record.scores[at] for score in scores)
        return f"{records.config['scheduler']['kind']}: place {place} of {len(scores)} at {at:,} steps"
    if record.status == "cut":
        return "the sweep's budget was used up"
    return record.error


def median_seed(rows: Sequence[Mapping[str, float]], seeds: Sequence[int], metric: MetricConfig) -> int:
    """Return the seed whose last value is the median of all seeds (the lower one of two)."""
    last: dict[int, float] = {}
    for row in rows:
        last |= {seed: row[f"seed-{seed}/{metric.name}"] for seed in seeds if f"seed-{seed}/{metric.name}" in row}
    ranked_seeds = sorted(seeds, key=lambda seed: last.get(seed, -math.inf) * (1 if metric.mode == "max" else -1))
    return ranked_seeds[(len(ranked_seeds) - 1) // 2]


def values_line(values: JsonMapping) -> str:
    """Return a configuration in one line."""
    return " ".join(
        f"{key.removeprefix('hyper.')}={value:.4g}"
        if isinstance(value, float)
        else f"{key.removeprefix('hyper.')}={value}"
        for key, value in values.items()
    )
