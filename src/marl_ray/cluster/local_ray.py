"""Starts a Ray on this machine that only loopback and a token reach, and that leaves nothing behind."""

import logging
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from marl_ray.errors import MarlRayError, one_line
from marl_ray.ray_seams import init_on_loopback, is_cluster_answering, reload_ray_settings
from marl_ray.temporary_folders import short_folder

CONNECT_S = 30.0
"""Seconds that the cluster of RAY_ADDRESS has to answer."""
SHUTDOWN_S = 30.0
"""Seconds that Ray's own shutdown may take before its processes are ended by pid."""
EXIT_S = 10.0
"""Seconds that processes have to exit by themselves, and again after SIGTERM and after SIGKILL."""
FREE_PORTS = range(20_000, 32_768)
"""Ports that neither connections nor Ray's workers get by themselves."""
MAX_PORT_TRIES = 1_000
"""Maximum number of ports that are tried until one is free."""

_MAX_TEMP_ROOT_LENGTH = 20
"""Bytes of a folder: Unix socket paths end at 107 bytes (103 on macOS), and Ray adds about 70 to its folder."""


@dataclass(frozen=True)
class LocalRay:
    """A running local Ray; its dashboard, Jobs and Serve APIs ask for `token`."""

    dashboard_url: str
    """`http://127.0.0.1:PORT`; empty when started without a dashboard."""
    address: str
    """`127.0.0.1:PORT` for `ray.init(address=...)`."""
    temp_dir: Path
    """Folder of its sockets and logs, which is deleted with it."""
    token: str = field(repr=False)


