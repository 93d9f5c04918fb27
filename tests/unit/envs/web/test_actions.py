"""Actions as WebArena's code reads them, and pages as text, without a browser."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marl_ray.envs.web.browser.accessibility import page_view, snapshot_bounds
from marl_ray.envs.web.browser.action_text import ACTION_FORMS, WebAction, parse_web_action, playwright_keys
from marl_ray.envs.web.browser.errors import ActionError
from marl_ray.envs.web.browser.prompts import past_answer, prompt_head
from marl_ray.envs.web.browser.session import hosts_of
from marl_ray.envs.web.environment import base_pattern, replace_bases

ACTIONS = [
    ("click [12]", WebAction("click", 12)),
    (" click[12]\n", WebAction("click", 12)),
    ("click [12] where [12] is link 'a'", WebAction("click", 12)),
    ("hover [1]", WebAction("hover", 1)),
    ("type [3] [blue chair]", WebAction("type", 3, "blue chair\n")),
    ("type [3] [blue chair] [1]", WebAction("type", 3, "blue chair\n")),
    ("type [3] [blue chair] [0]", WebAction("type", 3, "blue chair")),
    ("type [3] [a] b] [0]", WebAction("type", 3, "a] b")),
    ("press [ctrl+a]", WebAction("press", text="ctrl+a")),
    ("scroll [down]", WebAction("scroll", text="down")),
    ("scroll up", WebAction("scroll", text="up")),
    ("goto [http://shop.test/?a=[1]]", WebAction("goto", text="http://shop.test/?a=[1]")),
    ("go_back", WebAction("go_back")),
    ("go_forward please", WebAction("go_forward")),
    ("new_tab", WebAction("new_tab")),
    ("tab_focus [2]", WebAction("tab_focus", tab=2)),
    ("close_tab", WebAction("close_tab")),
    ("stop", WebAction("stop")),
    ("stop []", WebAction("stop")),
    ("stop [N/A]", WebAction("stop", text="N/A")),
    ("In summary, the next action I will perform is ```click [7]```", WebAction("click", 7)),
    ("```\nstop [a ] b]\n``` or ```click [1]```", WebAction("stop", text="a ] b")),
]
NO_ACTIONS = [
    ("", "is no action"),
    ("I shall click [7]", "is no action"),
    ("fly [7]", "is no action; expected one of click, hover"),
    ("click [seven]", r"is not understood; expected click \[id\]"),
    ("click [-7]", "is not understood"),
    ("click [" + "7" * 99 + "]", "is not understood"),
    ("type [3] [0]", "is not understood"),  # as in WebArena: the last brackets are the flag of Enter
    ("type [3]", r"is not understood; expected type \[id\] \[text\]"),
    ("scroll [direction=down]", "is not understood"),
    ("press []", "is not understood"),
    ("tab_focus [a]", "is not understood"),
    ("``` ```click [7]", "is no action"),
]


@pytest.mark.parametrize(("text", "action"), ACTIONS, ids=[text[:30] for text, _ in ACTIONS])
def test_an_action_is_read(text, action):
    assert parse_web_action(text) == action


@pytest.mark.parametrize(("text", "message"), NO_ACTIONS, ids=[text[:30] for text, _ in NO_ACTIONS])
def test_what_is_no_action_is_refused_in_one_line(text, message):
    with pytest.raises(ActionError, match=message) as raised:
        parse_web_action(text)
    assert "\n" not in str(raised.value)


@given(st.text(max_size=80))
@example("\U00010d3a" * 40)  # a message shows them by their code points
def test_whatever_an_agent_writes_is_an_action_or_a_fault(text):
    for response in (text, f"```{text}```", f"click [{text}]", f"type [1] [{text}] [0]"):
        try:
            action = parse_web_action(response)
        except ActionError as error:
            assert len(str(error)) < 300
        else:
            assert action.kind in ACTION_FORMS


@pytest.mark.parametrize(
    ("keys", "named"), [("ctrl+a", "Control+a"), ("Enter", "Enter"), ("+", "+"), ("f5", "F5"), ("x", "x")]
)
def test_keys_get_playwrights_names(keys, named):
    assert playwright_keys(keys) == named


def test_hosts_have_their_ports():
    urls = ["http://shop.test/a", "https://shop.test", "http://127.0.0.1:9999"]
    assert hosts_of(urls) == {"shop.test:80", "shop.test:443", "127.0.0.1:9999"}
    with pytest.raises(ValueError, match=r"^'shop\.test' is no address with http:// or https://$"):
        hosts_of(["shop.test"])


def node(number: int, role: str, name: str = "", children: tuple[int, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "nodeId": str(number),
        "backendDOMNodeId": number,
        "role": {"value": role},
        "name": {"value": name},
        "childIds": [str(child) for child in children],
        "ignored": properties.pop("ignored", False),
        "properties": [{"name": key, "value": {"value": value}} for key, value in properties.items()],
    }


def visible_lines(*nodes: dict[str, Any], **bounds: Any) -> list[str]:
    """The lines of a page in which everything is visible but what `bounds` says."""
    boxes = {item["backendDOMNodeId"]: (0.0, 0.0, 10.0, 10.0) for item in nodes}
    boxes |= {int(name[1:]): box for name, box in bounds.items()}
    return page_view(nodes, boxes, 100, 100, {}).text.splitlines()


def test_a_tree_is_indented_and_follows_its_children_whatever_the_order_of_nodes():
    lines = visible_lines(
        node(4, "StaticText", "Go"),
        node(1, "RootWebArea", "T", (2, 3), focusable=True),
        node(3, "link", "Out"),
        node(2, "generic", "", (5,)),
        node(5, "button", "Save", (4,), disabled=True, level=1),
        node(4, "InlineTextBox", "Go"),
    )
    assert lines == ["[1] RootWebArea 'T'", "\t[2] button 'Save' disabled: True", "\t[3] link 'Out'"]


def test_text_that_a_line_before_has_is_left_out():
    lines = visible_lines(
        node(1, "RootWebArea", "T", (2,)), node(2, "link", "Home", (3,)), node(3, "StaticText", "Home")
    )
    assert lines == ["[1] RootWebArea 'T'", "\t[2] link 'Home'"]


def test_what_is_outside_of_the_viewport_or_has_no_size_is_left_out():
    nodes = node(1, "RootWebArea", "T", (2, 3, 4)), node(2, "link", "a"), node(3, "link", "b"), node(4, "option", "c")
    lines = visible_lines(*nodes, n2=(0, 100, 10, 10), n3=(0, 0, 0, 10), n4=(0, 0, 0, 0))
    assert lines == ["[1] RootWebArea 'T'", "\t[2] option 'c'"]


def test_no_text_of_a_page_makes_a_line_of_its_own():
    text = "a\n[9] button 'b'\r\u2028x"
    lines = visible_lines(
        node(1, "RootWebArea", "T", (2, 3)), node(2, "link", text), node(3, "link", "a", keyshortcuts=text)
    )
    assert len(lines) == 3
    assert lines[2] == f"\t[3] link 'a' keyshortcuts: {text!r}"


def test_an_element_keeps_its_id_and_a_new_one_gets_another():
    ids: dict[tuple[str, int], int] = {}
    box = (0.0, 0.0, 9.0, 9.0)
    first = page_view([node(7, "link", "a")], {7: box}, 100, 100, ids, "one")
    again = page_view([node(5, "link", "b", (7,)), node(7, "link", "a")], {5: box, 7: box}, 100, 100, ids, "one")
    other = page_view([node(7, "link", "c")], {7: box}, 100, 100, ids, "two")
    assert first.text == "[1] link 'a'"
    assert again.text == "[2] link 'b'\n\t[1] link 'a'"
    assert other.text == "[3] link 'c'"
    assert again.elements[1].node == 7


def test_bounds_are_those_in_the_viewport():
    document = {
        "nodes": {"backendNodeId": [5, 6]},
        "layout": {"nodeIndex": [1], "bounds": [[10.0, 500.0, 20.0, 30.0]]},
        "scrollOffsetX": 0.0,
        "scrollOffsetY": 400.0,
    }
    assert snapshot_bounds({"documents": [document]}) == {6: (10.0, 100.0, 20.0, 30.0)}


def test_a_base_url_is_replaced_where_it_stands_for_itself():
    bases = [(base_pattern("http://127.0.0.1:80"), "http://shop.test")]
    text = "http://127.0.0.1:80 http://127.0.0.1:80/a?b. http://127.0.0.1:8080/ http://127.0.0.1:80.evil/ (http://127.0.0.1:80)"
    replaced = (
        "http://shop.test http://shop.test/a?b. http://127.0.0.1:8080/ http://127.0.0.1:80.evil/ (http://shop.test)"
    )
    assert replace_bases(text, bases) == replaced


def test_an_earlier_answer_is_a_line_with_its_thought_and_its_action():
    assert past_answer(" click [3]\n", "") == "click [3]"
    assert past_answer("fly [3]", "'fly' is no action") == "fly [3] ('fly' is no action)"
    thought = "The search box is\nelement 6.\n```type [6] [coral] [1]``` Done."
    assert past_answer(thought, "") == "The search box is element 6. ```type [6] [coral] [1]```"
    assert len(past_answer("a" * 1000 + "```" + "b" * 1000 + "```", "")) == 407
    assert past_answer("```go_back```", "") == "go_back"


def test_a_prompt_asks_for_a_thought_only_where_one_is_wanted():
    plain, react = prompt_head(False), prompt_head(True)
    assert "```" not in plain and "First think" in react
    for form in ACTION_FORMS.values():
        assert f"\n{form}\n" in plain and f"\n{form}\n" in react
    assert parse_web_action("The page shows a shop, so I open it.\n```click [12]```") == WebAction("click", 12)
