"""An agent in a browser: the episode around the pages, whatever they are."""

import re
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, Self

from typing_extensions import override

from marl_ray.envs.text.base import Task, TextEnv
from marl_ray.envs.web.browser.accessibility import PageView
from marl_ray.envs.web.browser.action_text import WebAction, parse_web_action
from marl_ray.envs.web.browser.chromium import release_chromium, shared_chromium
from marl_ray.envs.web.browser.errors import ActionError, BrowserError, PageError
from marl_ray.envs.web.browser.perform import perform
from marl_ray.envs.web.browser.prompts import page_text, past_answer, past_answers, prompt_head
from marl_ray.envs.web.browser.recording import EpisodeRecord
from marl_ray.envs.web.browser.session import HEIGHT, WIDTH, BrowserSession
from marl_ray.envs.web.options import BrowserOptions

ENDINGS = (
    "stopped",
    "page_ended",
    "step_limit",
    "invalid_actions",
    "repeated_actions",
    "deadline",
    "page_fault",
    "site_fault",
)
"""Ends of an episode, `infos[agent]["ending"]`: by the agent; by the page; by the four limits; because the page or the
browser broke, or hung; because a site or a judge did not answer what scoring asks of it."""
TASK_STEPS = 10
"""Steps whose time opening a task has, and scoring it: each may load several pages."""
_MAX_READS = 5
"""Attempts to read a page that leaves for another one meanwhile, as a redirect does."""
_MAX_ADDRESS_LENGTH = 1000
"""Characters of an address that a prompt shows: a page may make its own as long as it likes."""
_PAGE_LEFT_TEXTS = "Execution context was destroyed", "has been closed"
"""Words of Playwright's errors where a page leaves for another one, or its tab closes, during a call."""


