"""The records and rows of a sweep on a real S3 API."""

import json
from itertools import pairwise

import pytest
from pyarrow import fs
from servers.object_store import object_store
from toy_runs.runs import config
from toy_runs.sweeps import ToySweep

from marl_ray.errors import MarlRayError
from marl_ray.runs.stored import StoredSweep, list_stored
from marl_ray.stored_files import appended_file
from marl_ray.stored_files.appended_file import parts_of
from marl_ray.stored_files.tail import Tail
from marl_ray.training.run_folder.record import record_of, write_record
from marl_ray.tuning import records_file
from marl_ray.tuning.folder import ROWS_FILE, Folder, read_rows
from marl_ray.tuning.lookup import find_sweep
from marl_ray.tuning.records_file import CHANGES_FILE, RecordsFile, load_records
from marl_ray.tuning.running.driver import check_sweep


@pytest.mark.long
def test_records_and_rows_are_read_back_whenever_their_writer_dies(monkeypatch, tmp_path):
    monkeypatch.setattr(appended_file, "PART_BYTES", 1000)
    monkeypatch.setattr(records_file, "MIN_LOG_BYTES", 10_000)
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
        assert 2 <= len(snapshots) <= 10 and len(parts_of(folder.filesystem, f"{folder.path}/{CHANGES_FILE}")) > 1
        assert find_sweep("toy", bucket)[1] == sweep.records
        (listed,) = list_stored(bucket)
        assert isinstance(listed, StoredSweep) and len(listed.records["trials"]) == 30
        # The next driver does not know in which part the last one died.
        after = RecordsFile(Folder(bucket, "toy"), sweep.records)
        after.save()
        assert load_records(folder) == sweep.records and folder.lines(CHANGES_FILE) == []

        reader, writer = Tail(folder.filesystem, f"{folder.path}/a/rows"), folder.open_lines("a/rows")
        read: list[str] = []
        for number in range(60):
            writer.append([f"row {number} {'x' * 50}"], durable=True)
            read += reader.read(len(read)) if number % 7 == 0 else []
        assert read + reader.read(len(read)) == folder.lines("a/rows")
        folder.open_lines("a/rows").keep(33)
        folder.open_lines("a/rows").append(["last"], durable=True)
        assert [line.split(" x")[0] for line in folder.lines("a/rows")[31:]] == ["row 31", "row 32", "last"]


@pytest.mark.long
def test_a_name_is_of_one_run_or_one_sweep_on_s3_too(tmp_path):
    with object_store() as bucket:
        run, sweep = config(f"storage={bucket}"), ToySweep(tmp_path)
        RecordsFile(Folder(bucket, "toy"), sweep.records).save()
        with pytest.raises(MarlRayError, match=r"^name: 'toy' is a sweep under 's3://bucket'; choose another name$"):
            record_of(run)
        other = run.model_copy(update={"name": "other"})
        write_record(other, record_of(other))
        with pytest.raises(MarlRayError, match=r"^name: 'other' is a run under 's3://bucket'; choose another name$"):
            check_sweep(sweep.config.model_copy(update={"name": "other", "storage": bucket}))


def test_a_sweep_goes_on_where_it_was_copied_to(tmp_path):
    sweep = ToySweep(tmp_path)
    record = sweep.train(sweep.add({"hyper.lr": 0.01}), 1.0, 2000)
    disk = sweep.end()
    file = RecordsFile(disk, sweep.records)
    file.save()
    file.save(record)
    with object_store("copies") as bucket:
        places = [disk, Folder(bucket, "toy"), Folder(str(tmp_path / "back"), "toy")]
        for old, new in pairwise(places):
            new.filesystem.create_dir(new.path)
            fs.copy_files(old.path, new.path, old.filesystem, new.filesystem)
            copied = load_records(new)
            assert copied == sweep.records and new.lines(CHANGES_FILE)
            file = RecordsFile(new, copied)
            file.save()
            copied.trials[0].steps += 100
            file.save(copied.trials[0])
            assert load_records(new) == copied and len(new.lines(CHANGES_FILE)) == 1
            sweep.records, trial = copied, Folder(new.uri, "trials", "0000")
            rows = read_rows(trial)
            trial.open_lines(ROWS_FILE).append(["{}"], durable=True)
            assert read_rows(trial) == [*rows, {}] and len(rows) >= 4
