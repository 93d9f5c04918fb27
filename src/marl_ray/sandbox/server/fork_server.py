"""The fork server: a separate process that never sees a program, a test or a result.

It is started as a fresh interpreter, enters namespaces once, imports modules that programs often import, and then forks
one run after another. Programs and inputs pass through it as descriptors, unread: no fork can find what the server
never read.

The first process only waits, and removes the folder in the end. Its child, the server proper, is process 1 of the process
namespace, so that everything in it dies with it.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import platform
import resource
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from marl_ray.sandbox.confinement import kernel, landlock, run_folder, semaphores
from marl_ray.sandbox.confinement.seccomp import Filter
from marl_ray.sandbox.limits import Level, Limits
from marl_ray.sandbox.server import child
from marl_ray.sandbox.server.runs import (
    FOLDER_BYTES,
    FOLDER_ENTRIES,
    JUDGE_OOM_SCORE,
    KILL_REQUEST,
    REQUEST_BYTES,
    open_last_pid,
    open_oom_score,
    run_one,
)

MAX_FDS = 4
"""Maximum number of descriptors that arrive with a request."""
_OTHER_USERS = 100_000
"""The sum of this and a process id is the user id of a run, above the ids that a host usually gives."""
_ALWAYS_S, _ANY_MEMORY = 1 << 30, 1 << 62
"""Limits in seconds and bytes that a judge never reaches."""
_SPACES = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
_LIBRARIES = ("/lib64", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/usr/share/zoneinfo")
_LOCALES = ("/usr/lib/locale", "/usr/share/locale")
_PROC = "subset=pid,hidepid=4"
"""Options of /proc: a run sees its own processes; Landlock lets it open nothing there but its own pipes and files."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def main() -> None:
    """Run a server; argv holds one JSON object with fd, folder, max_level, warm and role."""
    options = json.loads(sys.argv[1])
    control = socket.socket(fileno=fcntl.fcntl(options["fd"], fcntl.F_DUPFD_CLOEXEC, 10))
    os.close(options["fd"])
    null = os.open(os.devnull, os.O_RDWR)
    if null != child.CHANNEL:  # no file of the server may have the number that a run gives to its channel
        os.dup2(null, child.CHANNEL, inheritable=False)
        os.close(null)
    options["number"] = os.getpid()
    if options["role"] == "judge":
        _judge(control, options)
        return
    spaces = options["max_level"] >= Level.NAMESPACES
    reason = _failure(_enter_namespaces) if spaces else ""
    if spaces and not reason:
        _enter_namespaces()
    server = os.fork()
    if server:
        control.close()
        os.waitpid(server, 0)
        run_folder.remove(options["folder"])
        return
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    _serve(control, options, spaces and not reason, reason)


def _enter_namespaces() -> None:
    """Enter new namespaces for this process and, for process ids, its children.

    A process without privileges goes through a user namespace.

    The mount namespace comes later, for the server alone: this process removes the folder from the host's file system.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        kernel.unshare(_SPACES)
    except PermissionError:
        kernel.unshare(kernel.CLONE_NEWUSER | _SPACES)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _other_user(number: int) -> int | None:
    """Return an unused user, if this process may become one.

    `number` is a process id: unique as long as that process lives.
    """
    user = _OTHER_USERS + number
    return user if os.geteuid() == 0 and _as_user(user, []) else None


def _stdlib() -> list[str]:
    return sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})


def _packages() -> list[str]:
    """Return the files of the installed packages that were imported for warmth.

    They are the only ones that programs may read.
    """
    tops = {name.partition(".")[0] for name in sys.modules} - {"marl_ray"}
    files: list[str] = []
    for top in tops:
        file = getattr(sys.modules.get(top), "__file__", None) or ""
        base, separator, _ = file.partition("/site-packages/")
        if separator:
            inside = f"{base}/site-packages/{top}"
            files += [file] if os.path.dirname(file).endswith("site-packages") else [inside, f"{inside}.libs"]
    return sorted(path for path in files if os.path.exists(path))


def _rules(work: str) -> list[tuple[str, int]]:
    """Return the paths that a run may open: of the standard library everything but packages installed into it."""
    rules = [(work, landlock.FOLDER_ACCESS)]
    for base in _stdlib():
        rules.append((base, landlock.READ_DIR))
        rules += [
            (e.path, landlock.READ_ACCESS) for e in os.scandir(base) if e.name not in ("site-packages", "dist-packages")
        ]
    triple = sysconfig.get_config_var("MULTIARCH") or ""
    rules += [(path, landlock.READ_ACCESS) for path in (f"/lib/{triple}", f"/usr/lib/{triple}") if triple]
    rules += [(path, landlock.READ_ACCESS) for path in (*_LIBRARIES, *_LOCALES, *_packages())]
    return rules + [(path, landlock.DEVICE_ACCESS) for path in _DEVICES]


def _temporary() -> str:
    """Return /tmp, in which programs often write, or empty if needed paths lie below it.

    The run's folder is mounted there.
    """
    needed = [*_stdlib(), *_packages()]
    return "/tmp" if os.path.isdir("/tmp") and not any(path.startswith("/tmp/") for path in needed) else ""


def _mounts(base: str, work: str, uid: int | None) -> None:
    """Mount the file systems of the runs, read-only but for a folder of limited size.

    Beside that folder they have an empty /sys, /run and shared memory, and a /proc for the runs.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.read_only_everywhere()
    _reopen_path([*_stdlib(), *_packages(), base], uid)
    _mount_folder(work, uid)
    for path in ("/sys", "/run", "/dev/shm", "/proc"):
        if os.path.isdir(path) and not base.startswith(path + "/"):
            if path == "/proc":
                with contextlib.suppress(OSError):  # if the host hides parts of its /proc, it allows no other one
                    kernel.mount("proc", path, kernel.MS_RDONLY, _PROC)
                    continue
            kernel.mount("tmpfs", path, kernel.MS_RDONLY, "size=4k,mode=755")


