"""The expert of synthetic tasks, which turns a step of a plan into an action on the page that it reads."""

import re

from marl_ray.errors import MarlRayError


def expert_action(step: tuple[str, ...], prompt: str) -> str:
    """Return the action for a step of a synthetic task's `Plan`, with the id that the prompt shows.

    The plan is of `marl_ray.envs.web.webarena.site_pack.synthetic_tasks`. Raises MarlRayError if the page has no element
    of that name.
    """
    kind, *arguments = step
    if kind == "stop":
        return f"stop [{arguments[0]}]"
    if kind == "tab":
        return f"tab_focus [{arguments[0]}]"
    element = _find_element(arguments[0], prompt)
    return f"click [{element}]" if kind == "click" else f"type [{element}] [{arguments[1]}] [1]"


def _find_element(name: str, prompt: str) -> str:
    """Return the id of the link, the button or the text box of this name."""
    line = re.compile(rf"^\s*\[(\d+)\] (?:link|button|textbox) {re.escape(repr(name))}", re.MULTILINE)
    match = line.search(prompt)
    if match is None:
        raise MarlRayError(f"the page has no link, button or text box {name!r}")
    return match[1]
