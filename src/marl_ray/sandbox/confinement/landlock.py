"""Landlock, by which a process gives up access to every path that it does not list.

It needs ABI 3, of Linux 6.2, or a later one.
"""

import ctypes
import os
from collections.abc import Iterable

from marl_ray.sandbox.confinement.kernel import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same number on every architecture
_RULE_PATH_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH of linux/landlock.h
OLDEST_ABI = 3
"""Before ABI 3 Landlock does not govern truncation, so a confined program could empty its user's files."""

WRITE_FILE = 1 << 1  # LANDLOCK_ACCESS_FS_WRITE_FILE, as the rights below; all are of linux/landlock.h
READ_FILE = 1 << 2  # to open a file for reading
READ_DIR = 1 << 3  # to list a folder
TRUNCATE = 1 << 14  # since ABI 3
IOCTL_DEV = 1 << 15  # since ABI 5: ioctl on a device
READ_ACCESS = READ_FILE | READ_DIR
_EXECUTE = 1 << 0  # to start a file as a program; runs never may
_ON_FILES = _EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
_REMOVE = 0b110000  # REMOVE_DIR | REMOVE_FILE
_MAKE_DIR = 1 << 7  # to make a folder in a folder
_MAKE_REG = 1 << 8  # to make a file
_MAKE_FIFO = 1 << 10  # to make a named pipe
_MAKE_SYM = 1 << 12  # to make a symbolic link
_REFER = 1 << 13  # since ABI 2: to link or move a file to another folder
FOLDER_ACCESS = READ_ACCESS | WRITE_FILE | TRUNCATE | _REMOVE | _MAKE_DIR | _MAKE_REG | _MAKE_FIFO | _MAKE_SYM | _REFER
DEVICE_ACCESS = READ_FILE | WRITE_FILE


def abi_version() -> int:
    """Return the host's Landlock ABI; 0 if it has none."""
    try:
        return syscall(_CREATE_RULESET, 0, 0, 1)
    except OSError:
        return 0


def create_ruleset(rules: Iterable[tuple[str, int]]) -> int:
    """Create a rule set that allows these accesses to each path and beneath it, and return its descriptor.

    If the ABI has them, TCP (4) and signals to and abstract sockets of processes outside (6) are refused as well.
    Paths that do not exist are left out. Raises OSError if the host has no Landlock.
    """
    version = abi_version()
    # one bit for each right on files that the version knows, and one each for TCP's bind and connect, and for scopes
    handled = (1 << {3: 15, 4: 15}.get(version, 16)) - 1
    attributes = (ctypes.c_uint64 * 3)(handled, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 8  # the bytes of struct landlock_ruleset_attr that the version knows
    if version >= 4:
        size = 16 if version < 6 else 24
    fd = syscall(_CREATE_RULESET, ctypes.addressof(attributes), size, 0)
    for path, access in rules:
        try:
            target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            access &= _ON_FILES
        beneath = (access & handled).to_bytes(8, "little") + target.to_bytes(4, "little")  # a packed struct
        buffer = ctypes.create_string_buffer(beneath, len(beneath))
        syscall(_ADD_RULE, fd, _RULE_PATH_BENEATH, ctypes.addressof(buffer), 0)
        os.close(target)
    return fd


def restrict(fd: int) -> None:
    """Apply a rule set to this thread, for good. Needs no_new_privs."""
    syscall(_RESTRICT_SELF, fd, 0)