@contextmanager
def ensure_ray() -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS, or else start a Ray without a dashboard, within the block.

    Ray sets RAY_ADDRESS in its jobs. Raises MarlRayError if no cluster is at the address.
    """
    if "RAY_ADDRESS" not in os.environ:
        with local_ray(dashboard=False):
            yield
        return
    import ray

    address = os.environ["RAY_ADDRESS"]
    # `auto` and the like are looked up, and a client's ray:// has a deadline of its own.
    if re.fullmatch(r"[^/\s]+:\d+", address) and not is_cluster_answering(address, CONNECT_S):
        raise MarlRayError(f"RAY_ADDRESS: no cluster at {address!r} answers within {CONNECT_S:g} s")
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError) as error:
        raise MarlRayError(f"RAY_ADDRESS: no cluster at {address!r}: {one_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def local_ray(
    num_cpus: int | None = None,
    dashboard: bool = True,
    log_monitor: bool = False,
    object_store_bytes: int = 512 << 20,
) -> Iterator[LocalRay]:
    """Start Ray in this process, and at the end of the block, however it ends, remove all that Ray started and wrote.

    What remote workers print stays in Ray's log files. `log_monitor` starts the process that brings it to the drivers of
    other programs, which takes a fiftieth of a core all the time. SIGTERM leaves through the same door as an exception, with
    exit status 143.
    Raises MarlRayError if Ray is already initialised in this process, or gets no folder.
    """
    import ray

    if ray.is_initialized():
        raise MarlRayError("local_ray: Ray is already initialised in this process; leave that one first")
    root = short_temp_root()
    try:
        temp_dir = short_folder("ray", root)
    except OSError as error:
        raise MarlRayError(f"local_ray: Ray gets no folder in {root}: {one_line(error)}") from error
    token = secrets.token_hex(32)
    with _exit_on_signals(), _ray_environment(token):
        try:
            context = _start_ray(num_cpus, dashboard, log_monitor, object_store_bytes, temp_dir)
            # Ray has put its own handler, which exits with status 15, over ours.
            _exit_on_sigterm()
            yield LocalRay(
                dashboard_url=f"http://{context.dashboard_url}" if context.dashboard_url else "",
                address=context.address_info["address"],
                temp_dir=temp_dir,
                token=token,
            )
        finally:
            with _ignore_signals():
                _stop_ray(temp_dir)


def _start_ray(
    num_cpus: int | None, dashboard: bool, log_monitor: bool, object_store_bytes: int, temp_dir: Path
) -> Any:
    # Ray reads the environment once, when it is imported; the changes must count also where that was before.
    reload_ray_settings()
    try:
        return init_on_loopback(
            temp_dir / "r",  # Ray opens its folder to everyone; the one around it stays private
            log_monitor,
            num_cpus=num_cpus,
            include_dashboard=dashboard,
            object_store_memory=object_store_bytes,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise MarlRayError(f"local_ray: Ray does not start: {one_line(error)}") from error


def _stop_ray(temp_dir: Path) -> None:
    import ray

    processes = processes_of(temp_dir)
    # `ray.shutdown` takes no deadline. It waits for its processes, so ending them ends it.
    watchdog = threading.Timer(SHUTDOWN_S, _end_processes, [processes])
    watchdog.start()
    try:
        ray.shutdown()
    finally:
        watchdog.cancel()
        _, alive = psutil.wait_procs(processes, timeout=EXIT_S)
        _end_processes(alive)
        shutil.rmtree(temp_dir, ignore_errors=True)


def processes_of(temp_dir: Path) -> list[psutil.Process]:
    """Return the processes whose command line names the temporary folder, Ray's servers, and all their descendants.

    This process's children may also be the user's.
    """
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(str(temp_dir) in part for part in process.cmdline()):
                for member in [process, *process.children(recursive=True)]:
                    processes[member.pid] = member
        except psutil.Error:
            continue  # it has just exited, or is somebody else's
    return list(processes.values())


def _end_processes(processes: list[psutil.Process]) -> None:
    """Terminate processes, and kill those that stay.

    psutil compares start times, so a pid that another process got meanwhile is never signalled.
    """
    for action in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            try:
                action(process)
            except psutil.Error:
                continue
        _, processes = psutil.wait_procs(processes, timeout=EXIT_S)


@contextmanager
def _ray_environment(token: str) -> Iterator[None]:
    """Set the environment that Ray, its processes and the block see, and restore it after the block."""
    changes = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,  # in the environment, so that Ray writes none to the home folder
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name: bind to loopback on every system
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process more a run; nobody takes this machine away
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default; silences a warning about it
        "AUTOSCALER_METRIC_PORT": str(free_port()),
        "DASHBOARD_METRIC_PORT": str(free_port()),
        # Jobs say `python`: it has to be this one, also when the virtual environment is not activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    if "GLOO_SOCKET_IFNAME" not in os.environ and any(name == "lo" for _, name in socket.if_nameindex()):
        changes["GLOO_SOCKET_IFNAME"] = "lo"  # workers talk over loopback, whatever the host's name resolves to
    previous = dict(os.environ)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(name, None)  # they would name another cluster
    os.environ.update(changes)
    try:
        yield
    finally:
        # Ray sets some RAY_ variables and PYTHONBREAKPOINT itself.
        for name in {*changes, *(key for key in {**previous, **os.environ} if key.startswith(("RAY_", "PYTHONBREAK")))}:
            if name in previous:
                os.environ[name] = previous[name]
            else:
                os.environ.pop(name, None)
        reload_ray_settings()


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let SIGTERM raise SystemExit within the block, and restore the handlers of signals after it.

    Ray Core and Ray Train leave handlers behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and Ray sets none elsewhere either
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    _exit_on_sigterm()
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit with the status that shells report, in the main thread."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)


@contextmanager
def _ignore_signals() -> Iterator[None]:
    """Ignore a second Ctrl-C and SIGTERM within the clean-up, which has deadlines of its own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield


def short_temp_root() -> str:
    """Return the folder for Ray's sockets, whose paths have a limit: the temporary one, or /tmp if that is too long."""
    root = tempfile.gettempdir()
    return root if len(root) <= _MAX_TEMP_ROOT_LENGTH else "/tmp"


def check_port(host: str, port: int) -> None:
    """Raise MarlRayError if a server of this machine listens on the port already.

    Serve's proxies would share it with that server, so that each answers some of the requests.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that nobody listens on any more is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise MarlRayError(f"http_options: {host}:{port} cannot be used: {one_line(error)}") from error


def free_port() -> int:
    """Return a TCP port of the loopback address that is free, and that no connection takes before its server does.

    Connections and servers without a port of their own get one from 32768 on (Linux) or 49152 on (macOS, Windows). Below
    20000 are Ray's own workers. Raises MarlRayError if a thousand ports are taken.
    """
    for port in random.SystemRandom().sample(FREE_PORTS, MAX_PORT_TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise MarlRayError(f"local_ray: of {MAX_PORT_TRIES} ports from {FREE_PORTS[0]} to {FREE_PORTS[-1]} none is free")
