"""The files of a sweep's records.

`sweep.json` holds all records as they were after `changes` changes; each line of `sweep.jsonl` is a later change and holds
the fields that it changed. `read_records` puts the two together.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from marl_ray.errors import MarlRayError, one_line
from marl_ray.json_types import JsonObject
from marl_ray.stored_files.appended_file import AppendedFile
from marl_ray.stored_files.folder_kinds import SWEEP_FILE
from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.records import SweepRecords, TrialRecord

CHANGES_FILE = "sweep.jsonl"
"""The later changes of the records, beside `sweep.json`."""
FORMAT = 1
"""Version of the layout of `sweep.json` and `sweep.jsonl`."""
MIN_LOG_BYTES = 1 << 16
"""Bytes of changes that are never worth writing all records anew."""
READ_ATTEMPTS = 5
"""Attempts to read records while their writer replaces `sweep.json` and empties `sweep.jsonl`."""


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


class LeasedRecords:
    """Saves the records of a sweep while this process owns it; later they are another owner's.

    A full disk does not end the sweep: `warn` gets a line about it, and the next change writes what could not be written.
    """

    def __init__(self, file: RecordsFile, lease: Lease, warn: Callable[[str], None]):
        self.file, self.lease, self.warn = file, lease, warn
        self.has_failed = False
        """True while the files lack a change."""

    def mark(self, record: TrialRecord) -> None:
        """Let the next change write this trial too."""
        self.file.mark(record)

    def save(self, *changed: TrialRecord, durable: bool = False) -> None:
        """Save the sweep's fields and the records that have changed (see `RecordsFile.save`)."""
        self._try(lambda: self.file.save(*changed, durable=durable))

    def save_all(self) -> None:
        """Save all records anew."""
        self._try(self.file.save_all)

    def _try(self, save: Callable[[], None]) -> None:
        if self.lease.lost.is_set():
            return
        try:
            save()
            self.has_failed = False
        except OSError as error:
            if not self.has_failed:
                self.warn(f"{SWEEP_FILE} is not up to date: {one_line(error)}")
            self.has_failed = True


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
