"""Tasks of WebArena in a real browser, on the sites where their base URLs say that they are."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from marl_ray.envs.web.browser.session import BrowserSession, hosts_of
from marl_ray.envs.web.environment import BrowserEnv
from marl_ray.envs.web.options import BrowserOptions
from marl_ray.envs.web.webarena.scoring.judges import FuzzyJudge, WordJudge
from marl_ray.envs.web.webarena.scoring.task_score import check_scored, task_score
from marl_ray.envs.web.webarena.site_pack.server import serve_sites
from marl_ray.envs.web.webarena.site_pack.synthetic_tasks import synthetic_tasks
from marl_ray.envs.web.webarena.tasks.reading import read_web_tasks, split_by_template, tasks_of_sites
from marl_ray.envs.web.webarena.tasks.schema import WebTask, with_site_urls
from marl_ray.envs.web.webarena.tasks.webarena import webarena_task
from marl_ray.errors import MarlRayError
from marl_ray.extensions import import_reference

SITE_ADDRESSES = {
    "shopping": "http://onestopmarket.com",
    "shopping_admin": "http://luma.com/admin",
    "gitlab": "http://gitlab.com",
    "reddit": "http://reddit.com",
    "wikipedia": "http://wikipedia.org",
    "map": "http://openstreetmap.org",
    "homepage": "http://homepage.com",
}
"""The addresses that WebArena shows to agents for its sites."""
WORLD_SEED = 0
"""Seed of the world of synthetic tasks."""
SPLIT_SEEDS = {"train": 0, "test": 1}
"""Seeds of what is asked in each split of the synthetic tasks."""


class WebArena(BrowserEnv):
    """One agent does tasks in the format of WebArena, with its actions and its evaluators.

    data: a file of tasks; without it tasks on a small shop, forum and wiki (`envs/web/webarena/site_pack`), which this
        process serves.
    sites: name of a site -> its base URL, with `data`; tasks that need another site are left out.
    test_data: a file of held-out tasks, with `data`.
    held_out: the share of the templates of `data` that is held out where `test_data` is not given, 0.2. Synthetic tasks
        have other ones of the same templates.
    allow: base URLs of further hosts that pages may reach, by default none.
    login: the folder with the files of cookies that the tasks name.
    judge: `package.module:NAME` of a callable that returns the judge of fuzzy matches; without it words are compared.
    browser: the options of `marl_ray.envs.web.options.BrowserOptions`, with its defaults.

    Raises ValueError naming the option whose value makes no sense, or does not fit the others.
    """

    metadata = {"name": "webarena", "render_modes": [], "is_parallelizable": False}

    def __init__(
        self,
        data: str | None = None,
        sites: Mapping[str, str] | None = None,
        test_data: str | None = None,
        held_out: float = 0.2,
        allow: Sequence[str] = (),
        login: str | None = None,
        judge: str | None = None,
        **browser: Any,
    ):
        options = BrowserOptions(**browser)
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out={held_out}, expected at least 0 and below 1")
        if data is None and (sites or test_data):
            raise ValueError("sites, test_data: expected with `data`, a file of tasks")
        if data is not None and not sites:
            raise ValueError("sites: expected the base URL of each site, with `data`")
        urls = serve_sites(WORLD_SEED) if data is None else sites or {}
        self.sites = {site: url.rstrip("/") for site, url in urls.items()}
        hosts = hosts_of([*self.sites.values(), *allow])
        if data is None:
            train, test = (self._with_addresses(_tasks_of_split(split)) for split in ("train", "test"))
        elif test_data is not None:
            train, test = self._with_addresses(read_web_tasks(data)), self._with_addresses(read_web_tasks(test_data))
        else:
            train, test = split_by_template(self._with_addresses(read_web_tasks(data)), held_out)
        if login is not None and not os.path.isdir(login):
            raise ValueError(f"login={login!r}, expected a folder")
        self.login = login
        self.judge: FuzzyJudge = WordJudge() if judge is None else import_reference(judge)()
        names = {url: SITE_ADDRESSES[site] for site, url in self.sites.items()}
        super().__init__(train, test, options, hosts=hosts, names=names)

    def _with_addresses(self, tasks: Sequence[WebTask]) -> tuple[WebTask, ...]:
        """Return the tasks that need no other sites, with their addresses."""
        placed = tuple(with_site_urls(task, self.sites) for task in tasks_of_sites(tasks, list(self.sites)))
        if not placed:
            raise MarlRayError(f"sites: no task needs only {', '.join(self.sites)}")
        for task in placed:
            check_scored(task)
        return placed

    @override
    def storage(self) -> str | None:
        if self.login is None or not self.task.login:
            return None
        path = os.path.join(self.login, os.path.basename(self.task.login))
        if not os.path.exists(path):
            raise MarlRayError(f"login: expected the file {path}, which task {self.task.task_id} needs")
        return path

    @override
    async def open_task(self, session: BrowserSession) -> None:
        for number, url in enumerate(self.task.start_urls):
            if number:
                await session.new_tab()
            await session.open(url)
        session.tab = 0
        await session.settle()

    @override
    async def score(self, session: BrowserSession, answer: str) -> float:
        return await task_score(session, self.task, answer, self.judge, self.sites)


def _tasks_of_split(split: str) -> list[WebTask]:
    """Return the synthetic tasks of a split. Of those that are asked in both, the test has none."""
    tasks = [webarena_task(made.record) for made in synthetic_tasks(WORLD_SEED, SPLIT_SEEDS[split])]
    train_prompts = {task.prompt for task in _tasks_of_split("train")} if split == "test" else set()
    return [task for task in tasks if task.prompt not in train_prompts]
