"""One owner of a name: on local storage, on an object store over HTTP, and on storage that can only overwrite."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyarrow import fs
from servers.object_store import object_store
from waiting import until, until_ended

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.folder_kinds import OWNER_FOLDER
from marl_ray.stored_files.json_files import write_json
from marl_ray.stored_files.ownership import exclusive_file, owners
from marl_ray.stored_files.ownership import lease as lease_module
from marl_ray.stored_files.ownership.lease import Lease, LeaseLostError, check_owned
from marl_ray.stored_files.ownership.owners import newest_number, owner_file, owner_numbers, read_owner
from marl_ray.stored_files.temporary_files import remove_temporary

LOCAL = fs.LocalFileSystem()
RUN = "run 'first'"


@pytest.fixture(params=["local", "s3", "other"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple]:
    """A file system, and a run's folder in it."""
    if request.param == "s3":
        with object_store(f"bucket-{time.time_ns()}") as uri:  # a server forgets nothing within its process
            filesystem, root = fs.FileSystem.from_uri(uri)
            yield filesystem, f"{root}/runs/first"
    else:
        monkeypatch.setattr(exclusive_file, "SETTLE_S", 0.2)
        (tmp_path / "runs").mkdir()
        other = fs.SubTreeFileSystem(str(tmp_path), LOCAL)
        yield (other, "runs/first") if request.param == "other" else (LOCAL, str(tmp_path / "runs" / "first"))


def test_of_many_that_take_a_name_at_once_one_owns_it(place):
    together, over = threading.Barrier(6), threading.Event()
    numbers, refused = [], []

    def take() -> None:
        together.wait(60)
        try:
            with Lease(*place, whose=RUN) as lease:
                numbers.append(lease.number)
                over.wait(60)
        except MarlRayError as error:
            refused.append(str(error))
            if len(refused) == 5:
                over.set()

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(numbers) == 1 and len(refused) == 5
    line = rf"name: run 'first' is owned by process {os.getpid()} of \S+( \([\d.]+\))?, whose last beat is \d+ s old; "
    line += r"choose another name, or, if that process is dead, wait \d+ s until it counts as lost"
    assert all(re.fullmatch(line, text) for text in refused), refused


def test_one_that_is_refused_while_the_owner_tidies_reads_who_owns_the_name(tmp_path):
    """The age of an owner is read by a file that the owner's removal of temporary files leaves alone."""
    folder, over, refused = str(tmp_path / "first"), threading.Event(), []

    def tidy() -> None:
        while not over.is_set():
            remove_temporary(LOCAL, f"{folder}/{OWNER_FOLDER}")

    tidying = threading.Thread(target=tidy)
    with Lease(LOCAL, folder, RUN):
        tidying.start()
        for _ in range(400):
            with pytest.raises(MarlRayError) as error, Lease(LOCAL, folder, RUN):
                pass
            refused.append(str(error.value))
        over.set()
        tidying.join(60)
    assert {text.partition(" by process")[0] for text in refused} == {"name: run 'first' is owned"}


def test_owners_that_come_and_go_are_never_two_at_once(tmp_path):
    owned, together = threading.Lock(), 0
    taken: list[int] = []

    def come_and_go() -> None:
        nonlocal together
        end = time.monotonic() + 60
        while len(taken) <= 20 and time.monotonic() < end:
            try:
                with Lease(LOCAL, str(tmp_path), RUN) as lease:
                    together += not owned.acquire(blocking=False)
                    taken.append(lease.number)
                    owned.release()
            except MarlRayError:
                pass

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert together == 0 and len(taken) == len(set(taken)) > 20
    assert os.listdir(tmp_path / OWNER_FOLDER) == [f"{max(taken)}.json"]


