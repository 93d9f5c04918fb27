"""The tasks of MiniWoB++ (https://miniwob.farama.org) in a real browser, served from the package `miniwob`."""

import functools
import http.server
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from marl_ray.envs.web.browser.session import BrowserSession, hosts_of
from marl_ray.envs.web.environment import BrowserEnv
from marl_ray.envs.web.options import BrowserOptions
from marl_ray.envs.web.page_server import serve_pages
from marl_ray.errors import MarlRayError, did_you_mean, install_hint
from marl_ray.extensions import check_numbers

WIDTH, HEIGHT = 500, 320
"""The viewport in pixels: a task is 160 by 210, and lists and dialogs stand out of it."""
DEFAULTS: dict[str, Any] = {"max_steps": 10, "patience": None, "observation_limit": 4000}
"""The defaults of `BrowserOptions` here: a task takes a few actions on a small page, which may all be the same."""
NEVER_MS = 1_000_000_000
"""The time that a page gives itself; the limits of the episode are of steps, so that a slow machine changes no score."""
_START_SCRIPT = """([seed, time]) => {
    document.activeElement.blur();
    window.scrollTo(0, 0);
    Math.seedrandom(seed);
    core.EPISODE_MAX_TIME = time;
    core.startEpisodeReal();
    for (const id of ["reward-display", "click-canvas"]) document.getElementById(id).style.display = "none";
}"""
_READY_SCRIPT = "() => typeof core === 'object' && core.cover_div !== null && WOB_TASK_READY"
_SCORE_SCRIPT = "() => typeof WOB_DONE_GLOBAL !== 'undefined' && WOB_DONE_GLOBAL ? WOB_RAW_REWARD_GLOBAL : null"
"""The page's reward once it is done; null before, and on any other page, to which an agent may go."""
_INTENT_SCRIPT = """() => {
    const query = document.getElementById("query");
    return typeof core.getUtterance === "function" ? core.getUtterance() : query.textContent;
}"""


@dataclass(frozen=True)
class MiniWobTask:
    """A page of MiniWoB++ with the seed of its contents."""

    task_id: str
    page: str
    seed: int
    level: float = 0.0

    @property
    def prompt(self) -> str:
        """The page's name: the task in words is only known once the page is open."""
        return self.page


class MiniWob(BrowserEnv):
    """One agent does tasks of MiniWoB++ with the actions of WebArena. The page itself says when an episode ends.

    tasks: names of pages, such as `click-test`; by default all.
    variants: training tasks of each page, by seed, 1000.
    held_out: held-out tasks of each page, of other seeds, 100.
    keep_pages: True begins an episode on the open page if the one before was on the same, as MiniWoB++'s own environment
        does; it takes a sixth of the time, which counts in training. False by default.
    browser: the options of `marl_ray.envs.web.options.BrowserOptions`; by default `max_steps` is 10, `patience` None and
        `observation_limit` 4000.

    Score: 1.0 where the page pays its whole reward, without its discount by time.

    Raises ValueError naming the option whose value is not one of these.
    """

    metadata = {"name": "miniwob", "render_modes": [], "is_parallelizable": False}

    def __init__(
        self,
        tasks: Sequence[str] | None = None,
        variants: int = 1000,
        held_out: int = 100,
        keep_pages: bool = False,
        **browser: Any,
    ):
        options = BrowserOptions(**(DEFAULTS | browser))
        check_numbers(MiniWob, {"variants": variants, "held_out": held_out})
        if variants < 1 or held_out < 0:
            raise ValueError(f"variants={variants}, held_out={held_out}; expected at least 1 and 0")
        all_pages = pages()
        page_names = all_pages if tasks is None else list(tasks)
        unknown = [name for name in page_names if name not in all_pages]
        if not page_names:
            raise ValueError("tasks: expected at least one page, got none")
        if unknown:
            raise ValueError(f"tasks: {unknown[0]!r} is no page{did_you_mean(str(unknown[0]), all_pages)}")
        train = tuple(_make_tasks(page_names, range(held_out, held_out + variants)))
        test = tuple(_make_tasks(page_names, range(held_out)))
        self.url = served_pages()
        hosts, names = hosts_of([self.url]), {self.url: "http://miniwob"}
        super().__init__(train, test, options, hosts=hosts, names=names, size=(WIDTH, HEIGHT))
        self._intent = ""
        self.keep_pages = keep_pages

    @override
    def keeps_context(self, session: BrowserSession) -> bool:
        # A page of MiniWoB stores nothing, so that a context hands no more on than the page itself.
        return self.keep_pages and not session.broken and session.chromium.connected and session.tabs == 1

    @override
    def intent(self) -> str:
        return self._intent or str(self.task.page)

    @override
    async def open_task(self, session: BrowserSession) -> None:
        self._intent = ""
        address = f"{self.url}/miniwob/{self.task.page}.html"
        if session.url.partition("#")[0] != address:
            await session.open(address)
            await session.page.wait_for_function(_READY_SCRIPT)
        await session.page.evaluate(_START_SCRIPT, [self.task.task_id, NEVER_MS])
        await session.page.wait_for_function(_READY_SCRIPT)
        intent: object = await session.page.evaluate(_INTENT_SCRIPT)
        text = intent.get("utterance", "") if isinstance(intent, dict) else intent
        self._intent = " ".join(str(text).split())

    @override
    async def page_score(self, session: BrowserSession) -> float | None:
        reward = await session.page.evaluate(_SCORE_SCRIPT)
        return None if reward is None else min(1.0, max(0.0, float(reward)))

    @override
    async def score(self, session: BrowserSession, answer: str) -> float:
        return await self.page_score(session) or 0.0


def _make_tasks(names: Sequence[str], seeds: range) -> list[MiniWobTask]:
    return [MiniWobTask(f"{name}.{seed}", name, seed) for seed in seeds for name in names]


def _find_pages() -> Path:
    """Return the folder of the package's pages.

    Raises MarlRayError if the package is not installed; it is not imported, because it brings Selenium.
    """
    package = importlib.util.find_spec("miniwob")
    if package is None or package.origin is None:
        raise MarlRayError(f"MiniWoB needs its pages: {install_hint('web')}")
    return Path(package.origin).parent / "html"


@functools.cache
def pages() -> list[str]:
    """Return the names of all pages. Raises MarlRayError if the package `miniwob` is not installed."""
    return sorted(path.stem for path in (_find_pages() / "miniwob").glob("*.html"))


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


@functools.cache
def served_pages() -> str:
    """Return the base URL of the pages, which a thread of this process serves to this machine alone."""
    return serve_pages(functools.partial(_QuietHandler, directory=str(_find_pages())), "miniwob")
