"""Actions done in the browser with real mouse and keyboard events."""

from collections.abc import Awaitable, Mapping
from typing import TypeVar

from marl_ray.envs.web.browser.accessibility import ShownElement
from marl_ray.envs.web.browser.action_text import WebAction, playwright_keys
from marl_ray.envs.web.browser.errors import ActionError
from marl_ray.envs.web.browser.session import BrowserSession

T = TypeVar("T")

_SELECT = """function() {
    const list = this.closest("select");
    if (list.multiple) this.selected = !this.selected; else list.value = this.value, this.selected = true;
    list.dispatchEvent(new Event("input", {bubbles: true}));
    list.dispatchEvent(new Event("change", {bubbles: true}));
}"""
_SCROLL = "(s) => { const e = document.scrollingElement || document.body; e.scrollTop += s * window.innerHeight; }"


async def perform(session: BrowserSession, action: WebAction, elements: Mapping[int, ShownElement]) -> None:
    """Do an action other than `stop`, and wait for what it starts.

    elements: those that the agent was shown, with their roles.
    Raises ActionError if it cannot be done, with nothing changed, and PageError if the page can be used no more.
    """
    page = session.page
    match action.kind:
        case "click" | "hover" | "type":
            if action.element not in elements:
                raise ActionError(f"there is no element [{action.element}] in the observation")
            element = elements[action.element]
            if action.kind == "click" and element.role == "option":
                await _choose_option(session, action.element, element.node)
                await session.settle()
                return
            x, y = await _scroll_to_center(session, action.element, element.node)
            await page.mouse.move(x, y)
            if action.kind != "hover":
                await page.mouse.click(x, y)
            if action.kind == "type":
                await page.keyboard.type(action.text)
        case "press":
            await session.navigate(page.keyboard.press(playwright_keys(action.text)), f"pressing {action.text[:40]!r}")
        case "scroll":
            await page.evaluate(_SCROLL, -1 if action.text == "up" else 1)
        case "goto":
            await session.open(action.text)
        case "go_back":
            await session.navigate(page.go_back(), "going back")
        case "go_forward":
            await session.navigate(page.go_forward(), "going forward")
        case "new_tab":
            await session.new_tab()
        case "tab_focus":
            if action.tab >= session.tabs:
                raise ActionError(f"there is no tab {action.tab}; expected 0 to {session.tabs - 1}")
            session.tab = action.tab
            await session.page.bring_to_front()
        case "close_tab":
            await page.close()
            if session.tabs == 0:
                await session.new_tab()
            session.tab = session.tabs - 1
    await session.settle()


async def _scroll_to_center(session: BrowserSession, element: int, node: int) -> tuple[float, float]:
    """Return the middle of an element in the viewport, into which it is scrolled. Raises ActionError if it is gone."""
    devtools, place = await session.devtools(), {"backendNodeId": node}
    # An element without a box cannot be scrolled to, and the page may have replaced it since it was shown.
    await _raising_action_error(devtools.send("DOM.scrollIntoViewIfNeeded", place), element)
    quads = (await _raising_action_error(devtools.send("DOM.getContentQuads", place), element))["quads"]
    if not quads:
        raise ActionError(f"element [{element}] is not visible")
    corners = quads[0]
    return sum(corners[0::2]) / 4, sum(corners[1::2]) / 4


async def _choose_option(session: BrowserSession, element: int, node: int) -> None:
    """Choose an option: lists open outside of the page, where no mouse of the page's reaches."""
    devtools = await session.devtools()
    remote = await _raising_action_error(devtools.send("DOM.resolveNode", {"backendNodeId": node}), element)
    call = {"objectId": remote["object"]["objectId"], "functionDeclaration": _SELECT}
    result = await _raising_action_error(devtools.send("Runtime.callFunctionOn", call), element)
    if "exceptionDetails" in result:
        raise ActionError(f"option [{element}] cannot be chosen")


async def _raising_action_error(work: Awaitable[T], element: int) -> T:
    try:
        return await work
    except Exception as error:
        # Chromium's answer for a node that it does not know any more, or that has no box.
        if type(error).__module__.startswith("playwright") and "Protocol error" in str(error):
            raise ActionError(f"element [{element}] is gone or not visible") from error
        raise
