"""A browser context of one episode: its tabs, the hosts that it reaches, and its dialogs."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Collection, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from marl_ray.envs.web.browser.accessibility import PageView, page_view, snapshot_bounds
from marl_ray.envs.web.browser.chromium import CLOSE_S, Chromium, close_hung_chromium
from marl_ray.envs.web.browser.errors import ActionError, BrowserError, PageError
from marl_ray.errors import one_line

if TYPE_CHECKING:
    from playwright.async_api import CDPSession, Dialog, Download, Page, Request, WebSocket

T = TypeVar("T")

WIDTH, HEIGHT = 1280, 720
"""The viewport of WebArena, in pixels."""
MAX_TABS = 10
"""Maximum number of open tabs; a page that opens more has the newest closed."""
MAX_DIALOGS = 20
"""Dialogs of one step after which the page counts as broken."""
SETTLE_S = 0.02
"""Seconds in which the browser says that it sends an action's first request, after the page has gone on."""
QUIET_S = 0.5
"""Maximum seconds that are waited for requests other than of pages."""
LOAD_SHARE = 0.4
"""Share of a step's time that a page has to load, so that an agent can continue where one never does."""
WINDOW_S = 3.0
"""Maximum seconds that are waited for a window that a page opens."""
_NEXT_FRAME = "() => new Promise(r => { requestAnimationFrame(() => setTimeout(r)); setTimeout(r, 100); })"
_HOSTLESS_SCHEMES = "about", "data", "blob"
"""Schemes that reach no host."""
_EMPTY_PAGE = "about:blank"
_MAX_DIALOG_LENGTH = _MAX_TITLE_LENGTH = 200
"""Characters of a dialog's message, and of a tab's title, that a prompt shows: a page may make both as long as it likes."""
_DEAD_PROXY = "http://127.0.0.1:9"
"""A proxy that is none. What goes there fails, whoever asks for it: requests that follow a redirect, those of workers, of
prefetching, of sockets and of WebTransport, too, of which a page's own routes see nothing."""


