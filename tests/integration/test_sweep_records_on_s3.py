"""The records and rows of a sweep on a real S3 API."""

import json

import pytest
from toys.object_store import object_store
from toys.sweeps import ToySweep

from marl_ray.runs.stored import StoredSweep, stored
from marl_ray.training.journal.tail import Tail
from marl_ray.training.run_folder import appended_file
from marl_ray.training.run_folder.appended_file import parts_of
from marl_ray.tuning import records
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.records import CHANGES, RecordsFile, find_sweep, load_records


def test_records_and_rows_are_read_back_whenever_their_writer_dies(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(appended_file, "PART_BYTES", 1000)
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
        assert 2 <= len(snapshots) <= 10 and len(parts_of(folder.filesystem, f"{folder.path}/{CHANGES}")) > 1
        assert find_sweep("toy", bucket)[1] == sweep.records
        (listed,) = stored(bucket)
        assert isinstance(listed, StoredSweep) and len(listed.records["trials"]) == 30
        # The next driver does not know in which part the last one died.
        after = RecordsFile(Folder(bucket, "toy"), sweep.records)
        after.save()
        assert load_records(folder) == sweep.records and folder.lines(CHANGES) == []

        reader, writer, read = Tail(folder.filesystem, f"{folder.path}/a/rows"), folder.appended("a/rows"), []
        for number in range(60):
            writer.append([f"row {number} {'x' * 50}"], durable=True)
            read += reader.read(len(read)) if number % 7 == 0 else []
        assert read + reader.read(len(read)) == folder.lines("a/rows")
        folder.appended("a/rows").keep(33)
        folder.appended("a/rows").append(["last"], durable=True)
        assert [line.split(" x")[0] for line in folder.lines("a/rows")[31:]] == ["row 31", "row 32", "last"]