class BrowserEnv(TextEnv):
    """Base of environments in which one agent uses a browser.

    A subclass opens the pages and scores what was done there. Every episode has a browser context of its own, which is
    closed at its end, unless `keeps_context` says otherwise. All contexts of a process share a
    Chromium, which ends when all environments are closed.
    Whatever a page does ends in one of `ENDINGS`, and the costs until then are reported.
    An action that cannot be read or done changes nothing, and the next prompt says why.
    Metrics: `pass`, the score; `answered`, 1.0 if the agent stopped by itself; `failed_actions`, those that could not be
    done; `blocked`, requests and downloads that were stopped; `dialogs`, all dismissed.
    """

    metadata = {"name": "web", "render_modes": [], "is_parallelizable": False}

    def __init__(
        self,
        train: Sequence[Task],
        test: Sequence[Task],
        options: BrowserOptions,
        *,
        hosts: Collection[str],
        names: Mapping[str, str],
        size: tuple[int, int] = (WIDTH, HEIGHT),
    ):
        """Take the options and what a subclass knows besides.

        hosts: `HOST:PORT` of all that pages may reach.
        names: base URLs -> those that the agent reads and writes for them, so that prompts do not depend on the ports of a
            machine.
        size: width and height of the window in pixels.
        """
        super().__init__([options.agent], train, test, seed=options.seed, cost=options.cost, reward=options.reward)
        self.hosts, self.options, self._size = hosts, options, size
        self._base_to_name = [(base_pattern(url), name) for url, name in names.items()]
        self._name_to_base = [(base_pattern(name), url) for url, name in names.items()]
        self._head = prompt_head(options.thoughts)
        self.session: BrowserSession | None = None
        self.recording: EpisodeRecord | None = None
        self.view = PageView("", {})
        """The page as the agent was last shown it."""
        self._running = False

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise TypeError("an episode in a browser cannot be copied")

    @abstractmethod
    async def open_task(self, session: BrowserSession) -> None:
        """Open the first pages of `self.task`. An ActionError is shown to the agent."""

    @abstractmethod
    async def score(self, session: BrowserSession, answer: str) -> float:
        """Return the score of the episode, once the agent has stopped or a limit is reached. Raises BrowserError."""

    async def page_score(self, session: BrowserSession) -> float | None:
        """Return the score if the page itself has ended the episode; None while it continues. Asked after every action."""
        return None

    def keeps_context(self, session: BrowserSession) -> bool:
        """Return True if the next episode may use the context of the one that is over."""
        return False

    @property
    def steps_left(self) -> int:
        """Actions until `max_steps`."""
        return self.options.max_steps - self._turns

    def intent(self) -> str:
        """Return the task in words."""
        return str(self.task.prompt)

    def storage(self) -> str | None:
        """Return the file with the cookies with which the episode begins; None if it begins without."""
        return None

    @override
    def begin(self) -> None:
        session = self.session
        if session is not None and (self._running or not self.keeps_context(session)):
            self._close_session()
            session = None
        self._running = True
        self._begun, self.view = time.monotonic(), PageView("", {})
        self._history: list[str] = []
        self._done: Counter[WebAction] = Counter()
        self._repeats, self._last = 0, WebAction("")
        self._unreadable = self._failed_actions = self._dialogs = 0
        record, traces = self.options.record, self.options.traces
        self.recording = None if record is None else EpisodeRecord(record, self.task.task_id, traces)
        note = ""
        try:
            if session is None:
                session = self._new_session()
            else:
                session.begin_again()
            if self.recording is not None:
                self.recording.begin(session)
            note = self._try_action(session, self.open_task(session), "opening the task", TASK_STEPS)
            self._read_page(session)
        except BrowserError as error:
            note = str(error)
        if session is not None and self.recording is not None:
            self.recording.record_opening(session, self.intent(), note)
        self._ask(note)

    def act(self, agent: str, text: str) -> None:
        """Read an action from the agent's text, do it, and continue with the next prompt or end the episode.

        The first of these ends it: the agent's `stop`; the page's own score (`page_score`), which then counts; a limit. In
        the first and the last case the pages are scored as the agent left them. An action that cannot be read or done is no
        end: the page is read again, and the next prompt says why.

        An error of the page or the browser ends the episode with a score of 0. The ending is a `site_fault` where the
        episode was over and only its scoring failed, in a browser that still works, and else a `page_fault`: the agent
        may have caused that. Costs, history and recording have the step in every case.
        """
        begun, session, recording = time.monotonic(), self.session, self.recording
        note = ""
        ending = ""
        score = 0.0
        answer = ""
        try:
            action = parse_web_action(replace_bases(text, self._name_to_base))
            self._unreadable = 0
        except ActionError as error:
            action, note = WebAction(""), str(error)
            self._unreadable += 1
        self._note_repeats(action)
        target = self.view.elements.get(action.element)
        try:
            if session is None:
                raise PageError("no browser could be opened")
            session.dialogs.clear()
            if action.kind == "stop":
                ending, answer = "stopped", action.text
            elif action.kind:
                note = self._try_action(session, perform(session, action, self.view.elements), "the action")
                ended = session.call(self.page_score(session), "asking the page for its score")
                if ended is not None:
                    ending, score = "page_ended", ended
            ending = ending or self._reached_limit()
            if ending and ending != "page_ended":
                score = session.call(self.score(session, answer), "scoring", TASK_STEPS)
            elif not ending:
                self._read_page(session)
        except PageError as error:
            ending, note, score = "page_fault", str(error), 0.0
        except BrowserError as error:
            site_failed = ending and session is not None and not session.broken and session.chromium.connected
            ending, note, score = "site_fault" if site_failed else "page_fault", str(error), 0.0
        self._failed_actions += bool(note)
        self._dialogs += len(session.dialogs) if session is not None else 0
        seconds = time.monotonic() - begun
        self.spend(agent, calls=bool(action.kind), seconds=seconds)
        self._history.append(past_answer(text, note))
        if session is not None and recording is not None:
            line = {"action": text, "note": note, "ending": ending, "score": score, "seconds": seconds}
            line |= {"target": f"{target.role} {target.name!r}" if target else "", "dialogs": list(session.dialogs)}
            recording.step(session, **line)
        if not ending:
            self._ask(note)
            return
        self._finish(ending, score, answer)
        if session is not None and recording is not None:
            recording.result(ending=ending, reward=self.rewards[agent], **self.infos[agent]["metrics"])

    def close(self) -> None:
        """Close the context of the episode, and the process's Chromium if no other environment uses it."""
        self._close_session()
        release_chromium(self)

    def _close_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            self._end_recording(session)
            session.close()

    def _end_recording(self, session: BrowserSession) -> None:
        if self.recording is not None:
            self.recording.end(session)
            self.recording = None

    def _new_session(self) -> BrowserSession:
        """Open a context in the process's Chromium; one that has died meanwhile is started anew, once."""
        for last in (False, True):
            session = BrowserSession(shared_chromium(self), self.hosts, self.options.step_s)
            try:
                self.session = session.start(self.storage(), *self._size)
                return session
            except BrowserError:
                session.close()
                if last:
                    raise
        raise AssertionError("the loop returns or raises")

    def _try_action(self, session: BrowserSession, work: Any, name: str, steps: int = 1) -> str:
        """Do the work, and return a sentence that says why it could not be done; empty if it was. Raises PageError."""
        try:
            session.call(work, name, steps)
        except ActionError as error:
            return str(error)
        except BrowserError as error:
            if not _has_left(session, error):
                raise
            return "the page left for another one meanwhile"
        return ""

    def _read_page(self, session: BrowserSession) -> None:
        """Read the page, again where it leaves for another one meanwhile. Raises PageError for one that never rests."""
        for _ in range(_MAX_READS):
            try:
                self.view = session.call(session.view(), "reading the page")
                return
            except BrowserError as error:
                if not _has_left(session, error):
                    raise
        raise PageError(f"the page left for another one {_MAX_READS} times while it was read")

    def _note_repeats(self, action: WebAction) -> None:
        self._repeats = self._repeats + 1 if action == self._last else 1
        self._last = action
        self._done[action] += 1

    def _reached_limit(self) -> str:
        """Return the limit that this step has reached; empty if none."""
        if time.monotonic() - self._begun > self.options.episode_s:
            return "deadline"
        if self.options.patience is not None and self._unreadable >= self.options.patience:
            return "invalid_actions"
        typed = self._last.kind == "type"  # as in WebArena, what is typed counts over the whole episode
        repeats = self._done[self._last] if typed else self._repeats
        if self.options.patience is not None and self._last.kind and repeats >= self.options.patience:
            return "repeated_actions"
        return "step_limit" if self._turns >= self.options.max_steps else ""

    def _ask(self, note: str) -> None:
        session = self.session
        parts = [self._head, f"Task: {self.intent()}\n"]
        if self._history:
            parts.append(past_answers(self._history))
        elif note:
            parts.append(f"The page cannot be opened: {note}\n")
        if session is not None and session.dialogs:
            parts.append("Dialogs that were dismissed: " + "; ".join(session.dialogs) + "\n")
        page = page_text(self.view.text, self.options.observation_limit)
        address = session.url[:_MAX_ADDRESS_LENGTH] if session is not None else ""
        parts.append(f"({self.steps_left} actions left)\nAddress: {address}\nPage:\n{page}\nAction: ")
        self.ask(self.possible_agents[0], replace_bases("".join(parts), self._base_to_name))

    def _finish(self, ending: str, score: float, answer: str) -> None:
        session, self._running = self.session, False
        blocked = session.blocked if session is not None else 0
        if session is not None and self.keeps_context(session):
            self._end_recording(session)
        else:
            self._close_session()
        counts = {
            "pass": score,
            "answered": ending == "stopped",
            "failed_actions": self._failed_actions,
            "blocked": blocked,
            "dialogs": self._dialogs,
        }
        metrics = self.pay(answer, {name: float(value) for name, value in counts.items()})
        self.finish(score == 1.0, metrics)
        for agent in self.agents:
            self.infos[agent]["ending"] = ending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_left(session: BrowserSession, error: BrowserError) -> bool:
    """Return True for an error of a page that has left, where the browser still has one."""
    alive = not session.broken and session.chromium.connected and session.tabs > 0
    return alive and any(words in str(error) for words in _PAGE_LEFT_TEXTS)


def base_pattern(url: str) -> re.Pattern[str]:
    """Return the base URL where it stands in a text, and not as the beginning of another host or port."""
    return re.compile(re.escape(url) + r"(?![\w.:-]*\w)")


def replace_bases(text: str, bases: Sequence[tuple[re.Pattern[str], str]]) -> str:
    """Return the text with each base URL that a pattern of `base_pattern` matches replaced by the one beside it."""
    for pattern, url in bases:
        text = pattern.sub(url.replace("\\", r"\\"), text)
    return text
