"""A page as numbers for small policies: which elements it holds, in which order, and what can be done with them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.envs.web.browser.accessibility import PageView, ShownElement
from marl_ray.envs.web.browser.action_text import parse_web_action
from marl_ray.envs.web.elements import MAX_PHRASES, SCROLL_ACTION, action_count, page_row, row_size

SLOTS = 4
ROLES = ("RootWebArea", "button", "link", "textbox", "combobox", "checkbox", "StaticText", "dialog")


def view(*elements: ShownElement) -> PageView:
    return PageView("", dict(enumerate(elements, 1)))


def shown_element(role: str, name: str = "", **properties: str) -> ShownElement:
    return ShownElement(0, role, name, properties)


def test_elements_come_in_the_order_in_which_they_match_the_task():
    page = view(
        shown_element("RootWebArea", "Page"),
        shown_element("StaticText", 'Click on the "OK" button.'),
        shown_element("button", "Cancel"),
        shown_element("link", "on the way"),
        shown_element("button", "ok"),
        shown_element("button", "OK"),
    )
    row = page_row('Click on the "OK" button.', page, SLOTS + 1, 1.0)
    assert row.actions[: SLOTS + 1] == ("click [6]", "click [5]", "click [4]", "click [3]", "click [2]")


def test_quoted_phrases_can_be_typed_into_text_boxes_alone():
    page = view(shown_element("button", "Submit"), shown_element("textbox"), shown_element("searchbox", value="Joe"))
    row = page_row('Enter "Joe" and "x]y" and press Submit.', page, SLOTS, 0.5)
    assert [action for action in row.actions if action.startswith("type")] == [
        f"type [{box}] [{phrase}] [0]" for box in (2, 3) for phrase in ("Joe", "x]y")
    ]
    assert row.actions[-1] == SCROLL_ACTION
    other = page_row('Enter "Joe" and "x]y" and press Submit.', view(*page.elements.values()), SLOTS, 0.5, {2})
    assert (row.values != other.values).sum() == 1, "what was clicked is one number"


@given(
    intent=st.text(max_size=60),
    elements=st.lists(
        st.builds(
            ShownElement,
            st.just(0),
            st.sampled_from(ROLES),
            st.text(max_size=20),
            st.dictionaries(st.sampled_from(["checked", "value"]), st.text(max_size=5)),
        ),
        max_size=8,
    ),
    slots=st.integers(1, 6),
)
def test_a_row_is_of_one_size_and_every_allowed_action_can_be_read(intent, elements, slots):
    row = page_row(intent, view(*elements), slots, 0.3)
    assert row.values.shape == (row_size(slots),) and row.values.dtype == np.float32
    assert (row.values >= 0).all() and (row.values <= 1).all()
    assert row.allowed.shape == (action_count(slots),) == (slots * (1 + MAX_PHRASES) + 1,)
    assert row.allowed[-1]
    for action, allowed in zip(row.actions, row.allowed, strict=True):
        assert bool(action) == allowed
        if allowed:
            assert parse_web_action(action).kind in ("click", "type", "scroll")
