"""Things to break: a Ray in its own process whose actors can be killed, and a PostgreSQL that can be stopped."""

import json
import os
import pwd
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from servers.installed import find, need
from waiting import until

from processes.environment import without_ray

ANSWER_S = 330.0
"""More than `deploy` takes, whose own error says more than that nothing answers."""
QUESTION_S = 0.25
"""Seconds between two questions to Serve, whose answers cost the CPU time that it needs to recover."""
CONTROLLER, PROXY, REPLICA = "ray::ServeController", "ray::ProxyActor", "ray::ServeReplica:"

# Not in the tests' process: that one has a Ray already, which other tests share.
CHILD = """
import json, sys
from marl_ray.cluster.local_ray import local_ray
from marl_ray.errors import MarlRayError
from marl_ray.serving.administration.deploy import deploy
with local_ray(num_cpus=2) as ray:
    print(json.dumps({"folder": str(ray.temp_dir), "dashboard": ray.dashboard_url, "token": ray.token}), flush=True)
    for line in sys.stdin:
        try:
            answer = {"urls": deploy(json.loads(line), ray.dashboard_url).urls}
        except MarlRayError as error:
            answer = {"error": str(error)}
        print("\\n" + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class OwnRay:
    """A Ray in a child process."""

    pid: int
    dashboard: str
    token: str
    deploy: Callable[[dict[str, Any]], dict[str, str]]
    """Serve config -> application -> URL, when all of it runs; AssertionError if it does not."""

    def actors(self, title: str) -> list[psutil.Process]:
        """The living actors whose process title begins so."""
        pids = []
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE and "".join(process.cmdline()[:1]).startswith(title):
                    pids.append(process)
            except psutil.Error:
                continue
        return pids

    def wait_until_complete(self, replicas: int, timeout_s: float = 150.0) -> None:
        """Wait until so many replicas, a proxy and a controller live and the proxy answers.

        Serve must say that replicas and proxy run. Serve alone would be believed too early: it takes its time to notice
        a death, and a new proxy to listen.
        """
        expected = ([replicas, 1, 1], ["RUNNING"] * replicas, ["HEALTHY"], 200)
        until(lambda: self._state() == expected, "Serve to be whole", timeout_s, self._state, QUESTION_S)

    def _state(self) -> tuple[list[int], list[str], list[str], int]:
        """Living actors by kind, and what Serve says."""
        return ([len(self.actors(title)) for title in (REPLICA, PROXY, CONTROLLER)], *self._reported_state())

    def _reported_state(self) -> tuple[list[str], list[str], int]:
        """States of replicas and proxies, and the status with which the proxy answers.

        They are empty and 0 while nobody can tell.
        """
        headers = {"authorization": f"Bearer {self.token}"}
        try:
            answer = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=headers, timeout=10)
        except httpx.HTTPError:
            return [], [], 0
        if answer.status_code != 200:
            return [], [], 0
        details = answer.json()
        deployments = [d for app in details["applications"].values() for d in app["deployments"].values()]
        replicas = [replica["state"] for deployment in deployments for replica in deployment["replicas"]]
        try:
            port = details["http_options"]["port"]
            listening = httpx.get(f"http://127.0.0.1:{port}/-/healthz", timeout=10).status_code
        except httpx.HTTPError:
            listening = 0
        return replicas, [proxy["status"] for proxy in details["proxies"].values()], listening


@contextmanager
def own_ray(folder: Path, **env: str) -> Iterator[OwnRay]:
    """Start a Ray with `folder` as its working directory and `env` besides the environment.

    Afterwards nothing of it runs any more, or AssertionError.
    """
    with (folder / "ray.log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=folder,
            env=without_ray() | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    # A thread, because reading from a pipe has no deadline.
    threading.Thread(target=_read, args=(child, answers), daemon=True).start()

    def ask(config: dict[str, Any]) -> dict[str, str]:
        assert child.stdin is not None
        child.stdin.write(json.dumps(config) + "\n")
        child.stdin.flush()
        answer = _next(answers, folder)
        assert "urls" in answer, answer
        urls: dict[str, str] = answer["urls"]
        return urls

    started: list[psutil.Process] = []
    try:
        facts = _next(answers, folder)
        assert "folder" in facts, (facts, (folder / "ray.log").read_text()[-2000:])
        yield OwnRay(child.pid, facts["dashboard"], facts["token"], ask)
        started = psutil.Process(child.pid).children(recursive=True)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(90) == 0, (folder / "ray.log").read_text()[-2000:]
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, alive
        assert not Path(facts["folder"]).exists()
    finally:
        if child.poll() is None:
            for process in [*psutil.Process(child.pid).children(recursive=True), child]:
                process.kill()


def _read(child: subprocess.Popen[str], answers: "queue.Queue[dict[str, Any]]") -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            answers.put(json.loads(line))
    answers.put({"error": "the process of Ray has ended"})


def _next(answers: "queue.Queue[dict[str, Any]]", folder: Path) -> dict[str, Any]:
    try:
        return answers.get(timeout=ANSWER_S)
    except queue.Empty:
        raise AssertionError(f"no answer within {ANSWER_S:g} s: {(folder / 'ray.log').read_text()[-2000:]}") from None


@dataclass(frozen=True)
class Postgres:
    """A running server."""

    url: str
    stop: Callable[[], None]
    """At once, as a crash would."""
    start: Callable[[], None]


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL of the test's own, on a socket in a temporary folder.

    Where none is installed, the test is skipped.
    """
    need("PostgreSQL")
    binaries, user = Path(str(find("initdb"))).parent, _user()
    # Not pytest's own folder, which other users cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="marl-ray-pg-"))

    def run(*command: str) -> None:
        extra: dict[str, Any] = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}
        with (folder / "commands.log").open("a") as log:
            done = subprocess.run(command, cwd=folder, stdout=log, stderr=log, timeout=60, **extra)
        assert done.returncode == 0, (folder / "commands.log").read_text()

    try:
        if user:
            shutil.chown(folder, user, pwd.getpwnam(user).pw_gid)
        data, control = str(folder / "data"), str(binaries / "pg_ctl")
        run(str(binaries / "initdb"), "-D", data, "-U", "marl", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"

        def start() -> None:
            run(control, "-D", data, "-l", str(folder / "server.log"), "-w", "-t", "60", "-o", options, "start")

        def stop() -> None:
            run(control, "-D", data, "-m", "immediate", "-w", "stop")

        start()
        try:
            yield Postgres(f"postgresql://marl@/postgres?host={folder}", stop, start)
        finally:
            if Path(data, "postmaster.pid").exists():
                stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user() -> str | None:
    """PostgreSQL refuses to run as root: then it runs as another user, else as this one."""
    if os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"