def leave_as_another_machine(place: tuple) -> Path:
    """Leave the folder as a driver on another machine does that works; return the owner's file."""
    filesystem, folder = place
    with pytest.raises(KeyboardInterrupt), Lease(filesystem, folder, RUN):
        raise KeyboardInterrupt
    owner = read_owner(filesystem, folder)
    Path(folder).mkdir(exist_ok=True)
    assert owner is not None and owner.state == "interrupted"
    file = Path(owner_file(folder, newest_number(filesystem, folder)))
    file.write_text(
        json.dumps(asdict(replace(owner, state="running", machine="another", host="far", address="10.0.0.7")))
    )
    return file


@pytest.fixture
def local(tmp_path: Path) -> tuple:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "run.json").write_text("{}")
    return LOCAL, str(tmp_path / "first")


def test_an_owner_on_another_machine_counts_as_lost_after_a_minute_without_a_beat(local):
    file = leave_as_another_machine(local)
    os.utime(file, (time.time() - 40, time.time() - 40))
    with pytest.raises(MarlRayError, match=r"of far \(10.0.0.7\), whose last beat is 4\d s old; .*wait (20|19|18) s"):
        Lease(*local, whose=RUN).__enter__()
    os.utime(file, (time.time() - 61, time.time() - 61))
    with Lease(*local, whose=RUN) as lease:
        assert lease.number == 2 and not file.exists()


def test_the_clock_of_the_storage_counts_where_the_owners_differs(local):
    file = leave_as_another_machine(local)
    data = json.loads(file.read_text())
    for wrong in (-3600, 3600):
        file.write_text(json.dumps(data | {"at": time.time() + wrong}))
        with pytest.raises(MarlRayError, match="last beat is 0 s old"):
            Lease(*local, whose=RUN).__enter__()


def test_a_file_of_an_owner_that_cannot_be_read_refuses_until_it_is_old(local):
    file = leave_as_another_machine(local)
    file.write_text("")  # as it is between its creation and its first word
    with pytest.raises(MarlRayError, match="is owned by another process, whose last beat is"):
        Lease(*local, whose=RUN).__enter__()
    os.utime(file, (time.time() - 61, time.time() - 61))
    with Lease(*local, whose=RUN) as lease:
        assert lease.number == 2


OWNER_PROCESS = """
import sys, time
from pyarrow import fs
from marl_ray.stored_files.ownership import owners
from marl_ray.stored_files.ownership.lease import Lease
owners.BEAT_S = 0.1
with Lease(fs.LocalFileSystem(), sys.argv[1], "run 'first'") as lease:
    lease.when_lost = lambda: print("lost", flush=True)
    print("owned", flush=True)
    assert lease.lost.wait(60)
    lease.check()
"""


def test_a_process_that_slept_is_replaced_and_stops_when_it_wakes(local, monkeypatch):
    monkeypatch.setattr(owners, "LOST_S", 1.0)
    command = [sys.executable, "-c", OWNER_PROCESS, local[1]]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == "owned\n"
            first = read_owner(*local)
            assert first is not None
            until(lambda: (now := read_owner(*local)) is not None and now.at > first.at + owners.LOST_S, "a late beat")
            with pytest.raises(MarlRayError, match=f"is owned by process {other.pid}"):
                Lease(*local, whose=RUN).__enter__()
            other.send_signal(signal.SIGSTOP)
            # The lease measures the age by the storage's clock, which may be some milliseconds behind.
            late_s = 0.2
            until(
                lambda: (now := read_owner(*local)) is not None and not now.is_alive(time.time() - late_s), "the loss"
            )
            with Lease(*local, whose=RUN) as lease:
                assert lease.number == 2
                other.send_signal(signal.SIGCONT)
                printed, error = other.communicate(timeout=60)
                lease.check()
        finally:
            other.kill()
    assert printed == "lost\n"
    assert f"LeaseLostError: run 'first' is now owned by process {os.getpid()} of " in error
    owner = read_owner(*local)
    assert owner is not None and owner.state == "finished" and owner.pid == os.getpid()
    assert newest_number(*local) == 2


