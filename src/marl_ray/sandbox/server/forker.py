"""The fork server: a separate process that never sees a program, a test or a result.

The server is started as a fresh interpreter, enters namespaces once, imports modules that programs often import, and
then forks one run after another. Programs and inputs pass through it as descriptors, unread: no fork can find what the
server never read.

The first process only waits, and removes the folder in the end. The child, the server proper, is process 1 of the
process namespace, so that everything in it dies with it.
"""

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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from marl_ray.sandbox.confinement import kernel, landlock, run_folder, semaphores
from marl_ray.sandbox.confinement.namespaces import enter_namespaces, mount_file_systems, mount_run_folder
from marl_ray.sandbox.confinement.readable_paths import PACKAGE_FOLDERS, run_rules, stdlib_folders, temporary_folder
from marl_ray.sandbox.confinement.seccomp import Filter
from marl_ray.sandbox.limits import MAX_SIZE, Level, Limits
from marl_ray.sandbox.server import child
from marl_ray.sandbox.server.runs import (
    JUDGE_OOM_SCORE,
    KILL_REQUEST,
    REQUEST_BYTES,
    open_last_pid,
    open_oom_score,
    run_one,
)

MAX_FDS = 4
"""Maximum number of descriptors that arrive with a request."""
_FIRST_USER_ID = 100_000
"""The sum of this and a process id is the user id of a run, above the ids that a host usually gives."""
_UNLIMITED_S = 1 << 30
"""CPU seconds that a judge never reaches, 34 years."""
_FIRST_FREE_FD = 10
"""Least descriptor of the socket to the client, above those that runs use."""


RunFolders = run_folder.MountedFolder | run_folder.NumberedFolders
"""The folders of a server's runs: of limited size where it has namespaces, else watched while a run works."""


def main() -> None:
    """Run a fork server or a judge until its client is gone.

    argv holds one JSON object with fd, folder, max_level, warm and role.
    """
    options = json.loads(sys.argv[1])
    control = socket.socket(fileno=fcntl.fcntl(options["fd"], fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD))
    os.close(options["fd"])
    null = os.open(os.devnull, os.O_RDWR)
    if null != child.CHANNEL:  # no file of the server may have the number that a run gives to its channel
        os.dup2(null, child.CHANNEL, inheritable=False)
        os.close(null)
    options["number"] = os.getpid()
    if options["role"] == "judge":
        _serve_judgements(control, options)
        return
    wants_namespaces = options["max_level"] >= Level.NAMESPACES
    reason = _reason_of_failure(enter_namespaces) if wants_namespaces else ""
    if wants_namespaces and not reason:
        enter_namespaces()
    server = os.fork()
    if server:
        control.close()
        os.waitpid(server, 0)
        run_folder.remove(options["folder"])
        return
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    _serve(control, options, wants_namespaces and not reason, reason)


def _other_user(number: int) -> int | None:
    """Return the id of an unused user; None if this process may not become one.

    `number` is a process id, so the user is alone as long as that process lives.
    """
    user = _FIRST_USER_ID + number
    return user if os.geteuid() == 0 and _can_become(user, []) else None


def _can_become(user: int, paths: list[str]) -> bool:
    """Return True if this process may become that user, who can read all these paths."""

    def become() -> None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        for path in paths:
            os.scandir(path).close()

    return not _reason_of_failure(become)


