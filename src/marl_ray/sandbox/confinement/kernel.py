"""Raw calls of the Linux kernel that Python lacks: prctl, capset, namespaces, mounts."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long] * 7
_libc.syscall.restype = ctypes.c_long
_python = ctypes.PyDLL(None)  # calls that keep the interpreter's lock
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38  # linux/prctl.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000  # linux/sched.h
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000  # linux/sched.h
MS_RDONLY = 1  # linux/mount.h, as those below
MS_NOSUID = 2  # set-user-id bits have no effect
MS_NODEV = 4  # device files cannot be opened
MS_NOEXEC = 8  # no program can be started
_MS_BIND = 4096  # show a folder at a second path
_MS_REC = 16384  # with what is mounted below it
MS_PRIVATE = 1 << 18  # mounts and unmounts stay in this namespace
_CLOSE_RANGE, _MOUNT_SETATTR = 436, 442  # the same number on every architecture, as all calls since 5.1
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2  # linux/fcntl.h, and MNT_DETACH of sys/mount.h


def syscall(number: int, *args: int) -> int:
    """Make a system call by number. Raises OSError if it fails."""
    result = int(_libc.syscall(number, *args, *[0] * (6 - len(args))))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def fork() -> int:
    """Fork a process of one thread by the C library alone, and return as `os.fork` does.

    The hooks of `os.fork` cost a child a tenth of a short run. They renew locks that other threads might hold,
    which a process of one thread does not need, and reseed `random`, which the caller does. Raises OSError if the
    kernel refuses.
    """
    pid = int(_python.fork())
    if pid < 0:
        raise OSError("fork failed")
    return pid


def _check_result(result: int, call: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def prctl(option: int, value: int = 0, pointer: int = 0) -> None:
    """Call prctl(2). Raises OSError if the kernel refuses."""
    _check_result(_libc.prctl(option, value, pointer, 0, 0), "prctl")


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    syscall(_CLOSE_RANGE, first, 0xFFFFFFFF, 0)


def drop_capabilities() -> None:
    """Give up every capability."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    words = (ctypes.c_uint32 * 6)()  # two each of effective, permitted and inheritable
    _check_result(_libc.capset(header, words), "capset")


def unshare(flags: int) -> None:
    """Call unshare(2) with these CLONE_ flags. Raises OSError if the kernel refuses."""
    _check_result(_libc.unshare(flags), "unshare")


def make_mounts_read_only() -> None:
    """Make every mount of this mount namespace private, read-only and without set-uid."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID, 0, MS_PRIVATE, 0)
    path = ctypes.create_string_buffer(b"/")
    pointers = ctypes.addressof(path), ctypes.addressof(attributes)
    syscall(_MOUNT_SETATTR, _AT_FDCWD, pointers[0], _AT_RECURSIVE, pointers[1], ctypes.sizeof(attributes))


def mount(kind: str, path: str, flags: int, options: str) -> None:
    """Mount a file system without devices, set-uid and executables."""
    flags |= MS_NOSUID | MS_NODEV | MS_NOEXEC
    _check_result(_libc.mount(kind.encode(), path.encode(), kind.encode(), flags, options.encode()), f"mount {path}")


def unmount(path: str) -> None:
    """Unmount the last mount on a path; it is gone as soon as nobody uses it."""
    _check_result(_libc.umount2(path.encode(), _MNT_DETACH), f"unmount {path}")


def bind_mount(fd: int, target: str) -> None:
    """Show the directory behind a descriptor at a path too."""
    _check_result(
        _libc.mount(f"/proc/self/fd/{fd}".encode(), target.encode(), None, _MS_BIND | _MS_REC, None), f"bind {target}"
    )
