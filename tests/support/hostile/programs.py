"""Hostile programs from a grammar, and what is known of a worker and its host: a run must leave both as they were."""

import os
import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_ray.sandbox import Pool

SETTLE_S = 5.0
"""After a run, until its server does nothing any more."""
PATHS = (
    "'.'", "'..'", "'f'", "'d'", "'d/e'", "'\\n'", "'x' * 250", "'/dev/null'", "'/dev/zero'", "'/tmp'", "'/'", "LIBC",
    "os.__file__", "os.path.dirname(os.__file__)", "'/dev/shm/x'", "'/proc/self/oom_score_adj'", "'/proc/self/fd/0'",
    "SHARED",
)  # fmt: skip
MODES = ("0", "0o777", "0o500", "0o7777")
NUMBERS = ("0", "1", "-1", "4096", "1 << 20", "1 << 40", "(1 << 63) - 1")
COMMANDS = (*range(17), 36, 37, 38, 1024, 1025, 1026, 1030, 1031, 1032, 1033, 1034)
"""Commands of fcntl: flags, locks, leases, owners, signals, notifications, sizes, seals."""
PRELUDE = """
import ctypes, fcntl, mmap, os, resource, signal, socket, stat, struct, sys, threading, time
LIBC = {libc!r}
SHARED = {shared!r}
_c = ctypes.CDLL(None, use_errno=True)
kept = []
def opened(path, flags=os.O_RDWR):
    for way in (flags, os.O_RDONLY):
        try:
            kept.append(os.open(path, way | os.O_NONBLOCK))
            return kept[-1]
        except OSError: pass
    return 0
def fcntl_lock(at):  # a write lock of one byte, in the form of struct flock
    return struct.pack('hhqqi4x', 1, 0, 2 * at, 1, 0)
def attempt(body):
    try: body()
    except BaseException: pass
"""
STATEMENTS = (
    "os.chmod({path}, {mode})", "os.chown({path}, -1, -1)", "os.utime({path}, (1, 1))", "os.utime({path})",
    "os.rename({path}, {path})", "os.link({path}, {path})", "os.symlink({path}, {path})", "os.mkdir({path}, {mode})",
    "os.mkfifo({path})", "os.rmdir({path})", "os.unlink({path})", "os.truncate({path}, {number})", "os.chdir({path})",
    "os.setxattr({path}, 'user.x', b'y')", "os.mknod({path})", "os.umask({mode})", "open({path}, 'w').write('x')",
    "fcntl.flock(opened({path}), {lock})", "fcntl.lockf(opened({path}), {lock}, 1, {number})", "fcntl.flock({fd}, {lock})",
    "fcntl.lockf({fd}, {lock})", "fcntl.fcntl({fd}, {command}, {number})",
    "fcntl.fcntl(opened({path}), {command}, {number})",
    "[fcntl.lockf(opened({path}), 3, 1, 2 * n) for n in range(99)]", "os.fchmod({fd}, {mode})", "os.utime({fd}, (1, 1))",
    "os.ftruncate({fd}, {number})", "os.posix_fallocate(opened('f', os.O_CREAT | os.O_RDWR), 0, {number})",
    "_c.fallocate(opened('f', os.O_CREAT | os.O_RDWR), 1, ctypes.c_long(0), ctypes.c_long({number}))",
    "os.write({fd}, b'x' * 99)", "os.lseek({fd}, 0, 0)", "os.set_blocking({fd}, False)", "os.dup2({fd}, {fd})",
    "os.close({fd})", "os.posix_fadvise(opened({path}), 0, 0, 4)", "os.nice(1)", "os.setpriority(0, 0, 19)",
    "os.sched_setaffinity(0, [0])", "os.setsid()", "os.setpgid(0, 0)", "os.kill(os.getppid(), 0)", "os.kill(1, 19)",
    "resource.setrlimit({limit}, (0, 0))", "resource.prlimit(os.getppid(), {limit}, (0, 0))", "os.memfd_create('x')",
    "_c.shmget(1, 4096, 0o1666)", "_c.msgget(2, 0o1666)", "_c.semget(3, 1, 0o1666)", "_c.mq_open(b'/x', 64, 0o600, 0)",
    "_c.shm_open(b'/x', 66, 0o600)", "_c.inotify_init()", "_c.mlockall(3)", "_c.prctl(4, 1, 0, 0, 0)",
    "socket.socket(socket.AF_UNIX).bind('s')", "kept.extend(socket.socketpair())", "kept.append(mmap.mmap(-1, 1 << 20))",
    "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "signal.signal({signal}, signal.SIG_IGN)",
    "signal.setitimer(signal.ITIMER_REAL, 0.01)", "os.environ.update(PATH='x')", "[os.mkdir(str(n)) for n in range(99)]",
    "[(os.mkdir('n'), os.chdir('n')) for _ in range(99)]", "os._exit(1)", "os.abort()", "sys.path.insert(0, '.')",
    "_c.syscall({syscall}, *[ctypes.c_long(n) for n in ({number}, {number}, {fd}, {number}, {fd}, {number})])",
)  # fmt: skip
PROBE = """
import fcntl, os, resource, signal, sys, time
print(sorted(sys.modules), sorted({**os.environ, 'HOME': '', 'TMPDIR': ''}.items()))
print(os.listdir('.'), oct(os.stat('.').st_mode), os.umask(0o22))
print([fcntl.fcntl(n, fcntl.F_GETFL) for n in range(3)], os.getpriority(0, 0), sorted(os.sched_getaffinity(0)))
print([resource.getrlimit(n) for n in range(16)], [str(signal.getsignal(n)) for n in range(1, 32)], sys.path)
open('own', 'w').write('x'); os.mkdir('folder'); os.rename('own', 'folder/own')
"""
"""The world as an honest program sees it; it must not depend on the program that ran before."""


