"""Actions of an agent: those of WebArena, read from its text.

The format is that of `create_id_based_action` of https://github.com/web-arena-x/webarena, browser_env/actions.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from marl_ray.envs.web.browser.errors import ActionError

ACTION_FORMS: Mapping[str, str] = {
    "click": "click [id]",
    "hover": "hover [id]",
    "type": "type [id] [text] [1 to press Enter afterwards, 0 not to]",
    "press": "press [key or keys, such as ctrl+a]",
    "scroll": "scroll [up or down]",
    "goto": "goto [url]",
    "go_back": "go_back",
    "go_forward": "go_forward",
    "new_tab": "new_tab",
    "tab_focus": "tab_focus [number]",
    "close_tab": "close_tab",
    "stop": "stop [answer]",
}
"""The form of every action."""
_PATTERNS = {
    "click": r"click ?\[(?P<element>\d+)\]",
    "hover": r"hover ?\[(?P<element>\d+)\]",
    "type": r"type ?\[(?P<element>\d+)\] ?\[(?P<text>.+)\] ?\[(?P<enter>\d+)\]",
    "press": r"press ?\[(?P<text>.+)\]",
    "scroll": r"scroll ?\[?(?P<text>up|down)\]?",
    "goto": r"goto ?\[(?P<text>.+)\]",
    "tab_focus": r"tab_focus ?\[(?P<tab>\d+)\]",
}
_QUOTED_ACTION = re.compile(r"```(.*?)```", re.DOTALL)
_STOP_ANSWER = re.compile(r"stop ?\[(.+)\]")
_MAX_DIGITS = 9
"""Digits of an element's id or a tab's number; Python refuses to read thousands of digits as a number."""
_KEYS = {
    **{name.lower(): name for name in ("Backquote", "Minus", "Equal", "Backslash", "Backspace", "Tab", "Delete")},
    **{name.lower(): name for name in ("Escape", "ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "End", "Enter")},
    **{name.lower(): name for name in ("Home", "Insert", "PageDown", "PageUp", "Shift", "Alt", "Control", "Space")},
    **{f"f{k}": f"F{k}" for k in range(1, 13)},
    "ctrl": "Control",
    "meta": "Control",
    "esc": "Escape",
    "return": "Enter",
}


@dataclass(frozen=True)
class WebAction:
    """One action."""

    kind: str
    """A name of `ACTION_FORMS`."""
    element: int = 0
    """The element's number in the observation, where the action has one."""
    text: str = ""
    """Typed text, with a line feed where Enter is pressed; keys; a direction; an address; the answer."""
    tab: int = 0


def quoted_action(response: str) -> str:
    """Return the text between the first ``` and the next, or the response itself."""
    quoted = _QUOTED_ACTION.search(response)
    return (quoted[1] if quoted else response).strip()


def parse_web_action(response: str) -> WebAction:
    """Return the action in an agent's response, which is that of `quoted_action`.

    Raises ActionError, with the form that is expected.
    """
    text = quoted_action(response)
    kind = text.partition("[")[0].strip() if "[" in text else text.partition("\n")[0].partition(" ")[0]
    if kind not in ACTION_FORMS:
        raise ActionError(f"{kind[:40]!r:.60} is no action; expected one of {', '.join(ACTION_FORMS)}")
    if kind == "stop":
        answer = _STOP_ANSWER.search(text)
        return WebAction("stop", text=answer[1] if answer else "")
    if kind not in _PATTERNS:
        return WebAction(kind)
    if kind == "type" and not text.endswith(("[0]", "[1]")):
        text += " [1]"
    match = re.search(_PATTERNS[kind], text)
    parts = match.groupdict() if match else {}
    if match is None or any(len(parts.get(name, "")) > _MAX_DIGITS for name in ("element", "tab")):
        raise ActionError(f"{text[:80]!r:.100} is not understood; expected {ACTION_FORMS[kind]}")
    typed = parts.get("text", "") + ("\n" if parts.get("enter") == "1" else "")
    return WebAction(kind, int(parts.get("element", 0)), typed, int(parts.get("tab", 0)))


def playwright_keys(keys: str) -> str:
    """Return the keys such as `ctrl+a` by the names of Playwright."""
    return "+".join(_KEYS.get(key.strip().lower(), key.strip()) for key in keys.split("+")) if keys != "+" else keys
