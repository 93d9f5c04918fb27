"""Temporary folders name their process, and those of killed ones are removed; nothing else makes any."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from marl_ray.temporary_folders import (
    new_temporary_folder,
    remove_leftovers,
    short_folder,
    start_of,
    temporary_folder,
)

MAKE = """
import tempfile
from marl_ray.temporary_folders import new_temporary_folder, short_folder
(new_temporary_folder("bundle") / "file").write_text("x")
(short_folder("ray", tempfile.gettempdir()) / "file").write_text("x")
print("made", flush=True)
input()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder of this test and its children."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    remove_leftovers.cache_clear()
    return tmp_path


def test_a_killed_process_leaves_nothing_that_the_next_one_does_not_remove(root):
    others = [
        root / "marl-ray-bundle-00000000-1-1-abc",
        root / "marl-ray-other",
        root / "mine-1-2",
        root / "mr-0a1b2c3d",
    ]
    for other in others:  # of another machine, or of nobody we know
        other.mkdir()
    command = [sys.executable, "-c", MAKE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "made\n"
        alive = sorted(set(root.iterdir()) - set(others))
        assert len(alive) == 2 and len(alive[1].name) == len("mr-01234567")
        with temporary_folder("check") as own_folder:
            assert all(folder.exists() for folder in alive) and own_folder.is_dir()  # their process lives
        assert not own_folder.exists()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    remove_leftovers.cache_clear()  # as in a process that has just begun
    new_folders = {new_temporary_folder("check"), short_folder("ray", str(root))}
    assert set(root.iterdir()) == {*others, *new_folders} and {each.stat().st_mode & 0o777 for each in new_folders} == {
        0o700
    }


def test_a_number_that_another_process_has_now_counts_as_another(root):
    own_folder = new_temporary_folder("check")
    purpose, machine, process, start, end = own_folder.name.rsplit("-", 4)
    assert int(process) == os.getpid()
    earlier = root / "-".join([purpose, machine, process, str(int(start) - 1), end])
    earlier.mkdir()
    remove_leftovers.cache_clear()
    remove_leftovers(str(root))
    assert own_folder.exists() and not earlier.exists()


def test_the_start_of_a_process_is_read_whatever_it_calls_itself():
    code = "open('/proc/self/comm', 'wb').write(b') Z 1 \\xff'); print('named', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        before = start_of(child.pid)
        assert child.stdout is not None and child.stdout.readline() == b"named\n"
        assert start_of(child.pid) == before > 0
        child.communicate(b"\n", timeout=60)
    assert start_of(child.pid) == 0
