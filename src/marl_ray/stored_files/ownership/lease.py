"""The lease by which one driver owns the folder of a run or a sweep.

An owner creates the file `NAME/owner/N.json`, where N is one more than the greatest number there is: only one can. It
writes no other number's file, so a driver that slept while another took the name destroys nothing, and learns of it at
its next beat.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Self

from pyarrow import fs

from marl_ray.errors import MarlRayError, describe_error, one_line
from marl_ray.stored_files.durability import create_folder
from marl_ray.stored_files.folder_kinds import OWNER_FOLDER
from marl_ray.stored_files.json_files import write_json
from marl_ray.stored_files.ownership import owners
from marl_ray.stored_files.ownership.exclusive_file import create
from marl_ray.stored_files.ownership.owners import (
    RUNNING_STATE,
    Owner,
    newest_number,
    owner_file,
    owner_numbers,
    owner_of,
)
from marl_ray.stored_files.temporary_files import remove_temporary
from marl_ray.temporary_folders import start_of

WRITTEN_S = 1.0
"""Seconds within which a file of an owner that was just created is complete."""
PROBE_PREFIX = "now-"
"""First letters of the names of files that show the storage's time."""
MAX_TRIES = 8
"""Maximum number of times that others are first before the name is given up."""


class LeaseLostError(MarlRayError):
    """The folder has another owner."""


