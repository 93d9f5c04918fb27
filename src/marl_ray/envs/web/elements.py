"""A page as numbers of a fixed size: its elements, and what can be done with each.

The elements that match the task best come first. Small policies read no text. For each element they are given how well
its name matches the task, its role and its state; they choose an element to click, or to type a quoted phrase of the
task into.
"""

import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from marl_ray.envs.web.browser.accessibility import PageView, ShownElement

MAX_PHRASES = 2
"""Quoted phrases of a task that can be typed."""
SCROLL_ACTION = "scroll [down]"
"""The last action, which is always allowed: elements may be below."""
_ELEMENT_KINDS = ("button", "link", "textbox", "checkbox", "radio", "tab", "option", "text")
"""Kinds of elements, which are parts of a row's one-hot code; all other roles are `text`."""
_KIND_OF_ROLE = {"searchbox": "textbox", "combobox": "textbox", "spinbutton": "textbox", "menuitem": "option"}
_STATES = ("checked", "focused", "selected", "expanded")
_FEATURES = 1 + len(_ELEMENT_KINDS) + 4 + len(_STATES) + 1 + MAX_PHRASES + 2
_WORD_BUCKETS = 16
"""Buckets of the hashed words of the task."""
_QUOTED_PHRASE = re.compile(r'"([^"]+)"')
_WORD = re.compile(r"\w+|#")


@dataclass(frozen=True)
class PageRow:
    """A page as a policy sees it."""

    values: np.ndarray
    """(row_size(slots),) float32, each from 0 to 1."""
    allowed: np.ndarray
    """(action_count(slots),) bool."""
    actions: tuple[str, ...]
    """The text of every action; empty for one that is not allowed."""


def row_size(slots: int) -> int:
    """Return the size of the row of a page with this many elements."""
    return slots * _FEATURES + _WORD_BUCKETS + 2


def action_count(slots: int) -> int:
    """Return the number of actions: clicks on elements, phrases typed into elements, and `SCROLL_ACTION`."""
    return slots * (1 + MAX_PHRASES) + 1


def page_row(intent: str, view: PageView, slots: int, remaining: float, clicked: Collection[int] = ()) -> PageRow:
    """Return the first `slots` elements of a page as numbers and actions.

    Those that are no plain text come first, then they are ordered by how well their names match the task.

    remaining: share of the episode's steps that is left.
    clicked: ids of elements that the agent has clicked.
    """
    phrases = _QUOTED_PHRASE.findall(intent)[:MAX_PHRASES]
    ids = [number for number, element in view.elements.items() if element.role != "RootWebArea"]
    matches = {number: _match_name(view.elements[number].name, intent) for number in ids}
    ids.sort(key=lambda number: (_kind_of(view.elements[number]) == "text", -sum(matches[number][:3])))
    shown = ids[:slots]
    values, actions = np.zeros((slots, _FEATURES), np.float32), [""] * action_count(slots)
    for slot, number in enumerate(shown):
        element = view.elements[number]
        values[slot] = _features(element, matches[number], intent, phrases, number in clicked)
        actions[slot] = f"click [{number}]"
        for k, phrase in enumerate(phrases if _kind_of(element) == "textbox" else ()):
            actions[slots + slot * MAX_PHRASES + k] = f"type [{number}] [{phrase}] [0]"
    actions[-1] = SCROLL_ACTION
    episode_numbers = np.array([remaining, len(phrases) / MAX_PHRASES], np.float32)
    return PageRow(
        np.concatenate([values.reshape(-1), _hash_words(intent), episode_numbers]),
        np.array([bool(action) for action in actions]),
        tuple(actions),
    )


def _features(
    element: ShownElement, match: Sequence[float], intent: str, phrases: Sequence[str], clicked: bool
) -> list[float]:
    kind, value = _kind_of(element), element.properties.get("value", "")
    states = [element.properties.get(state, "").lower() == "true" for state in _STATES]
    typed = [k < len(phrases) and value == phrases[k] for k in range(MAX_PHRASES)]
    numbers = [1.0, *(kind == other for other in _ELEMENT_KINDS), *match, *states, bool(value), *typed, clicked]
    return [float(number) for number in [*numbers, kind in intent.lower()]]


def _kind_of(element: ShownElement) -> str:
    kind = _KIND_OF_ROLE.get(element.role, element.role)
    return kind if kind in _ELEMENT_KINDS else "text"


def _match_name(name: str, intent: str) -> tuple[float, float, float, float]:
    """Return four numbers that say how a name occurs in the task, all 0 if it has no word.

    The numbers are: whether it stands in quotes (a half if only upper and lower case differ), whether it stands in
    full, the share of its words that are there, and how late it comes.
    """
    words, intent_words = _WORD.findall(name.lower()), _WORD.findall(intent.lower())
    if not words:
        return 0.0, 0.0, 0.0, 0.0
    places = [place for place in range(len(intent_words)) if intent_words[place : place + len(words)] == words]
    phrases = [_WORD.findall(phrase) for phrase in _QUOTED_PHRASE.findall(intent)]
    quoted = 1.0 if _WORD.findall(name) in phrases else 0.5 * any(_lower_words(phrase) == words for phrase in phrases)
    share = sum(word in intent_words for word in words) / len(words)
    return quoted, float(bool(places)), share, places[0] / len(intent_words) if places else 0.0


def _lower_words(words: Sequence[str]) -> list[str]:
    return [word.lower() for word in words]


def _hash_words(intent: str) -> np.ndarray:
    """Return the buckets that the words of the task fall into, without its quoted phrases."""
    buckets = np.zeros(_WORD_BUCKETS, np.float32)
    for word in _WORD.findall(_QUOTED_PHRASE.sub(" ", intent).lower()):
        buckets[zlib.crc32(word.encode()) % _WORD_BUCKETS] = 1.0
    return buckets
