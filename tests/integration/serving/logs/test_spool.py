"""The spool: what is on disk, whose it is, and what of it can be read."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.errors import MarlRayError
from marl_ray.serving.logs import spool as spool_module
from marl_ray.serving.logs.spool import Spool, spool_folder

LIMIT = 10_000_000
WRITER = """
import sys
from marl_ray.serving.logs.spool import Spool
spool = Spool(sys.argv[1], 10_000_000)
assert spool.append([b"1", b"2"]) == 2
print("ready", flush=True)
sys.stdin.read()
"""
ADOPTER = """
import sys
from marl_ray.serving.logs.spool import Spool
spool = Spool(sys.argv[1], 10_000_000)
print("ready", flush=True)
sys.stdin.readline()
spool.adopt()
while (chunk := spool.peek(adopted=True)) is not None:
    for line in chunk.lines:
        print(line.decode())
    spool.mark_delivered(chunk)
"""


def child(code: str, folder: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", code, folder], stdin=-1, stdout=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def drain(spool: Spool, adopted: bool = False) -> list[bytes]:
    lines = []
    while (chunk := spool.peek(adopted)) is not None:
        lines += chunk.lines
        spool.mark_delivered(chunk)
    return lines


def files(folder) -> list:
    return sorted(folder.iterdir())


def fail_to_sync(*arguments: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_lines_come_back_in_order_and_their_files_go(tmp_path, monkeypatch):
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", 50)
    monkeypatch.setattr(spool_module, "CHUNK_BYTES", 25)
    spool = Spool(str(tmp_path), LIMIT)
    lines = [b"line %d" % i for i in range(100)]
    for i in range(0, 100, 5):
        assert spool.append(lines[i : i + 5]) == 5
    assert len(files(tmp_path)) > 5
    assert spool.size == sum(len(line) + 1 for line in lines)
    assert drain(spool) == lines
    assert (spool.size, files(tmp_path)) == (0, [])


@settings(max_examples=50)
@given(st.lists(st.one_of(st.just(None), st.lists(st.binary(max_size=9).filter(lambda b: b and b"\n" not in b)))))
def test_nothing_is_lost_or_doubled_whatever_the_order_of_writing_and_reading(tmp_path_factory, steps):
    spool = Spool(str(tmp_path_factory.mktemp("spool")), LIMIT)
    written, read = [], []
    for step in steps:
        if step is not None:
            assert spool.append(step) == len(step)
            written += step
        elif (chunk := spool.peek()) is not None:
            read += chunk.lines
            spool.mark_delivered(chunk)
    assert read + drain(spool) == written
    spool.close()


def test_bytes_are_bounded_and_what_fits_is_kept(tmp_path):
    spool = Spool(str(tmp_path), 20)
    assert spool.append([b"12345"] * 5) == 3
    assert spool.append([b"12345"]) == 0
    assert drain(spool) == [b"12345"] * 3
    assert spool.append([b"12345"]) == 1


def test_a_living_process_keeps_its_segment_and_a_killed_one_does_not(tmp_path):
    spool, owner = Spool(str(tmp_path), LIMIT), child(WRITER, str(tmp_path))
    spool.adopt()
    assert spool.peek(adopted=True) is None
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    spool.adopt()
    assert drain(spool, adopted=True) == [b"1", b"2"]
    assert files(tmp_path) == []


def test_of_many_that_would_adopt_one_does(tmp_path):
    for i in range(20):
        (tmp_path / f"exposures-1-{i:02}.jsonl").write_text(f"{i}\n")
    adopters = [child(ADOPTER, str(tmp_path)) for _ in range(3)]
    for adopter in adopters:
        adopter.stdin.write("go\n")
        adopter.stdin.flush()
    adopted = [line for adopter in adopters for line in adopter.communicate(timeout=60)[0].splitlines()]
    assert sorted(map(int, adopted)) == list(range(20))
    assert files(tmp_path) == []


def test_what_is_left_at_closing_is_for_the_next(tmp_path):
    first, second = Spool(str(tmp_path), LIMIT), Spool(str(tmp_path), LIMIT)
    first.append([b"a"])
    second.adopt()
    assert second.peek(adopted=True) is None
    first.close()
    second.adopt()
    assert drain(second, adopted=True) == [b"a"]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a\nb\nincompl", [b"a", b"b"]),
        (b"incompl", []),
        (b"a\n\nb\n", [b"a", b"b"]),
        (b"a\n" + bytes(30) + b"\nb\n", [b"a", bytes(20), bytes(10), b"b"]),  # longer than a chunk
    ],
)
def test_of_a_torn_file_the_whole_lines_are_read(tmp_path, monkeypatch, content, lines):
    monkeypatch.setattr(spool_module, "CHUNK_BYTES", 20)
    (tmp_path / "exposures-1-ab.jsonl").write_bytes(content)
    spool = Spool(str(tmp_path), LIMIT)
    spool.adopt()
    assert drain(spool, adopted=True) == lines
    assert files(tmp_path) == []


def test_a_failed_write_leaves_whole_lines(tmp_path):
    spool = Spool(str(tmp_path), LIMIT)
    spool.append([b"a"])
    path, (segment,) = files(tmp_path)[0], spool.own_segments
    right, segment.fd = segment.fd, os.open(path, os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        spool.append([b"b"])
    os.close(segment.fd)
    segment.fd = right
    spool.append([b"c"])
    assert drain(spool) == [b"a", b"c"]


def test_lines_whose_sync_failed_are_stored_once_by_the_next_try(tmp_path, monkeypatch):
    spool = Spool(str(tmp_path), LIMIT)
    spool.append([b"a"])
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail_to_sync)
        with pytest.raises(OSError, match="Input/output error"):
            spool.append([b"b", b"c"])
    assert files(tmp_path)[0].read_bytes() == b"a\n"
    assert spool.append([b"b", b"c"]) == 2
    assert drain(spool) == [b"a", b"b", b"c"]


def test_a_write_that_could_not_be_taken_back_is_overwritten_by_the_next(tmp_path, monkeypatch):
    spool = Spool(str(tmp_path), LIMIT)
    spool.append([b"a"])
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail_to_sync)
        patch.setattr("os.ftruncate", fail_to_sync)
        with pytest.raises(OSError, match="Input/output error"):
            spool.append([b"b"])
    spool.append([b"b"])
    spool.append([b"c"])
    assert files(tmp_path)[0].read_bytes() == b"a\nb\nc\n"
    assert drain(spool) == [b"a", b"b", b"c"]


def test_a_segment_whose_name_cannot_last_is_not_begun(tmp_path, monkeypatch):
    spool = Spool(str(tmp_path), LIMIT)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail_to_sync)
        with pytest.raises(OSError, match="Input/output error"):
            spool.append([b"a"])
    assert (files(tmp_path), spool.own_segments) == ([], [])
    spool.append([b"a"])
    assert drain(spool) == [b"a"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MarlRayError, match=r"spool: folder '.*file/x' cannot be written to"):
        Spool(str(tmp_path / "file" / "x"), LIMIT)


def test_databases_have_folders_of_their_own():
    first, second = (spool_folder("s", f"postgresql://u:{word}@h/db") for word in ("old", "new"))
    assert first == second != spool_folder("s", "postgresql://u:new@h/other")
    assert first.startswith("s/")