def _reason_of_failure(step: Callable[[], object]) -> str:
    """Return the reason why an irreversible step would fail here; empty if it would not.

    A fork of this process tries it.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            step()
        except OSError as error:
            os.write(writer, str(error).encode()[:500])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return text


def _best_confinement(
    options: dict[str, Any], in_namespaces: bool, reason: str
) -> tuple[child.Confinement, RunFolders, Level, str]:
    """Return the best confinement that this host allows, the folders of its runs, its level, and why it is no better.

    Raises SystemExit as root if neither another user nor Landlock would keep a program from the host's files.
    """
    base = options["folder"]
    work, uid = os.path.join(base, "work"), _other_user(options["number"])
    os.mkdir(work, 0o700)
    if in_namespaces:
        mount_point = temporary_folder() or work
        reason = _reason_of_failure(lambda: mount_file_systems(base, mount_point, uid))
        in_namespaces = not reason
        if in_namespaces:
            mount_file_systems(base, mount_point, uid)
            work = mount_point
    if uid is not None and not _can_become(uid, stdlib_folders()):
        uid = None
    folders: RunFolders
    allowed_folder = work
    if in_namespaces:

        def mount_another() -> None:
            kernel.unmount(work)
            mount_run_folder(work, uid)

        folders = run_folder.MountedFolder(work, mount_another)
    else:
        folders = run_folder.NumberedFolders(work, uid)
        os.chmod(work, 0o711)
        allowed_folder = folders.parent
    ruleset, level = None, Level.LIMITS
    if options["max_level"] >= Level.PATHS:
        if landlock.abi_version() >= landlock.OLDEST_ABI:
            ruleset = landlock.create_ruleset(run_rules(allowed_folder))
            level = Level.NAMESPACES if in_namespaces else Level.PATHS
        else:
            reason = f"Landlock ABI {landlock.abi_version()}, {landlock.OLDEST_ABI} needed"
    if level == Level.LIMITS < options["max_level"] and uid is None and os.geteuid() == 0:
        raise SystemExit(
            f"as root, with an interpreter that other users cannot read ({sys.prefix}), programs could remove every file "
            f"here ({reason}); expected another user, or an interpreter outside of {os.path.expanduser('~')}"
        )
    filter_ = Filter.of_run(
        platform.machine(), changes_modes=in_namespaces or uid is not None, changes_times=in_namespaces
    )
    return child.Confinement(folders.path, uid, ruleset, filter_), folders, level, reason


def _renew_confinement(confinement: child.Confinement, folders: RunFolders) -> child.Confinement:
    """Return the confinement of the next run, with a folder that no run has touched."""
    is_mounted_anew = folders.renew()
    if is_mounted_anew and confinement.ruleset is not None:  # the rules refer to the folder that was unmounted
        os.close(confinement.ruleset)
        confinement = replace(confinement, ruleset=landlock.create_ruleset(run_rules(folders.path)))
    if folders.path != confinement.folder:
        confinement = replace(confinement, folder=folders.path)
        os.environ["HOME"] = os.environ["TMPDIR"] = folders.path
    return confinement


def _load_warm_modules(names: list[str]) -> None:
    """Import the modules that programs find loaded, and keep `sys.path` to the folders that runs can read."""
    for name in names:
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    roots = tuple(stdlib_folders())
    sys.path[:] = [
        path
        for path in sys.path
        if os.path.realpath(path).startswith(roots) and os.path.basename(path) not in PACKAGE_FOLDERS
    ]


def _prepare_forks(allocates: bool) -> None:
    """Rehearse a run, install the server's filter, and freeze objects against garbage collection.

    This is the last step before the first run. `allocates` is that of `Filter.of_server`.
    """
    child.warm_up()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    Filter.of_server(platform.machine(), allocates).install()
    gc.collect()
    gc.disable()
    gc.freeze()


def _serve(control: socket.socket, options: dict[str, Any], in_namespaces: bool, reason: str) -> None:
    """Confine the runs as well as this host allows, and start one for each request until the client is gone.

    `reason` says why this process entered no namespaces, where it should have.
    """
    oom_score_fd, last_pid_fd = open_oom_score(), open_last_pid()
    _load_warm_modules(options["warm"])
    semaphores.install()
    confinement, folders, level, reason = _best_confinement(options, in_namespaces, reason)
    os.environ["HOME"] = os.environ["TMPDIR"] = confinement.folder
    os.chdir("/")
    _prepare_forks(isinstance(folders, run_folder.MountedFolder))
    control.send(json.dumps({"level": level, "reason": reason}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES, MAX_FDS)
        if not message:
            return
        if message == KILL_REQUEST:  # the run had already ended by itself
            continue
        if last_pid_fd is not None:
            os.pwrite(last_pid_fd, b"1", 0)
        try:
            reply = run_one(control, message, fds, confinement, level, oom_score_fd)
        finally:
            for fd in fds:
                os.close(fd)
        control.send(reply)
        confinement = _renew_confinement(confinement, folders)


def _serve_judgements(control: socket.socket, options: dict[str, Any]) -> None:
    """Run trusted tests for each request until the client is gone.

    This process is confined too, because it handles values of the candidate.
    """
    from marl_ray.sandbox.server import judge

    statm_fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    oom_score_fd = open_oom_score()
    if oom_score_fd is not None:
        os.pwrite(oom_score_fd, JUDGE_OOM_SCORE, 0)
        os.close(oom_score_fd)
    _load_warm_modules(options["warm"])
    uid = _other_user(options["number"])
    if uid is not None and not _can_become(uid, stdlib_folders()):
        uid = None
    ruleset = None
    if options["max_level"] >= Level.PATHS and landlock.abi_version() >= landlock.OLDEST_ABI:
        ruleset = landlock.create_ruleset(run_rules(os.devnull)[1:])  # a judge has no folder
    filter_ = Filter.of_run(platform.machine(), changes_modes=False, changes_times=False, receives=True)
    confinement = child.Confinement("/", uid, ruleset, filter_)
    limits = Limits(memory_bytes=MAX_SIZE, file_bytes=0)  # each judgement sets its own limits
    values = child.rlimits(limits, _UNLIMITED_S, uid is not None)
    _prepare_forks(allocates=False)
    gc.enable()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    child.confine(values, confinement, orphan_dies=False)
    os.dup2(null, 2)  # tests may write to it, and no file may grow
    os.close(null)
    control.send(b"{}")
    judge.serve(control, lambda: int(os.pread(statm_fd, 64, 0).split()[0]) * resource.getpagesize())