KNOWN = (
    "attempt(lambda: os.chmod('.', 0o500))",
    "attempt(lambda: fcntl.flock(0, 2))\nattempt(lambda: fcntl.flock(opened(LIBC), 1))",
    "attempt(lambda: [fcntl.fcntl(0, 37, bytes(fcntl_lock(n))) for n in range(999)])",
    "attempt(lambda: fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND))",
    "attempt(lambda: os.utime('/dev/null'))",
    "attempt(lambda: os.chown(LIBC, -1, -1))",
    "attempt(lambda: _c.fallocate(opened('f', os.O_CREAT | os.O_RDWR), 1, ctypes.c_long(0), ctypes.c_long(1 << 34)))",
    "os.umask(0o777)\n[os.mkdir(str(n)) for n in range(9)]",
    "[os.mkdir(str(n)) for n in range(3000)]\n[open(f'{n}/\\n', 'w').close() for n in range(500)]",
)
"""Ways in which a run once reached the next ones, or could."""


def known_programs(shared: str) -> list[str]:
    """These as programs."""
    return [_prelude(shared) + program + "\n" for program in KNOWN]


def _prelude(shared: str) -> str:
    libc = next((str(path) for path in Path("/usr/lib").glob("*-linux-gnu/libc.so.6")), "/dev/null")
    return PRELUDE.format(libc=libc, shared=shared)


def hostile(chance: random.Random, shared: str = "/dev/null") -> str:
    """A program of up to a dozen statements. shared: a file of the host that anybody may read."""
    lines = [_prelude(shared)]
    for _ in range(chance.randint(1, 12)):
        words = {
            "path": chance.choice(PATHS), "mode": chance.choice(MODES), "number": chance.choice(NUMBERS),
            "lock": chance.choice(("1", "2", "6", "5", "8")), "fd": chance.choice("0123456789"),
            "command": chance.choice(COMMANDS), "limit": chance.randrange(16), "signal": chance.randrange(1, 65),
            "syscall": chance.randrange(0, 470),
        }  # fmt: skip
        lines.append(f"attempt(lambda: {chance.choice(STATEMENTS).format(**words)})")
    return "\n".join(lines)


