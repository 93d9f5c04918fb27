"""The records and rows of a sweep on a real S3 API."""

import json

import pytest
from toys.object_store import object_store
from toys.sweeps import ToySweep

from marl_ray.runs.stored import StoredSweep, stored
from marl_ray.tuning import lines, records
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.lines import Lines, LinesReader, read_lines
from marl_ray.tuning.records import CHANGES, RecordsFile, find_sweep, load_records


def test_records_and_rows_are_read_back_whenever_their_writer_dies(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(lines, "PART", 1000)
    monkeypatch.setattr(records, "LEAST_LOG", 10_000)
    with object_store() as bucket:
        sweep = ToySweep(tmp_path)
        folder = Folder(bucket, "toy")
        file, snapshots = RecordsFile(folder, sweep.records), set()
        for number in range(30):
            sweep.add({"hyper.lr": 0.01}, "running")
            file.save(sweep.records.trials[number])
            sweep.records.trials[number].steps += 100
            file.save(sweep.records.trials[number])
            assert load_records(folder) == sweep.records
            snapshots.add(json.loads(folder.read("sweep.json"))["changes"])
        assert 2 <= len(snapshots) <= 10 and folder.exists(f"{CHANGES}.000001")
        assert find_sweep("toy", bucket)[1] == sweep.records
        (listed,) = stored(bucket)
        assert isinstance(listed, StoredSweep) and len(listed.records["trials"]) == 30
        # The next driver does not know in which part the last one died.
        after = RecordsFile(Folder(bucket, "toy"), sweep.records)
        after.save()
        assert load_records(folder) == sweep.records and read_lines(folder, CHANGES) == []

        reader, writer, read = LinesReader(folder, "a/rows"), Lines(folder, "a/rows"), []
        for number in range(60):
            writer.append([f"row {number} {'x' * 50}"])
            read += reader.read() if number % 7 == 0 else []
        assert read + reader.read() == read_lines(folder, "a/rows")
        Lines(folder, "a/rows").keep(33)
        Lines(folder, "a/rows").append(["last"])
        assert [line.split(" x")[0] for line in read_lines(folder, "a/rows")[31:]] == ["row 31", "row 32", "last"]
