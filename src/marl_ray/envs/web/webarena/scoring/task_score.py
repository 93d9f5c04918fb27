"""The score of an episode, which is the product of its task's checks on the pages as the agent left them."""

import asyncio
from collections.abc import Mapping

from marl_ray.envs.web.browser.errors import ActionError, BrowserError, PageError
from marl_ray.envs.web.browser.session import BrowserSession
from marl_ray.envs.web.webarena.scoring.judges import FuzzyJudge
from marl_ray.envs.web.webarena.scoring.official import address_score, answer_score, content_score
from marl_ray.envs.web.webarena.scoring.programs import run_program
from marl_ray.envs.web.webarena.scoring.verified import response_score, unread_formats
from marl_ray.envs.web.webarena.tasks.programs import is_program, parse_program
from marl_ray.envs.web.webarena.tasks.schema import (
    AddressCheck,
    AnswerCheck,
    PageCheck,
    PageContent,
    RequestCheck,
    ResponseCheck,
    WebTask,
)
from marl_ray.errors import MarlRayError, one_line

LAST_PAGE = "last"


def check_scored(task: WebTask) -> None:
    """Raise MarlRayError for a task with a check that `task_score` has no evaluator for."""
    for check in task.checks:
        if isinstance(check, RequestCheck):
            raise MarlRayError(f"task {task.task_id}: NetworkEventEvaluator has no evaluator here")
        formats = unread_formats(check.schema) if isinstance(check, ResponseCheck) else []
        if formats:
            raise MarlRayError(f"task {task.task_id}: results_schema: the format {formats[0]!r} has no evaluator here")


async def task_score(
    session: BrowserSession, task: WebTask, answer: str, judge: FuzzyJudge, sites: Mapping[str, str]
) -> float:
    """Return 1.0 if every check of the task is met, else 0.0.

    A page that a check names and that cannot be opened scores 0. Raises PageError if the browser can be used no more, and
    BrowserError if a site's API or a judge does not answer.
    """
    for check in task.checks:
        if isinstance(check, AnswerCheck):
            score = await _answer_score(check, answer, task.prompt, judge)
        elif isinstance(check, AddressCheck):
            score = address_score(check.references, session.url)
        elif isinstance(check, ResponseCheck):
            score = response_score(check, answer)
        else:
            assert isinstance(check, PageCheck)
            score = await _pages_score(session, check, sites)
        if not score:
            return 0.0
    return 1.0


async def _answer_score(check: AnswerCheck, answer: str, intent: str, judge: FuzzyJudge) -> float:
    """Return the score of an answer.

    A judge may wait for a model, which is to hold up no other episode of this browser.
    """
    try:
        return await asyncio.to_thread(answer_score, check, answer, intent, judge)
    except Exception as error:  # whatever a judge of a user's raises
        raise BrowserError(f"the judge did not answer: {one_line(error)}") from error


async def _pages_score(session: BrowserSession, check: PageCheck, sites: Mapping[str, str]) -> float:
    for content in check.contents:
        try:
            text = await _read_part(session, content, sites)
        except ActionError:
            return 0.0
        if not content_score(content, text):
            return 0.0
    return 1.0


async def _read_part(session: BrowserSession, content: PageContent, sites: Mapping[str, str]) -> str:
    """Return the part of a page, as text. Raises ActionError if the page cannot be opened."""
    url = content.url
    if is_program(url):
        url = await run_program(parse_program(url), session, sites)
    if url != LAST_PAGE:
        await session.open(url)
        await session.settle()
    if is_program(content.locator):
        return await run_program(parse_program(content.locator), session, sites)
    if not content.locator.strip():
        return str(await session.page.content())
    for script in content.prepare:
        if await _evaluate_script(session, script) is None:
            break  # WebArena leaves out the scripts after one that fails
    return await _evaluate_script(session, content.locator) or ""


async def _evaluate_script(session: BrowserSession, script: str) -> str | None:
    """Return the text that Python has for the value of JavaScript on the page, `None` for null; None if it fails.

    Raises PageError if the page has crashed on it.
    """
    try:
        return str(await session.page.evaluate(f"() => {script}"))
    except Exception as error:
        if not type(error).__module__.startswith("playwright"):
            raise
        if session.broken or not session.chromium.connected:
            raise PageError(session.broken or "the browser has ended") from error
        return None