def _mount_folder(work: str, uid: int | None) -> None:
    owner = os.geteuid() if uid is None else uid
    group = os.getegid() if uid is None else uid
    options = f"mode=700,uid={owner},gid={group},size={FOLDER_BYTES},nr_inodes={FOLDER_ENTRIES}"
    kernel.mount("tmpfs", work, 0, options)


def _reopen_path(needed: list[str], uid: int | None) -> None:
    """Make one path readable at the same place, if it is needed and another user could not reach it.

    An interpreter below /root is such a path.
    """
    if uid is None:
        return
    for path in needed:
        parents = [*reversed([path[:i] for i, letter in enumerate(path) if letter == "/" and i])]
        closed = next((parent for parent in reversed(parents) if not os.stat(parent).st_mode & 0o001), None)
        if closed is None:
            continue
        below = [item for item in needed if item.startswith(closed + "/")]
        fds = [(item, os.open(item, os.O_PATH | os.O_CLOEXEC)) for item in below]
        kernel.mount("tmpfs", closed, 0, "size=1m,mode=755")
        for item, fd in fds:
            os.makedirs(item, exist_ok=True)
            kernel.bind(fd, item)
            os.close(fd)


def _as_user(user: int, paths: list[str]) -> bool:
    """Return True if this process may become that user, who can read all these paths."""

    def become() -> None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        for path in paths:
            os.scandir(path).close()

    return not _failure(become)


