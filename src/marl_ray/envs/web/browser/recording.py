"""An episode as files: a line and a screenshot of every step, a page that shows them, and Playwright's trace."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from marl_ray.envs.web.browser.episode_page import episode_page
from marl_ray.envs.web.browser.errors import BrowserError
from marl_ray.envs.web.browser.session import BrowserSession
from marl_ray.errors import MarlRayError, one_line
from marl_ray.json_types import JsonObject

STEPS_FILE, PAGE_FILE, TRACE_FILE = "steps.jsonl", "episode.html", "trace.zip"
START_PICTURE = "start.png"


class EpisodeRecord:
    """A folder of one episode, with a picture of every step and a page that shows them.

    It holds `steps.jsonl`, `start.png`, `000.png` and on, and `trace.zip` where traces are kept. `episode.html` shows
    all of them, and is there from the first step on. What the browser cannot deliver any more is left out. Raises
    MarlRayError if the folder cannot be written.
    """

    def __init__(self, root: str, task_id: str, traces: bool):
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]", "_", task_id)[:80]
            self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))  # episodes of all workers share the root
        except OSError as error:
            raise MarlRayError(f"record: {root} cannot be written ({one_line(error)})") from error
        self.traces = traces
        self._about: dict[str, object] = {"task_id": task_id}
        self._lines: list[JsonObject] = []
        """The opening, and every step."""

    def begin(self, session: BrowserSession) -> None:
        """Start the trace. Raises BrowserError."""
        if self.traces:
            session.call(session.context.tracing.start(screenshots=True, snapshots=True), "starting a trace")

    def record_opening(self, session: BrowserSession, task: str, note: str) -> None:
        """Keep how the episode begins."""
        self._about["task"] = task
        self._lines.append({"url": session.url, "note": note} | self._picture(session, START_PICTURE))

    def step(self, session: BrowserSession, **values: object) -> None:
        """Add a step: what the agent did and saw, and how the tab in front looks."""
        number = len(self._lines) - 1
        line = {"step": number, "url": session.url, **values}
        picture = self._picture(session, f"{number:03d}.png")
        self._lines.append(line | picture)
        with (self.folder / STEPS_FILE).open("a") as file:
            file.write(json.dumps(line | picture) + "\n")
        self._write()

    def result(self, **values: Any) -> None:
        """Add what the episode came to, for the page."""
        self._about |= values
        self._write()

    def end(self, session: BrowserSession) -> None:
        """Write the trace."""
        if self.traces and not session.broken and session.context is not None:
            try:
                session.call(session.context.tracing.stop(path=self.folder / TRACE_FILE), "writing a trace")
            except BrowserError as error:
                (self.folder / f"{TRACE_FILE}.missing").write_text(f"{error}\n")

    def _picture(self, session: BrowserSession, name: str) -> dict[str, str]:
        """Return the name of a screenshot that is written, or why there is none."""
        try:
            (self.folder / name).write_bytes(session.call(_screenshot(session), "taking a screenshot"))
        except BrowserError as error:
            return {"screenshot": str(error)}
        return {"picture": name}

    def _write(self) -> None:
        (self.folder / PAGE_FILE).write_text(episode_page(self._about, self._lines), encoding="utf-8")


async def _screenshot(session: BrowserSession) -> bytes:
    return bytes(await session.page.screenshot())