class Lease:
    """The claim by which one process owns a folder while a block runs.

    Entering raises MarlRayError if another process owns it; an error of the block becomes LeaseLostError if another
    process has taken it. `whose` names the folder in messages: `run 'first'`.
    """

    def __init__(self, filesystem: fs.FileSystem, folder: str, whose: str):
        self.filesystem, self.folder, self.whose = filesystem, folder, whose
        self.number = 0
        """Position among the owners that the folder has had, from 1."""
        self.lost = threading.Event()
        """Set when another process has taken the folder."""
        self.when_lost: Callable[[], object] = lambda: None
        """Called then, from another thread."""
        self.confirmed = 0.0
        """Time of the last proof that the folder has no other owner, in seconds since 1970."""
        self.confirming = threading.Lock()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._take()
        except OSError as error:
            raise MarlRayError(f"storage: {self.folder} cannot be owned: {one_line(error)}") from error
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done.set()
        self.thread.join(owners.BEAT_S)
        if self.lost.is_set() and isinstance(error, Exception):
            self.check()  # what failed since has failed by the loss
        with contextlib.suppress(OSError):  # a run has ended as it has, also where its state cannot be written
            if newest_number(self.filesystem, self.folder) != self.number:
                return
            if error is not None and self._holds_lease_alone():
                self.filesystem.delete_dir(self.folder)  # what was refused leaves nothing
            elif error is None:
                self._write(_describe_this_process("finished"))
            elif isinstance(error, Exception):
                self._write(_describe_this_process("failed", describe_error(error)))
            else:  # Ctrl-C, or an exit
                self._write(_describe_this_process("interrupted"))

    def owns(self) -> bool:
        """Return False if another process has taken the folder.

        Ask before doing what another owner may do too: a process that slept for LOST_S does not know before its
        next beat. If the storage does not answer, the lease counts as held.
        """
        if time.time() - self.confirmed >= owners.LOST_S:
            with contextlib.suppress(OSError):
                self._confirm()
        return not self.lost.is_set()

    def check(self) -> None:
        """Raise LeaseLostError if another process has taken the folder."""
        check_owned(self.filesystem, self.folder, self.number, self.whose)

    def _take(self) -> None:
        """Own the folder. Raises OSError, and MarlRayError if another process owns it."""
        create_folder(self.filesystem, f"{self.folder}/{OWNER_FOLDER}")
        for _ in range(MAX_TRIES):
            self.confirmed = time.time()
            last = newest_number(self.filesystem, self.folder)
            if last:
                self._wait_for_end(last)
            data = json.dumps(asdict(_describe_this_process(RUNNING_STATE))).encode()
            if not create(self.filesystem, owner_file(self.folder, last + 1), data):
                continue  # another was first
            if newest_number(self.filesystem, self.folder) == last + 1:
                self.number = last + 1
                for older in owner_numbers(self.filesystem, self.folder):
                    if older < self.number:
                        self._delete(older)
                self._remove_leftovers()
                return
            self._delete(last + 1)  # owners came and went since the numbers were read, and removed the files between
        raise MarlRayError(f"name: {self.whose} is being started by other processes; expected one")

    def _wait_for_end(self, number: int) -> None:
        """Check that the owner of this number has ended or counts as lost. Raises MarlRayError if it lives."""
        other = self._read(number)
        if other is not None and (other.state != RUNNING_STATE or other.is_gone()):
            return
        age = self._measure_age(number)
        if age < owners.LOST_S:
            place = "another process" if other is None else other.place
            raise MarlRayError(
                f"name: {self.whose} is owned by {place}, whose last beat is {age:.0f} s old; choose another name, or, if "
                f"that process is dead, wait {owners.LOST_S - age:.0f} s until it counts as lost"
            )

    def _read(self, number: int) -> Owner | None:
        """Return the owner of this number, whose file may be being written; None if it stays unreadable."""
        until = time.monotonic() + WRITTEN_S
        while (other := owner_of(self.filesystem, self.folder, number)) is None and time.monotonic() < until:
            time.sleep(WRITTEN_S / 20)
        return other

    def _measure_age(self, number: int) -> float:
        """Return the seconds since the owner of this number wrote its file, by the clock of the storage.

        The clocks of two machines may differ.
        """
        probe = f"{self.folder}/{OWNER_FOLDER}/{PROBE_PREFIX}{secrets.token_hex(8)}"
        with self.filesystem.open_output_stream(probe):
            pass  # it is written in its place: the owner, which begins now, removes files that are about to be moved
        infos = self.filesystem.get_file_info([probe, owner_file(self.folder, number)])
        self.filesystem.delete_file(probe)
        now, at = (info.mtime for info in infos)
        return owners.LOST_S if now is None or at is None else max(0.0, (now - at).total_seconds())

    def _delete(self, number: int) -> None:
        with contextlib.suppress(OSError):  # an owner that came later has deleted it
            self.filesystem.delete_file(owner_file(self.folder, number))

    def _remove_leftovers(self) -> None:
        """Remove what killed processes have left.

        A process that asks for the age of an owner now has a probe here, which is younger.
        """
        with contextlib.suppress(OSError):
            now = self.filesystem.get_file_info(owner_file(self.folder, self.number)).mtime
            for info in self.filesystem.get_file_info(fs.FileSelector(f"{self.folder}/{OWNER_FOLDER}")):
                probe = info.base_name.startswith(PROBE_PREFIX)
                if now and probe and info.mtime and (now - info.mtime).total_seconds() > owners.LOST_S:
                    self.filesystem.delete_file(info.path)
        for folder in (self.folder, f"{self.folder}/{OWNER_FOLDER}"):
            remove_temporary(self.filesystem, folder)

    def _holds_lease_alone(self) -> bool:
        """Return True if the folder holds the lease alone."""
        infos = self.filesystem.get_file_info(fs.FileSelector(self.folder))
        return {info.base_name for info in infos} == {OWNER_FOLDER}

    def _beat(self) -> None:
        """Confirm the lease every BEAT_S seconds, until it is done or lost."""
        while not self.done.wait(owners.BEAT_S):
            with contextlib.suppress(OSError):  # a run continues whose state cannot be written
                self._confirm()
            if self.lost.is_set():
                return

    def _confirm(self) -> None:
        """Give a beat, or learn that there is another owner. Raises OSError."""
        with self.confirming:
            at = time.time()
            if self._write(_describe_this_process(RUNNING_STATE)):
                self.confirmed = at
            elif not self.lost.is_set():
                self.lost.set()
                self.when_lost()

    def _write(self, owner: Owner) -> bool:
        """Write this owner's file, unless the folder has a later owner: then remove it and return False.

        Raises OSError.
        """
        is_owner = newest_number(self.filesystem, self.folder) <= self.number
        if is_owner:
            write_json(self.filesystem, owner_file(self.folder, self.number), asdict(owner))
            # A process that slept meanwhile has made the file anew, which the later owner had removed.
            is_owner = newest_number(self.filesystem, self.folder) <= self.number
        if not is_owner:
            self._delete(self.number)
        return is_owner


def check_owned(filesystem: fs.FileSystem, folder: str, number: int, whose: str) -> None:
    """Raise LeaseLostError if the folder has a later owner than that of this number, or this one has ended.

    A driver that is told to end may be gone before its workers are. If the storage does not answer, the folder counts as
    owned by this one.
    """
    with contextlib.suppress(OSError):
        last = newest_number(filesystem, folder)
        if last > number:
            other = owner_of(filesystem, folder, last)
            place = "another process" if other is None else other.place
            raise LeaseLostError(
                f"{whose} is now owned by {place}, which took it while this one gave no sign; this one stops"
            )
        owner = owner_of(filesystem, folder, number)
        if owner is not None and owner.state != RUNNING_STATE:
            raise LeaseLostError(f"{whose} has no owner any more: its driver ended as {owner.state!r}; this one stops")


def _describe_this_process(state: str, error: str | None = None) -> Owner:
    """Return this process as an owner in this state, with a beat now."""
    pid = os.getpid()
    host, address, machine = socket.gethostname(), owners.own_address(), owners.this_machine()
    return Owner(state, host, address, machine, pid, start_of(pid), time.time(), error)
