"""An episode as files: a line for every step, a screenshot, and Playwright's trace."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from marl_ray.envs.web.browser.errors import BrowserFault
from marl_ray.envs.web.browser.session import BrowserSession
from marl_ray.errors import MarlRayError, one_line

STEPS, TRACE = "steps.jsonl", "trace.zip"


class EpisodeRecord:
    """A folder of one episode: `steps.jsonl`, `000.png` and on, and `trace.zip` where traces are kept.

    What the browser cannot deliver any more is left out. Raises MarlRayError if the folder cannot be written.
    """

    def __init__(self, root: str, task_id: str, traces: bool):
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]", "_", task_id)[:80]
            self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))  # episodes of all workers share the root
        except OSError as error:
            raise MarlRayError(f"record: {root} cannot be written ({one_line(error)})") from error
        self.traces, self._steps = traces, 0

    def begin(self, session: BrowserSession) -> None:
        """Start the trace. Raises BrowserFault."""
        if self.traces:
            session.call(session.context.tracing.start(screenshots=True, snapshots=True), "starting a trace")

    def step(self, session: BrowserSession, **values: Any) -> None:
        """Add a step: what the agent did and saw, and how the tab in front looks."""
        line = {"step": self._steps, "url": session.url, **values}
        try:
            picture = session.call(_screenshot(session), "taking a screenshot")
            (self.folder / f"{self._steps:03d}.png").write_bytes(picture)
        except BrowserFault as error:
            line["screenshot"] = str(error)
        with (self.folder / STEPS).open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._steps += 1

    def end(self, session: BrowserSession) -> None:
        """Write the trace."""
        if self.traces and not session.broken and session.context is not None:
            try:
                session.call(session.context.tracing.stop(path=self.folder / TRACE), "writing a trace")
            except BrowserFault as error:
                (self.folder / f"{TRACE}.missing").write_text(f"{error}\n")


async def _screenshot(session: BrowserSession) -> bytes:
    return bytes(await session.page.screenshot())
