"""The records of a sweep on disk: what a driver has written survives its death at any byte, at the same cost per change."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs
from toy_runs.sweeps import finished_sweep

from marl_ray.config.sweep import MetricConfig
from marl_ray.errors import MarlRayError
from marl_ray.runs.stored import StoredSweep, find_entry, list_stored
from marl_ray.stored_files import appended_file as files
from marl_ray.stored_files.folder_kinds import SWEEP_FILE
from marl_ray.tuning import records_file
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.lookup import find_sweep, winner_of
from marl_ray.tuning.records import SweepRecords, TrialRecord, median_seed
from marl_ray.tuning.records_file import CHANGES_FILE, RecordsFile, load_records

STORAGES = pytest.mark.parametrize("remote", [False, True], ids=["local", "object store"])


def folder_at(path: Path, remote: bool) -> Folder:
    """A folder; a `remote` one is only ever written in whole files, as an object store is."""
    folder = Folder(str(path), "s")
    if remote:
        folder.filesystem = fs.SubTreeFileSystem("/", fs.LocalFileSystem())
    return folder


def change(records: SweepRecords, rng: Any) -> list[TrialRecord]:
    """Change some records as a sweep does, and return the trials that changed."""
    if not records.trials or rng.random() < 0.5:
        number = len(records.trials)
        records.trials.append(TrialRecord(number, {"hyper.lr": rng.random()}, configs=[{"seed": 0, "text": "é\n"}]))
        return records.trials[-1:]
    changed = rng.sample(records.trials, rng.randint(1, len(records.trials)))
    for record in changed:
        record.state, record.steps = "waiting", record.steps + 100
        record.scores[record.steps] = rng.random()
        record.history[record.steps] = dict(record.values)
    records.seconds += 1.5
    return changed


@STORAGES
@settings(max_examples=30, deadline=None)
@given(rng=st.randoms(use_true_random=False), saves=st.integers(1, 12), data=st.data())
def test_a_driver_killed_at_any_byte_has_lost_no_change_that_it_had_saved(remote, rng, saves, data, tmp_path_factory):
    folder = folder_at(tmp_path_factory.mktemp("s"), remote)
    records = SweepRecords("s", {"a": 1}, {})
    file = RecordsFile(folder, records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_file, "MIN_LOG_BYTES", data.draw(st.sampled_from([0, 600, 10**6])))
        patch.setattr(files, "PART_BYTES", data.draw(st.sampled_from([1, 300, 10**6])))
        for _ in range(saves):
            file.save(*change(records, rng))
            assert load_records(folder) == records
        before, content = copy.deepcopy(records), _files(folder)
        file.save(*change(records, rng))
    after = _files(folder)
    if after[SWEEP_FILE] != content.get(SWEEP_FILE):
        if data.draw(st.booleans()):  # it dies between the two files
            for name in content.keys() - {SWEEP_FILE}:
                Path(folder.path, name).write_bytes(content[name])
    elif not remote:  # an object store has the new object or the old one
        length = data.draw(st.integers(len(content.get(CHANGES_FILE, b"")), len(after[CHANGES_FILE])))
        Path(folder.path, CHANGES_FILE).write_bytes(after[CHANGES_FILE][:length])
        records = records if length == len(after[CHANGES_FILE]) else before
    loaded = load_records(folder_at(Path(folder.path).parent, remote))
    assert loaded == records
    # The driver that follows writes after it, wherever the file ends.
    assert loaded is not None
    again = RecordsFile(folder, loaded)
    for _ in range(3):
        again.save(*change(loaded, rng))
        assert load_records(folder) == loaded
    shutil.rmtree(folder.path)


def _files(folder: Folder) -> dict[str, bytes]:
    paths = (path for path in Path(folder.path).rglob("*") if path.is_file())
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in paths}


def test_the_bytes_of_a_change_do_not_grow_with_the_number_of_trials(tmp_path, monkeypatch):
    written, write = [], Folder.write

    def count_and_write(self: Folder, name: str, data: bytes) -> None:
        written.append(len(data))
        write(self, name, data)

    monkeypatch.setattr(Folder, "write", count_and_write)
    per_change = []
    for trials in (25, 200):
        written.clear()
        folder = Folder(str(tmp_path), f"s{trials}")
        records = SweepRecords("s", {}, {})
        file = RecordsFile(folder, records)
        for number in range(trials):
            records.trials.append(TrialRecord(number, {}, configs=[{"seed": 0, "text": "x" * 3000}]))
            for steps in (0, 1):
                records.trials[number].steps = steps
                file.save(records.trials[number])
        per_change.append(sum(written) / trials / 2)
        assert load_records(folder) == records
    assert per_change[1] < 2.5 * 3500 / 2 and per_change[1] < 2 * per_change[0]


def test_a_disk_that_was_full_costs_no_change(tmp_path, monkeypatch):
    folder, records = Folder(str(tmp_path), "s"), SweepRecords("s", {}, {})
    file = RecordsFile(folder, records)
    records.trials.append(TrialRecord(0, {}))
    file.save(records.trials[0])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        records.trials[0].steps = 5
        with pytest.raises(OSError, match="No space left"):
            file.save(records.trials[0], durable=True)
    assert load_records(folder) == SweepRecords("s", {}, {}, changes=1, trials=[TrialRecord(0, {})])
    file.save()
    assert load_records(folder) == records and records.trials[0].steps == 5


def test_all_readers_see_the_changes_that_followed_sweep_json(tmp_path):
    sweep = finished_sweep(tmp_path, trials=3)
    folder = sweep.end()
    file = RecordsFile(folder, sweep.records)
    file.save()
    sweep.records.winner_model, sweep.records.trials[0].steps = "models:/toy/2", 77
    file.save(sweep.records.trials[0])
    assert json.loads((tmp_path / "toy" / SWEEP_FILE).read_text())["winner_model"] == "models:/toy/1"
    assert find_sweep("toy", str(tmp_path))[1].trials[0].steps == 77
    assert winner_of("toy", str(tmp_path))[0] == "models:/toy/2"
    (listed,) = list_stored(str(tmp_path))
    assert isinstance(listed, StoredSweep) and listed.records["trials"][0]["steps"] == 77
    with (tmp_path / "toy" / CHANGES_FILE).open("a") as stream:
        stream.write('{"changes": "x"}\n')
    with pytest.raises(
        MarlRayError, match=r"sweep\.json is not the record of a sweep: sweep\.jsonl, line 2: expected a"
    ):
        find_sweep("toy", str(tmp_path))
    (tmp_path / "toy" / CHANGES_FILE).write_text('{"changes": 99, "trials": []}\n')
    with pytest.raises(MarlRayError, match=r"sweep\.jsonl lacks the changes that follow number "):
        find_sweep("toy", str(tmp_path))


def test_records_of_another_format_are_refused_by_name(tmp_path):
    folder = finished_sweep(tmp_path, trials=2).end()
    path = tmp_path / "toy" / SWEEP_FILE
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    error = f"{path} has sweep format 2, expected 1; it can be read by the version of marl-ray that wrote it"
    for read in (
        lambda: load_records(folder),
        lambda: find_sweep("toy", str(tmp_path)),
        lambda: find_entry("toy", str(tmp_path)),
    ):
        with pytest.raises(MarlRayError, match=f"^{re.escape(error)}$"):
            read()


@pytest.mark.parametrize(("mode", "seed"), [("max", 0), ("min", 1)])
def test_a_seed_without_a_value_is_the_worst_of_all(mode, seed):
    rows = [{"seed-0/loss": 1.0, "seed-1/loss": 2.0}]
    assert median_seed(rows, [0, 1, 2], MetricConfig(name="loss", mode=mode)) == seed