def test_a_clock_that_was_set_leaves_a_living_owner_its_name(local, monkeypatch):
    """The kernel then says that the machine, and with it every process, began at another time."""
    began = psutil._pslinux.boot_time()  # noqa: SLF001  psutil's
    with Lease(*local, whose=RUN):
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: began + 3600)  # noqa: SLF001  psutil's
        with pytest.raises(MarlRayError, match=f"is owned by process {os.getpid()} of "):
            Lease(*local, whose=RUN).__enter__()


def test_a_process_that_was_killed_is_replaced_at_once(local):
    with subprocess.Popen([sys.executable, "-c", OWNER_PROCESS, local[1]], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "owned\n"
        other.kill()
        until_ended([psutil.Process(other.pid)])
        with Lease(*local, whose=RUN) as lease:
            assert lease.number == 2


def test_an_owner_removes_what_killed_processes_left_and_no_probe_in_use(local):
    folder = Path(local[1])
    (folder / OWNER_FOLDER).mkdir()
    for name in (".metrics.jsonl.999", ".run.json.999", "owner/.3.json.999", "owner/now-old", "owner/now-new"):
        (folder / name).touch()
    os.utime(folder / OWNER_FOLDER / "now-old", (time.time() - 100, time.time() - 100))
    (folder / ".hidden").touch()
    with Lease(*local, whose=RUN):
        assert {path.name for path in folder.iterdir()} == {OWNER_FOLDER, "run.json", ".hidden"}
        assert {path.name for path in (folder / OWNER_FOLDER).iterdir()} == {"1.json", "now-new"}


def test_an_owner_that_slept_asks_whether_it_owns_the_folder(local):
    with pytest.raises(LeaseLostError), Lease(*local, whose=RUN) as lease:  # noqa: PT012  all that an owner does
        assert lease.owns()
        Path(owner_file(local[1], 2)).write_text("{}")
        assert lease.owns()  # nobody else can be the owner a moment after that was proved
        lost = []
        lease.when_lost = lambda: lost.append(1)
        lease.confirmed -= owners.LOST_S
        assert not lease.owns() and not lease.owns() and lost == [1]
        lease.check()


@pytest.mark.parametrize("ends", [False, True])
def test_an_owner_that_slept_while_it_wrote_its_file_leaves_none(place, ends, monkeypatch):
    filesystem, folder = place
    with Lease(*place, whose=RUN) as lease:

        def asleep(*arguments: Any) -> None:
            """Write the file after another process has taken the folder and removed the file that was there."""
            write_json(filesystem, owner_file(folder, 2), {})
            filesystem.delete_file(owner_file(folder, 1))
            write_json(*arguments)

        monkeypatch.setattr(lease_module, "write_json", asleep)
        if not ends:
            lease.confirmed -= owners.LOST_S
            assert not lease.owns()
    assert owner_numbers(filesystem, folder) == [2]


def test_what_is_refused_leaves_nothing(place):
    with pytest.raises(ValueError, match="no"), Lease(*place, whose=RUN):
        raise ValueError("no")
    filesystem, folder = place
    assert filesystem.get_file_info(folder).type == fs.FileType.NotFound


def test_what_works_for_an_owner_that_has_ended_stops(place):
    filesystem, folder = place
    with pytest.raises(KeyboardInterrupt), Lease(*place, whose=RUN) as lease:  # noqa: PT012  all that an owner does
        write_json(filesystem, f"{folder}/run.json", {})
        check_owned(filesystem, folder, lease.number, RUN)
        raise KeyboardInterrupt
    with pytest.raises(
        LeaseLostError, match=f"^{RUN} has no owner any more: its driver ended as 'interrupted'; this one"
    ):
        check_owned(filesystem, folder, lease.number, RUN)


def test_storage_that_does_not_answer_ends_no_run(local):
    with Lease(*local, whose=RUN) as lease:
        os.rename(local[1], f"{local[1]}-away")
        lease.check()
        os.rename(f"{local[1]}-away", local[1])
        Path(owner_file(local[1], 2)).write_text("{}")
        with pytest.raises(LeaseLostError, match="is now owned by another process"):
            lease.check()
