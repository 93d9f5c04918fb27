"""One Chromium for a process, driven from its own thread, with a deadline for whatever is asked of it."""

import asyncio
import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from marl_ray.envs.web.browser.errors import BrowserError, PageError
from marl_ray.errors import MarlRayError, install_hint, one_line
from marl_ray.temporary_folders import object_folder

if TYPE_CHECKING:
    from playwright.async_api import Playwright

EXECUTABLE_VARIABLE = "CHROMIUM"
"""The environment variable that names another Chromium than the one on the path."""
LAUNCH_S = 60.0
"""Seconds in which Chromium must start; it takes about one, and more while other processes start theirs."""
CLOSE_S = 10.0
"""Seconds that the browser, or a context of it, may take to close before it is ended."""
GRACE_S = 5.0
"""Seconds that a cancelled call may take to end."""
_EXECUTABLE_NAMES = "chromium", "chromium-browser", "google-chrome-stable", "google-chrome"
_FLAGS = (
    "--disable-dev-shm-usage",  # containers give little shared memory
    "--disable-gpu",
    "--dns-prefetch-disable",  # no host is looked up that no request is allowed to reach
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",  # requests alone can be blocked
)
_MAX_ROOT_LENGTH = 13
"""Characters of a temporary folder in which Chromium's socket, at most 94 characters further, is within a socket's 107."""
T = TypeVar("T")


class Chromium:
    """A running Chromium.

    Every method may be called from any thread, and none waits longer than its deadline. Raises MarlRayError if
    Playwright or Chromium is not installed, or Chromium does not start within `LAUNCH_S`.
    """

    def __init__(self) -> None:
        executable = find_chromium()
        try:
            from playwright.async_api import async_playwright
        except ImportError as error:
            raise MarlRayError(f"web environments need Playwright: {install_hint('web')}") from error
        self._make = async_playwright
        self._files = browser_files()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chromium", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._is_closed = False
        self._calls: set[Future[Any]] = set()
        self._playwright: Playwright | None = None
        self.browser: Any = None
        try:
            self.run(self._launch(executable), LAUNCH_S, "starting Chromium")
        except BaseException as error:
            self.close()
            if isinstance(error, BrowserError):
                raise MarlRayError(f"{executable}: {error}") from error
            raise

    def run(self, work: Coroutine[object, object, T], deadline_s: float, name: str) -> T:
        """Return the result of a coroutine on the browser's thread. `name` says what it does, for messages.

        Raises PageError if it takes longer than `deadline_s` or the browser was closed, BrowserError if Playwright reports
        an error.
        """
        with self._lock:
            if self._is_closed:
                work.close()
                raise PageError(f"{name} failed: the browser was closed")
            future = self._begin(work, deadline_s)
            self._calls.add(future)
        try:
            return self._result(future, deadline_s, name)
        finally:
            self._calls.discard(future)

    def _begin(self, work: Coroutine[object, object, T], deadline_s: float) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, deadline_s), self._loop)

    def _result(self, future: "Future[T]", deadline_s: float, name: str) -> T:
        """Return the result of what `_begin` began. Raises as `run` does."""
        try:
            return future.result(deadline_s + GRACE_S)
        except TimeoutError:
            future.cancel()
            raise PageError(f"{name} took longer than {deadline_s:g} s") from None
        except CancelledError:  # by `close`
            raise PageError(f"{name} failed: the browser was closed") from None
        except BrowserError:
            raise
        except Exception as error:
            if type(error).__module__.startswith("playwright"):
                raise BrowserError(f"{name} failed: {one_line(error)}") from error
            raise

    @property
    def connected(self) -> bool:
        """False once the browser was closed, has ended or crashed."""
        return not self._is_closed and self.browser is not None and bool(self.browser.is_connected())

    def close(self) -> None:
        """End the browser and its processes. No more than `CLOSE_S` and twice `GRACE_S` are waited for.

        Calls of `run` fail from now on, also those that are not done. A browser that hangs is killed.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for call in list(self._calls):
                call.cancel()
            future = self._begin(self._stop(), CLOSE_S)
        with contextlib.suppress(BrowserError):
            self._result(future, CLOSE_S, "closing Chromium")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._files.cleanup()

    async def _launch(self, executable: str) -> None:
        with _temporary_files_in(self._files.name):
            self._playwright = await self._make().start()
        self.browser = await self._playwright.chromium.launch(
            executable_path=executable,
            args=list(_FLAGS),
            chromium_sandbox=os.geteuid() != 0,  # Chromium refuses its sandbox to root
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
            timeout=LAUNCH_S * 1000,
        )

    async def _stop(self) -> None:
        try:
            if self.browser is not None:
                await self.browser.close()
        finally:  # a browser that hangs is killed by the driver, which ends here
            if self._playwright is not None:
                await self._playwright.stop()


def browser_files() -> tempfile.TemporaryDirectory[str]:
    """Return an empty folder for the profile of a browser.

    Playwright's driver deletes the profile; where it is killed, the next process that makes such a folder
    deletes this one.
    """
    return object_folder("web", _MAX_ROOT_LENGTH)


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Have the processes that are started in the block put their temporary files into `folder`.

    Playwright's driver takes no other environment than that of this process; Python itself has already chosen
    its own folder.
    """
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def find_chromium() -> str:
    """Return the path of Chromium. Raises MarlRayError where there is none."""
    program = os.environ.get(EXECUTABLE_VARIABLE)
    path = shutil.which(program) if program else next(filter(None, map(shutil.which, _EXECUTABLE_NAMES)), None)
    if path is None:
        where = f"{EXECUTABLE_VARIABLE}={program} is no program" if program else "there is none on the path"
        raise MarlRayError(f"web environments need Chromium, and {where}; on Debian: apt-get install chromium")
    return path


_lock = threading.Lock()
_shared: dict[int, Chromium] = {}
_users: dict[int, WeakSet[object]] = {}


def shared_chromium(user: object) -> Chromium:
    """Return the Chromium of this process, started anew if it has crashed.

    The browser runs until all users are `release_chromium`. Raises MarlRayError as `Chromium` does.
    """
    with _lock:
        _users.setdefault(os.getpid(), WeakSet()).add(user)
        chromium = _shared.get(os.getpid())  # a forked process starts its own
        if chromium is not None and not chromium.connected:
            chromium.close()
            chromium = None
        if chromium is None:
            chromium = _shared[os.getpid()] = Chromium()
        return chromium


def release_chromium(user: object) -> None:
    """End the Chromium of this process if no one else uses it."""
    with _lock:
        users = _users.get(os.getpid(), WeakSet())
        users.discard(user)
        chromium = _shared.pop(os.getpid(), None) if not users else None
        if chromium is not None:
            chromium.close()


def close_hung_chromium(chromium: Chromium) -> None:
    """End a browser that answers nothing. Sessions that are open in it say so, and the next one gets another browser."""
    with _lock:
        if _shared.get(os.getpid()) is chromium:
            del _shared[os.getpid()]
    chromium.close()


def close_shared_chromium() -> None:
    """End the Chromium of this process, if it has one."""
    with _lock:
        chromium = _shared.pop(os.getpid(), None)
    if chromium is not None:
        chromium.close()


atexit.register(close_shared_chromium)