def candidate(program: str) -> str:
    """The same as a candidate that is right afterwards, as far as it lives."""
    return program + "\ndef add(a, b): return a + b\n"


def _file(path: str) -> list[Any]:
    """The metadata of a file, without reading it; reading changes the time of access."""
    at = os.stat(path)
    return [path, at.st_ino, at.st_mode, at.st_uid, at.st_gid, at.st_nlink, at.st_size, at.st_mtime_ns, at.st_ctime_ns]


def _locks(paths: list[str]) -> list[str]:
    """Locks on these files, whoever holds them."""
    inodes = {os.stat(path).st_ino for path in paths}
    lines = [line.split()[1:] for line in Path("/proc/locks").read_text().splitlines()]
    return sorted(" ".join(line) for line in lines if int(line[-3].rpartition(":")[2]) in inodes)


def _process(pid: int) -> dict[str, Any]:
    """State of a server or a judge: descriptors and their flags, limits, mask, handlers, priority, folder, mounts."""
    root = Path(f"/proc/{pid}")
    facts: dict[str, Any] = {}  # not its number: a judge that is late on a busy machine is replaced
    try:
        facts["descriptors"] = {
            fd: [os.readlink(root / "fd" / fd), re.findall("flags:.*", (root / "fdinfo" / fd).read_text())]
            for fd in sorted(os.listdir(root / "fd"))
        }
        facts["cwd"] = os.readlink(root / "cwd")
        facts["mounts"] = len((root / "mountinfo").read_text().splitlines())
        facts["environ"] = (root / "environ").read_bytes().hex()
    except PermissionError:  # another user's, or not to be looked into
        pass
    known = ("Umask", "Threads", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "Uid", "CapEff", "NoNewPrivs")
    facts["status"] = [line for line in (root / "status").read_text().splitlines() if line.startswith(known)]
    facts["limits"] = (root / "limits").read_text()
    facts["nice"] = (root / "stat").read_text().rpartition(")")[2].split()[15:17]
    facts["oom"] = (root / "oom_score_adj").read_text()
    return facts


def descendants(pid: int) -> list[int]:
    """Processes below one."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *[below for child in children for below in descendants(child)]]


def _idle(pid: int) -> bool:
    """True if a process sleeps: a server that still makes the next run's folder works, or waits for the disk."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def state(pool: "Pool", shared: str) -> dict[str, Any]:
    """Everything of worker and host that a run could leave changed, once the server waits for its next run."""
    (worker,) = pool.workers
    processes = worker.pids
    below = [pid for process in processes for pid in descendants(process)]
    deadline = time.monotonic() + SETTLE_S
    while not all(_idle(pid) for pid in (*processes, *below)) and time.monotonic() < deadline:
        time.sleep(0.001)
    files = ["/dev/null", "/dev/zero", "/dev/urandom", shared, os.__file__, os.path.dirname(os.__file__)]
    files += [str(path) for path in Path("/usr/lib").glob("*-linux-gnu/libc.so.6")]
    began = time.perf_counter()
    for _ in range(100):
        os.close(os.open("/dev/null", os.O_RDWR))
    slow = (time.perf_counter() - began) / 100 > 1e-3
    ipc = [len(Path(f"/proc/sysvipc/{kind}").read_text().splitlines()) for kind in ("shm", "sem", "msg")]
    folder = [[name, os.stat(f"{worker.folder}/{name}").st_mode] for name in sorted(os.listdir(worker.folder))]
    return {
        "processes": [_process(pid) for pid in (*processes, *below)],
        "files": [_file(path) for path in files],
        "locks": _locks(files),
        "ipc": ipc,
        "shm": sorted(name for name in os.listdir("/dev/shm") if name in ("x", "sem.x")),
        "folder": folder,
        "slow": slow,
        "own": [os.getpid(), os.getcwd(), sorted(os.listdir("/proc/self/fd"))],
    }