def _failure(body: Callable[[], object]) -> str:
    """Return the reason why an irreversible step would fail here, found by trying it in a fork; empty if it works."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            body()
        except OSError as error:
            os.write(writer, str(error).encode()[:500])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return text


def _confinement(
    options: dict[str, Any], spaces: bool, reason: str
) -> tuple[child.Confinement, run_folder.MountedFolder | run_folder.NumberedFolders, Level, str]:
    """Return the best confinement that this host allows, with the folders of its runs.

    Returns also its level, and the reason why it is not better.
    """
    base = options["folder"]
    work, uid = os.path.join(base, "work"), _other_user(options["number"])
    os.mkdir(work, 0o700)
    if spaces:
        inside = _temporary() or work
        reason = _failure(lambda: _mounts(base, inside, uid))
        spaces = not reason
        if spaces:
            _mounts(base, inside, uid)
            work = inside
    if uid is not None and not _as_user(uid, _stdlib()):
        uid = None
    folders: run_folder.MountedFolder | run_folder.NumberedFolders
    runs = work
    if spaces:

        def mount_another() -> None:
            kernel.unmount(work)
            _mount_folder(work, uid)

        folders = run_folder.MountedFolder(work, mount_another)
    else:
        folders = run_folder.NumberedFolders(work, uid)
        os.chmod(work, 0o711)
        runs = folders.parent
    paths, level = None, Level.LIMITS
    if options["max_level"] >= Level.PATHS:
        if landlock.abi() >= landlock.OLDEST_ABI:
            paths = landlock.ruleset(_rules(runs))
            level = Level.NAMESPACES if spaces else Level.PATHS
        else:
            reason = f"Landlock ABI {landlock.abi()}, {landlock.OLDEST_ABI} needed"
    if level == Level.LIMITS < options["max_level"] and uid is None and os.geteuid() == 0:
        raise SystemExit(
            f"as root, with an interpreter that other users cannot read ({sys.prefix}), programs could remove every file "
            f"here ({reason}); expected another user, or an interpreter outside of {os.path.expanduser('~')}"
        )
    filter_ = Filter.of_run(platform.machine(), owners=spaces or uid is not None, spaces=spaces)
    return child.Confinement(folders.path, uid, paths, filter_), folders, level, reason


def _renew_confinement(
    confinement: child.Confinement, folders: run_folder.MountedFolder | run_folder.NumberedFolders
) -> child.Confinement:
    """Return the confinement of the next run, with a folder that no run has touched."""
    replaced = folders.renew()
    if replaced and confinement.paths is not None:  # the rules refer to the folder that was unmounted
        os.close(confinement.paths)
        confinement = replace(confinement, paths=landlock.ruleset(_rules(folders.path)))
    if folders.path != confinement.work:
        confinement = replace(confinement, work=folders.path)
        os.environ["HOME"] = os.environ["TMPDIR"] = folders.path
    return confinement


def _warm(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    roots, installed = tuple(_stdlib()), ("site-packages", "dist-packages")
    sys.path[:] = [  # remove paths that runs cannot read
        path
        for path in sys.path
        if os.path.realpath(path).startswith(roots) and os.path.basename(path) not in installed
    ]


def _settle(spaces: bool) -> None:
    """Do the last step before the first run.

    It rehearses, installs the filter, and freezes objects against garbage collection.
    """
    child.warm_up()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    Filter.of_server(platform.machine(), spaces).install()
    gc.collect()
    gc.disable()
    gc.freeze()


def _serve(control: socket.socket, options: dict[str, Any], spaces: bool, reason: str) -> None:
    oom_score, last_pid = open_oom_score(), open_last_pid()
    _warm(options["warm"])
    semaphores.install()
    confinement, folders, level, reason = _confinement(options, spaces, reason)
    os.environ["HOME"] = os.environ["TMPDIR"] = confinement.work
    os.chdir("/")
    _settle(isinstance(folders, run_folder.MountedFolder))
    control.send(json.dumps({"level": level, "why": reason}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES, MAX_FDS)
        if not message:
            return
        if message == KILL_REQUEST:  # the run had already ended by itself
            continue
        if last_pid is not None:
            os.pwrite(last_pid, b"1", 0)
        try:
            reply = run_one(control, message, fds, confinement, level, oom_score)
        finally:
            for fd in fds:
                os.close(fd)
        control.send(reply)
        confinement = _renew_confinement(confinement, folders)


def _judge(control: socket.socket, options: dict[str, Any]) -> None:
    """Run trusted tests. This process is confined too, because it handles values of the candidate."""
    from marl_ray.sandbox.server import judge

    size = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    oom_score = open_oom_score()
    if oom_score is not None:
        os.pwrite(oom_score, JUDGE_OOM_SCORE, 0)
        os.close(oom_score)
    _warm(options["warm"])
    uid = _other_user(options["number"])
    if uid is not None and not _as_user(uid, _stdlib()):
        uid = None
    paths = None
    if options["max_level"] >= Level.PATHS and landlock.abi() >= landlock.OLDEST_ABI:
        paths = landlock.ruleset(_rules(os.devnull)[1:])
    filter_ = Filter.of_run(platform.machine(), owners=False, spaces=False, receives=True)
    confinement = child.Confinement("/", uid, paths, filter_)
    limits = Limits(cpu_s=_ALWAYS_S, memory_bytes=_ANY_MEMORY, file_bytes=0)  # each judgement sets its own limits
    values = child.rlimits(limits, limits.cpu_s, uid is not None)
    _settle(spaces=False)
    gc.enable()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    child.confine(values, confinement, orphan_dies=False)
    os.dup2(null, 2)  # tests may write to it, and no file may grow
    os.close(null)
    control.send(b"{}")
    judge.serve(control, lambda: int(os.pread(size, 64, 0).split()[0]) * resource.getpagesize())
