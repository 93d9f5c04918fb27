"""A pool that is closed leaves nothing, whatever runs or fails meanwhile."""

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from marl_ray.errors import MarlRayError
from marl_ray.sandbox import Limits, Pool
from marl_ray.sandbox.client.worker import Worker

if not sys.platform.startswith("linux"):
    pytest.skip("the sandbox needs Linux", allow_module_level=True)


def test_closing_leaves_nothing():
    before = sorted(os.listdir("/proc/self/fd"))
    with Pool(workers=1) as pool:
        pool.run("open('f', 'w')")
        pool.judge("def f(): pass", "f()", entry_point="f")
        folder = pool.workers[0].folder
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not os.path.exists(folder)
    with pytest.raises(MarlRayError, match="closed"):
        pool.run("")


@pytest.mark.parametrize("kind", ["run", "official", "judge"])
def test_closing_ends_the_calls_of_other_threads(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    requests, limits, sleep = queue.SimpleQueue[bytes](), Limits(wall_s=90), "import time\ntime.sleep(60)"
    requested = Worker.request

    def note_request(worker: Worker, kind: bytes, limits: Limits, fds: Sequence[int]) -> None:
        requested(worker, kind, limits, fds)
        requests.put(kind)

    monkeypatch.setattr(Worker, "request", note_request)
    pool = Pool(workers=1, warm=())
    calls = {
        "run": lambda: pool.run(sleep, limits=limits),
        "official": lambda: pool.official(sleep, limits),
        "judge": lambda: pool.judge(sleep, "f()", entry_point="f", limits=limits),
    }
    with ThreadPoolExecutor(2) as threads:
        running, waiting = (threads.submit(calls[kind]) for _ in range(2))
        requests.get(timeout=60)
        pool.close()
        assert os.listdir(tmp_path) == []
        for call in (running, waiting):
            with pytest.raises(MarlRayError, match=r"^the sandbox pool is closed$"):
                call.result(60)
    assert requests.empty() and os.listdir(tmp_path) == []


def test_a_server_that_is_replaced_while_its_pool_closes_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool, disconnected = Pool(workers=1, warm=()), threading.Event()
    disconnect, restart = Worker.disconnect, Worker.restart

    def note_disconnection(worker: Worker) -> None:
        disconnect(worker)
        disconnected.set()

    with ThreadPoolExecutor(1) as threads:

        def restart_late(worker: Worker) -> None:
            closing.append(threads.submit(pool.close))
            assert disconnected.wait(60), "the pool did not end the server's run"
            restart(worker)

        closing: list[Future[None]] = []
        monkeypatch.setattr(Worker, "disconnect", note_disconnection)
        monkeypatch.setattr(Worker, "restart", restart_late)
        disconnect(pool.workers[0])  # as if its server had died
        with pytest.raises(MarlRayError, match=r"^the sandbox pool is closed$"):
            pool.run("print(1)")
        closing[0].result(60)
    assert os.listdir(tmp_path) == []


def test_a_pool_whose_last_server_cannot_begin_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, popen = sorted(os.listdir("/proc/self/fd")), subprocess.Popen
    begun: list[subprocess.Popen] = []

    def start_one(*args: Any, **options: Any) -> Any:
        if begun:
            raise BlockingIOError("no more processes")
        begun.append(popen(*args, **options))
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(BlockingIOError, match="no more processes"):
        Pool(workers=2, warm=())
    assert begun[0].returncode == 0 and os.listdir(tmp_path) == []
    assert sorted(os.listdir("/proc/self/fd")) == before


USES_AT_EXIT = """
import atexit
from marl_ray.errors import MarlRayError
from marl_ray.sandbox.client.shared_pool import shared_pool

def run():
    try:
        print(shared_pool().run("print(1)"))
    except MarlRayError as error:
        print(error)

atexit.register(run)  # runs last
shared_pool()
"""
"""A program that uses the shared pool after its exit has closed it."""


def test_no_shared_pool_begins_once_the_exit_has_closed_the_first(tmp_path):
    command, environment = [sys.executable, "-c", USES_AT_EXIT], os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("the sandbox pool is closed\n", "", 0)
    assert os.listdir(tmp_path) == []


def test_a_pool_closes_all_that_stands_behind_a_process_that_cannot_be_ended(monkeypatch):
    before = sorted(os.listdir("/proc/self/fd"))
    pool = Pool(workers=2)
    pool.judge("def f(): pass", "f()", entry_point="f")
    folders = [worker.folder for worker in pool.workers]
    endless, *others = [pid for worker in pool.workers for pid in worker.pids]
    wait = subprocess.Popen.wait

    def wait_in_vain(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if process.pid == endless:
            raise subprocess.TimeoutExpired("endless", timeout or 0.0)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_in_vain)
    with pytest.raises(subprocess.TimeoutExpired, match="endless"):
        pool.close()
    assert len(others) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in others)
    assert not any(os.path.exists(folder) for folder in folders)
    assert sorted(os.listdir("/proc/self/fd")) == before
