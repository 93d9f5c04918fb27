"""Files that must outlast a loss of power: their bytes are synced, and so are their names and those of new folders."""

import errno
import os

import pytest
from pyarrow import fs
from synced_paths import watch_syncs

from marl_ray.serving.logs.acts import ActLog, LoggedAct
from marl_ray.serving.logs.spool import Spool
from marl_ray.stored_files.appended_file import appended_file
from marl_ray.stored_files.durability import create_folder, sync_to_disk
from marl_ray.stored_files.ownership import exclusive_file
from marl_ray.stored_files.temporary_files import replace_file
from marl_ray.training.checkpoints.storage import HashedStream, local_stored_folder

LOCAL = fs.LocalFileSystem()
TOY_ACT = LoggedAct("toy", "unit", "arm", "ab", 0, 1.0, 0.0, False, {"a": [0.0]}, {"a": 0}, {"a": 0.0})


def test_a_new_folder_is_a_lasting_name_of_each_folder_above_it(tmp_path, monkeypatch):
    synced = watch_syncs(monkeypatch)
    create_folder(LOCAL, str(tmp_path / "runs" / "first" / "owner"))
    assert sorted(synced) == [tmp_path, tmp_path / "runs", tmp_path / "runs" / "first"]
    create_folder(LOCAL, str(tmp_path / "runs" / "first" / "owner"))
    assert len(synced) == 3
    create_folder(fs.SubTreeFileSystem(str(tmp_path), LOCAL), "other/owner")
    assert len(synced) == 3 and (tmp_path / "other" / "owner").is_dir()


def test_a_replaced_file_has_a_lasting_name(tmp_path, monkeypatch):
    synced = watch_syncs(monkeypatch)
    replace_file(tmp_path / "run.json", b"{}")
    assert synced == [tmp_path / f".run.json.{os.getpid()}", tmp_path]


def test_a_file_that_one_process_creates_has_a_lasting_name(tmp_path, monkeypatch):
    synced = watch_syncs(monkeypatch)
    assert exclusive_file.create(LOCAL, str(tmp_path / "1.json"), b"{}")
    assert synced == [tmp_path / "1.json", tmp_path]


def test_the_name_of_an_appended_file_lasts_from_its_first_durable_line(tmp_path, monkeypatch):
    path, synced = tmp_path / "rows.jsonl", watch_syncs(monkeypatch)
    file = appended_file(LOCAL, str(path))
    file.append(["first"])
    assert synced == []
    file.append(["second"], durable=True)
    assert synced == [path, tmp_path]
    file.append(["third"], durable=True)
    assert synced == [path, tmp_path, path]
    file.close()
    assert synced[3:] == [path, tmp_path]


def test_a_file_of_a_checkpoint_has_a_lasting_name(tmp_path, monkeypatch):
    synced = watch_syncs(monkeypatch)
    stream = HashedStream(local_stored_folder(tmp_path) / "weights")
    stream.write(b"1")
    stream.close()
    assert synced == [tmp_path / "weights", tmp_path]


def test_a_segment_of_the_spool_has_a_lasting_name_before_its_first_line(tmp_path, monkeypatch):
    synced = watch_syncs(monkeypatch)
    spool = Spool(str(tmp_path / "spool"), 1000)
    assert synced[0] == tmp_path
    del synced[:]
    spool.append([b"line"])
    assert synced == [tmp_path / "spool", spool.own_segments[0].path]
    spool.close()


def test_a_complete_segment_of_acts_has_a_lasting_name_before_the_partial_one_is_gone(tmp_path, monkeypatch):
    synced = watch_syncs(monkeypatch)
    log = ActLog(str(tmp_path))
    log.put(TOY_ACT)
    log.close()
    (segment,) = (tmp_path / "toy").iterdir()
    assert synced[-2:] == [segment.with_name(f"{segment.name}.tmp"), tmp_path / "toy"]
    assert segment.name.endswith(".jsonl.zst")


def test_a_folder_that_its_file_system_cannot_sync_is_no_error_and_any_other_failure_is_one(tmp_path, monkeypatch):
    def refuse(number: int) -> None:
        def sync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", sync)

    refuse(errno.EINVAL)
    sync_to_disk(tmp_path)
    refuse(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_to_disk(tmp_path)