class BrowserSession:
    """The browser as one episode uses it, with a context that shares no cookie and no tab with another.

    All methods with `async` run on the browser's thread; `start`, `call` and `close` are for every other thread.
    """

    def __init__(self, chromium: Chromium, hosts: Collection[str], step_s: float):
        """Take what the session may do.

        hosts: `HOST:PORT` of all that pages may reach.
        step_s: most seconds of each call.
        """
        self.chromium, self.hosts, self.step_s = chromium, frozenset(hosts), step_s
        self.context: Any = None
        self.tab = 0
        self.blocked = 0
        """Requests to other hosts, and downloads, that were stopped."""
        self.dialogs: list[str] = []
        """Dialogs of this step, each dismissed."""
        self.broken = ""
        """A sentence about what broke a page for good; empty while it works."""
        self._pages: list[Page] = []
        self._devtools: dict[Page, CDPSession] = {}
        self._windows = 0
        self._ids: dict[tuple[str, int], int] = {}
        self._pending: dict[Request, bool] = {}

    def start(self, storage: str | None = None, width: int = WIDTH, height: int = HEIGHT) -> Self:
        """Open the context with one empty tab. storage: a file with cookies, in Playwright's format.

        Raises BrowserError. A browser that opens none in time is ended.
        """
        try:
            self.call(self._start(storage, width, height), "opening a browser context")
        except PageError:  # an empty tab waits for no site
            close_hung_chromium(self.chromium)
            raise
        return self

    def call(self, work: Coroutine[object, object, T], name: str, steps: int = 1) -> T:
        """Return the result of a coroutine of this session, on the browser's thread, within the time of this many steps.

        Raises PageError if the session is broken, the browser was closed or the time is over, and BrowserError if Playwright
        reports an error.
        """
        if self.broken:
            work.close()
            raise PageError(self.broken)
        try:
            return self.chromium.run(work, self.step_s * steps, name)
        except PageError as error:
            self._break(str(error))  # what hangs once would hold up every later call
            raise

    def close(self) -> None:
        """Close the tabs and forget the context. Never fails, because a browser that cannot close it in time is ended."""
        if self.context is None:
            return
        context, self.context = self.context, None
        try:
            self.chromium.run(context.close(), CLOSE_S, "closing a browser context")
        except PageError:
            close_hung_chromium(self.chromium)
        except BrowserError:
            pass  # it has closed by itself

    def begin_again(self) -> None:
        """Count from zero for an episode that continues with the tab of the one before."""
        self.blocked = 0
        self.dialogs.clear()
        self._ids.clear()

    @property
    def page(self) -> "Page":
        """Playwright's page of the tab in front. Raises PageError if it is closed or has crashed."""
        if self.broken or not self._pages:
            raise PageError(self.broken or "no tab is open")
        return self._pages[min(self.tab, len(self._pages) - 1)]

    @property
    def tabs(self) -> int:
        """Number of open tabs."""
        return len(self._pages)

    @property
    def url(self) -> str:
        """Address of the tab in front; empty if there is none."""
        return str(self._pages[min(self.tab, len(self._pages) - 1)].url) if self._pages else ""

    async def devtools(self) -> "CDPSession":
        """Return the session of Chromium's DevTools protocol with the tab in front."""
        page = self.page
        if page not in self._devtools:
            devtools = self._devtools[page] = await self.context.new_cdp_session(page)
            devtools.on("Page.windowOpen", self._on_window_opened)
            await devtools.send("Page.enable")
        return self._devtools[page]

    async def new_tab(self) -> None:
        """Open an empty tab in front. Raises ActionError beyond `MAX_TABS`."""
        if self.tabs >= MAX_TABS:
            raise ActionError(f"{MAX_TABS} tabs are open, and that is the most")
        await self.context.new_page()
        self.tab = self.tabs - 1
        await self.devtools()  # a page that is on its way to another begins none

    async def open(self, url: str) -> None:
        """Go to an address. Raises ActionError for one that may not be reached, or that does not answer with a page."""
        if not self.may_reach(url) or (urlsplit(url).scheme in _HOSTLESS_SCHEMES and url != _EMPTY_PAGE):
            self.blocked += 1  # a page of its own making is no way to do a task
            raise ActionError(f"{url[:200]} is outside of the sites of this task")
        await self.navigate(self.page.goto(url, wait_until="load"), f"opening {url[:200]}")

    async def navigate(self, work: Awaitable[T], name: str) -> T:
        """Return the result of a navigation. Raises ActionError if it fails while the page lives on."""
        try:
            return await work
        except Exception as error:
            if not type(error).__module__.startswith("playwright") or self.broken or not self.chromium.connected:
                raise
            await self._stop_loading()
            raise ActionError(f"{name} failed: {one_line(error)[:300]}") from error

    def may_reach(self, url: str) -> bool:
        """Return True for an address on one of the hosts, or on none."""
        try:
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "ws": 80, "https": 443, "wss": 443}.get(parts.scheme)
        except ValueError:
            return False
        return parts.scheme in _HOSTLESS_SCHEMES or (
            port is not None and _host_and_port(parts.hostname, port) in self.hosts
        )

    async def settle(self) -> None:
        """Wait until an action's pages are loaded, and at most `QUIET_S` for its other requests.

        Raises ActionError for a page that does not load in time, and PageError for one that has broken.
        """
        with _ignoring_closed():  # a page that is left ends no turn
            await self.page.evaluate(_NEXT_FRAME)
        await asyncio.sleep(SETTLE_S)
        begun = time.monotonic()
        while self._is_loading(time.monotonic() - begun):
            if self.broken:
                raise PageError(self.broken)
            await asyncio.sleep(0.01)
        if any(self._pending.values()):
            await self._stop_loading()
            raise ActionError("the page that follows does not load")
        await self.navigate(self.page.wait_for_load_state("load"), "loading the page")
        if self.broken:
            raise PageError(self.broken)

    async def _stop_loading(self) -> None:
        """Give up the page that does not load: while it is awaited, the page before answers nothing."""
        with _ignoring_closed():
            await (await self.devtools()).send("Page.stopLoading")
        self._pending.clear()

    def _is_loading(self, waited_s: float) -> bool:
        pages = any(self._pending.values()) and waited_s < self.step_s * LOAD_SHARE
        others = bool(self._pending) and waited_s < QUIET_S
        return pages or others or (self._windows > 0 and waited_s < WINDOW_S)

    async def view(self) -> PageView:
        """Return what an agent sees: the tabs in one line, and the accessibility tree of the one in front."""
        devtools = await self.devtools()
        snapshot, tree, frames = await asyncio.gather(
            devtools.send("DOMSnapshot.captureSnapshot", {"computedStyles": []}),
            devtools.send("Accessibility.getFullAXTree"),
            devtools.send("Page.getFrameTree"),
        )
        document = frames["frameTree"]["frame"]["loaderId"]
        size = self.page.viewport_size
        assert size is not None  # `start` gives one
        tree_view = page_view(
            tree["nodes"], snapshot_bounds(snapshot), size["width"], size["height"], self._ids, document
        )
        titles = [
            f"Tab {k}{' (current)' if k == min(self.tab, self.tabs - 1) else ''}: {await _read_title(page)!r}"
            for k, page in enumerate(list(self._pages))  # windows open and close meanwhile
        ]
        return PageView(f"{' | '.join(titles)}\n\n{tree_view.text}", tree_view.elements)

    async def _start(self, storage: str | None, width: int, height: int) -> None:
        self.context = await self.chromium.browser.new_context(
            viewport={"width": width, "height": height},
            accept_downloads=False,
            service_workers="block",  # no event would tell of their requests
            storage_state=storage,
            proxy={"server": _DEAD_PROXY, "bypass": ",".join(sorted(self.hosts))},  # nothing else is reached
        )
        self.context.set_default_timeout(self.step_s * LOAD_SHARE * 1000)
        self.context.on("page", self._on_opened)
        self.context.on("dialog", self._dismiss)
        self.context.on("request", self._on_requested)
        self.context.on("requestfinished", self._on_answered)
        self.context.on("requestfailed", self._on_failed)
        await self.new_tab()

    def _on_opened(self, page: "Page") -> None:
        self._pages.append(page)
        self._windows = max(0, self._windows - 1)
        page.on("crash", lambda _: self._break("the page has crashed"))
        page.on("close", self._on_closed)
        page.on("download", self._on_downloaded)
        page.on("websocket", self._count_outside)
        if self.tabs > MAX_TABS:
            _in_background(page.close())

    def _on_window_opened(self, _: object) -> None:
        self._windows += 1

    def _on_closed(self, page: "Page") -> None:
        number = self._pages.index(page)
        self._pages.remove(page)
        self._devtools.pop(page, None)
        self._pending.clear()  # requests of a closed page are never answered
        if self.tab >= number and self.tab > 0:
            self.tab -= 1

    def _on_downloaded(self, download: "Download") -> None:
        self.blocked += 1  # the context accepts none
        _in_background(download.cancel())

    def _on_requested(self, request: "Request") -> None:
        self._pending[request] = request.is_navigation_request()

    def _on_answered(self, request: "Request") -> None:
        self._pending.pop(request, None)

    def _on_failed(self, request: "Request") -> None:
        self._on_answered(request)
        self._count_outside(request)

    def _count_outside(self, request: "Request | WebSocket") -> None:
        self.blocked += not self.may_reach(request.url)

    def _dismiss(self, dialog: "Dialog") -> None:
        self.dialogs.append(f"{dialog.type}: {str(dialog.message)[:_MAX_DIALOG_LENGTH]!r}")
        if len(self.dialogs) > MAX_DIALOGS:
            self._break(f"the page has opened more than {MAX_DIALOGS} dialogs")
        # Dismissed, the dialog that asks if a page may be left would keep the agent on it.
        _in_background(dialog.accept() if dialog.type == "beforeunload" else dialog.dismiss())

    def _break(self, reason: str) -> None:
        self.broken = self.broken or reason


async def _read_title(page: "Page") -> str:
    """Return the title of a tab; empty for one that has just closed."""
    title = ""
    with _ignoring_closed():
        title = str(await page.title())
    return title[:_MAX_TITLE_LENGTH]


_tasks: set[asyncio.Task[None]] = set()


def _in_background(work: Awaitable[object]) -> None:
    """Run what no one waits for; its errors say that the page is closed."""

    async def run() -> None:
        with _ignoring_closed():
            await work

    task = asyncio.get_running_loop().create_task(run())
    _tasks.add(task)  # the loop itself keeps weak references only
    task.add_done_callback(_tasks.discard)


@contextlib.contextmanager
def _ignoring_closed() -> Iterator[None]:
    """Leave out Playwright's errors, all of which are of a page or a context that has just closed."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("playwright"):
            raise


def hosts_of(urls: Sequence[str]) -> set[str]:
    """Return `HOST:PORT` of addresses, as a session takes them. Raises ValueError for one that is none."""
    hosts = set()
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address with http:// or https://")
        hosts.add(_host_and_port(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)))
    return hosts


def _host_and_port(host: str | None, port: int) -> str:
    """Return `HOST:PORT`, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in (host or "") else f"{host}:{port}"
