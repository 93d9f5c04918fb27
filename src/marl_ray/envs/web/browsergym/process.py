"""A process that plays BrowserGym's episodes, with a deadline for every call, and ended with all that it started."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from multiprocessing.connection import wait

import psutil

from marl_ray.envs.web.browser.chromium import CLOSE_S, browser_files, find_chromium
from marl_ray.envs.web.browser.errors import BrowserError, PageError
from marl_ray.envs.web.browsergym import worker
from marl_ray.envs.web.miniwob import served_pages
from marl_ray.json_types import JsonObject

MINIWOB_URL = "http://miniwob/"
"""The address that agents read and write for the pages of MiniWoB++, so that prompts do not depend on a port."""


class BrowserGymProcess:
    """The process of an environment, and the browsers that it starts. Their files are in its own folder."""

    def __init__(self, python: str | None):
        """python: the Python that has BrowserGym; None for this one.

        Raises MarlRayError where there is no Chromium, ValueError naming `python` if it is no program.
        """
        interpreter = shutil.which(python or sys.executable)
        if interpreter is None:
            raise ValueError(f"python={python!r} is no program")
        command = [interpreter, "-I", worker.__file__, find_chromium()]
        self._folder = browser_files()
        environment = {**os.environ, **_miniwob_variable(), "TMPDIR": self._folder.name}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._miniwob = environment.get("MINIWOB_URL", "")
        self._unread, self._idle = b"", True

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def call(self, name: str, deadline_s: float, **arguments: object) -> JsonObject:
        """Return the answer of a method of `marl_ray.envs.web.browsergym.worker.GymPlayer`.

        Raises PageError if there is none within the deadline, BrowserError if the method fails; either ends the process.
        """
        try:
            return self._call(name, deadline_s, arguments)
        except BrowserError:
            self.close()
            raise

    def _call(self, name: str, deadline_s: float, arguments: dict[str, object]) -> dict[str, object]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(
                _replace_base(json.dumps({"call": name, **arguments}), MINIWOB_URL, self._miniwob).encode() + b"\n"
            )
            stdin.flush()
        except (OSError, ValueError) as error:  # ValueError says that the pipe is closed
            raise PageError("BrowserGym's process has ended") from error
        self._idle, deadline = False, time.monotonic() + deadline_s
        while b"\n" not in self._unread:
            if not wait([stdout.fileno()], max(0.0, deadline - time.monotonic())):
                raise PageError(f"BrowserGym's {name} took longer than {deadline_s:g} s")
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                raise PageError("BrowserGym's process has ended")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        self._idle = True
        answer: dict[str, object] = json.loads(_replace_base(line.decode(), self._miniwob, MINIWOB_URL))
        if "fault" in answer:
            raise BrowserError(f"BrowserGym's {name} failed: {answer['fault']}")
        return answer

    def close(self) -> None:
        """End the process and its browsers. No more than three times `CLOSE_S` is waited for."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        descendants = _descendants(self._process.pid)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S if self._idle else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(CLOSE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        deadline = time.monotonic() + CLOSE_S
        while any(map(_is_running, descendants)) and time.monotonic() < deadline:
            time.sleep(0.02)  # the driver ends its browsers by itself
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._folder.cleanup()


def _descendants(process: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(process).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _is_running(process: psutil.Process) -> bool:
    """Return True if the process runs; False also for one that has ended, though its parent has not waited for it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _miniwob_variable() -> dict[str, str]:
    """Return the variable that says where the pages of MiniWoB++ are, unless it is set or they are not installed."""
    if "MINIWOB_URL" in os.environ or importlib.util.find_spec("miniwob") is None:
        return {}
    return {"MINIWOB_URL": f"{served_pages()}/miniwob/"}


def _replace_base(text: str, base: str, name: str) -> str:
    return text.replace(base, name) if base and name else text
