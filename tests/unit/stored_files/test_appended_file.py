"""A file of lines that grows: on a file system one file, on an object store a folder of parts."""

from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from marl_ray.stored_files import appended_file as files
from marl_ray.stored_files.appended_file import COPY_SUFFIX, appended_file, lines_of, parts_of
from marl_ray.stored_files.tail import Tail

LOCAL = fs.LocalFileSystem()
STORAGES = pytest.mark.parametrize("remote", [False, True], ids=["local", "object store"])


def place_at(root: Path, remote: bool) -> tuple[fs.FileSystem, str]:
    """A file system, and the path of a file in it; a `remote` one is only ever written in whole files."""
    return (fs.SubTreeFileSystem(str(root), LOCAL), "rows") if remote else (LOCAL, str(root / "rows"))


def full(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


class Store:
    """A file system that takes no file while it `refuses`."""

    def __init__(self, filesystem: fs.FileSystem):
        self.filesystem, self.refuses = filesystem, False

    def __getattr__(self, name: str) -> Any:
        return full if self.refuses and name == "open_output_stream" else getattr(self.filesystem, name)


@STORAGES
def test_lines_are_read_once_while_they_are_written_and_some_first_ones_are_kept(tmp_path, monkeypatch, remote):
    monkeypatch.setattr(files, "PART_BYTES", 20)
    place = place_at(tmp_path, remote)
    reader, writer, read = Tail(*place), appended_file(*place), 0
    assert reader.read(0) == []
    for number in range(9):
        writer.append([f"row {number}", "\u2028\r"], durable=True)
        assert reader.read(read) == [f"row {number}", "\u2028\r"]
        read += 2
        assert reader.read(read) == []
    if remote:
        assert max(info.size for info in parts_of(*place)) <= 20
    everything = lines_of(*place)
    for count in (18, 13, 6, 0):
        appended_file(*place).keep(count)
        assert lines_of(*place) == everything[:count]
    appended_file(*place).append(["anew"], durable=True)
    assert lines_of(*place) == ["anew"]


@STORAGES
def test_durable_lines_that_are_refused_are_never_written(tmp_path, monkeypatch, remote):
    monkeypatch.setattr(files, "PART_BYTES", 20)
    place = place_at(tmp_path, remote)
    storage = Store(place[0])
    file = appended_file(storage if remote else LOCAL, place[1])
    file.append(["first line"], durable=True)
    with monkeypatch.context() as patch:
        storage.refuses = True
        patch.setattr("os.fsync", full)
        for line in ("refused", "another"):
            with pytest.raises(OSError, match="No space left on device"):
                file.append([line], durable=True)
    storage.refuses = False
    assert lines_of(*place) == ["first line"]
    file.append(["second line"], durable=True)
    assert lines_of(*place) == ["first line", "second line"]


def test_lines_that_were_not_removed_at_the_first_try_are_at_the_next(tmp_path, monkeypatch):
    """An object store may refuse between two parts."""
    monkeypatch.setattr(files, "PART_BYTES", 20)
    place = place_at(tmp_path, remote=True)
    file = appended_file(*place)
    for number in range(6):
        file.append([f"line {number} {'x' * 8}"], durable=True)
    (tmp_path / "rows" / f"{3:012d}").rename(tmp_path / "kept")
    (tmp_path / "rows" / f"{3:012d}").mkdir()
    with pytest.raises(OSError, match="directory"):
        file.keep(1)
    assert len(parts_of(*place)) == 4
    (tmp_path / "rows" / f"{3:012d}").rmdir()
    (tmp_path / "kept").rename(tmp_path / "rows" / f"{3:012d}")
    file.keep(1)
    file.append(["anew"], durable=True)
    assert [line.split(" x")[0] for line in lines_of(*place)] == ["line 0", "anew"]


def test_whoever_was_stopped_before_its_first_line_writes_none_after_another_has_begun(tmp_path):
    """A worker that sleeps is replaced; then it wakes up and writes the row that it was about to write."""
    path = tmp_path / "metrics.jsonl"
    asleep = appended_file(fs.LocalFileSystem(), str(path))
    asleep.keep(0)
    for number in range(3):  # of which one may be given the number of a file that is gone
        other = appended_file(fs.LocalFileSystem(), str(path))
        other.keep(0)
        with pytest.raises(OSError, match="was changed by another process"):
            asleep.append(["asleep"])
        other.append([f"other {number}"])
        with pytest.raises(OSError, match="was changed by another process"):
            asleep.append(["asleep"])
        other.close()
    assert path.read_text() == "other 2\n"


@STORAGES
@pytest.mark.parametrize("killed", ["not", "with nothing in its place", "with a half in its place"])
def test_a_file_that_was_copied_from_the_other_storage_goes_on(tmp_path, remote, killed):
    place = place_at(tmp_path, remote)
    copy = tmp_path / (f"rows{COPY_SUFFIX}" if killed != "not" else "rows")
    if remote:
        copy.write_text("one\ntwo\nthr")
    else:
        copy.mkdir()
        (copy / f"{0:012d}").write_text("one\n")
        (copy / f"{1:012d}").write_text("two\n")
    if killed == "with a half in its place":
        half = tmp_path / "rows" / f"{0:012d}" if remote else tmp_path / "rows"
        half.parent.mkdir(exist_ok=True)
        half.write_text("on")
    if killed == "not":
        assert lines_of(*place) == ["one", "two"]  # whoever only reads leaves it
    file = appended_file(*place)
    assert lines_of(*place) == Tail(*place).read(0) == ["one", "two"]
    file.append(["three"], durable=True)
    file.close()
    assert lines_of(*place) == ["one", "two", "three"] and [path.name for path in tmp_path.iterdir()] == ["rows"]
    assert (tmp_path / "rows").is_dir() == remote
