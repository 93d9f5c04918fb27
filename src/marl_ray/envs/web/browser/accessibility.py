"""A page as its accessibility tree in text.

A node is a line, `[id] role 'name' property: value`, indented by tabs. The form is that of
https://github.com/web-arena-x/webarena, browser_env/processors.py. Ids count from 1 in the order in which an episode
shows elements, and an element keeps its own while it is there: Chromium's numbers depend on what its processes did
before. Names, and properties of more than a word, are quoted with escapes: no text of a page makes a line.
"""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from marl_ray.json_types import JsonMapping

Bounds = tuple[float, float, float, float]
"""Left, top, width and height in the viewport, in pixels."""
_NAMELESS_ROLES = {
    "generic", "img", "image", "list", "strong", "emphasis", "paragraph", "banner", "navigation", "Section", "LabelText",
    "Legend", "listitem", "none", "sectionheader", "sectionfooter",
}  # fmt: skip
"""Roles that say nothing without a name."""
_IGNORED_PROPERTIES = {
    "focusable",
    "editable",
    "readonly",
    "level",
    "settable",
    "multiline",
    "invalid",
    "url",
    "actions",
}
"""Properties that are left out."""
_NO_NODES = {"InlineTextBox", "LineBreak", "ListMarker"}
_TEXT = re.compile(r"StaticText (.+)")
_WORD = re.compile(r"[\w.-]+")
_COMPARED_LINES = 3
"""Lines in which a text is looked for before it is repeated."""
_MAX_DEPTH = 200
"""Depth to which a tree is read: Python's stack ends at about a thousand, and pages for people are a tenth as deep."""
_MAX_NAME_LENGTH = 2000
"""Characters of a name or a value that are shown: a page may make its own as long as it likes."""


@dataclass(frozen=True)
class ShownElement:
    """An element of a page that an agent was shown."""

    node: int
    """Chromium's number of the node (`backendDOMNodeId`)."""
    role: str
    name: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Those that the page's text shows, such as `checked`, and `value`, which is what was typed."""


@dataclass(frozen=True)
class PageView:
    """A page as an agent sees it."""

    text: str
    elements: Mapping[int, ShownElement]
    """Id in the text -> element."""


def page_view(
    nodes: Sequence[JsonMapping],
    bounds: Mapping[int, Bounds],
    width: int,
    height: int,
    ids: MutableMapping[tuple[str, int], int],
    document: str = "",
) -> PageView:
    """Return the text of an accessibility tree, as far as it lies in a viewport of `width` by `height` pixels.

    nodes: those of Chromium's `Accessibility.getFullAXTree`.
    bounds: of DOM nodes, by number; others are not visible, but an option of a list is, with its list.
    ids: those that the episode has given to nodes of documents; new ones are added.
    """
    by_id = {node["nodeId"]: node for node in nodes}
    lines: list[str] = []
    elements: dict[int, ShownElement] = {}

    def visit(node: JsonMapping, depth: int, level: int) -> None:
        role = _read_value(node, "role")
        number = int(node.get("backendDOMNodeId", 0))
        if role in _NO_NODES or level > _MAX_DEPTH:
            return
        if not node.get("ignored") and (
            role in ("RootWebArea", "option") or _is_visible(bounds.get(number), width, height)
        ):
            line = _write_line(node, role)
            if line and not _is_repeated(line, lines[-_COMPARED_LINES:]):
                element = ids.setdefault((document, number), len(ids) + 1)
                lines.append(f"{chr(9) * depth}[{element}] {line}")
                elements[element] = ShownElement(number, role, _read_name(node), _read_properties(node))
                depth += 1
        for child in node.get("childIds", ()):
            if child in by_id:
                visit(by_id[child], depth, level + 1)

    children = {child for node in nodes for child in node.get("childIds", ())}
    for node in nodes:
        if node["nodeId"] not in children:
            visit(node, 0, 0)
    return PageView("\n".join(lines), elements)


def snapshot_bounds(snapshot: JsonMapping) -> dict[int, Bounds]:
    """Return the bounds in the viewport of the main document's nodes, in pixels, by DOM number.

    `snapshot` is an answer of Chromium's `DOMSnapshot.captureSnapshot`.
    """
    document = snapshot["documents"][0]
    numbers = document["nodes"]["backendNodeId"]
    scrolled_x, scrolled_y = document.get("scrollOffsetX", 0.0), document.get("scrollOffsetY", 0.0)
    layout = document["layout"]
    return {
        numbers[node]: (x - scrolled_x, y - scrolled_y, width, height)
        for node, (x, y, width, height) in zip(layout["nodeIndex"], layout["bounds"], strict=True)
    }


def _is_visible(bounds: Bounds | None, width: int, height: int) -> bool:
    if bounds is None:
        return False
    x, y, element_width, element_height = bounds
    return (
        element_width > 0
        and element_height > 0
        and x < width
        and y < height
        and x + element_width > 0
        and y + element_height > 0
    )


def _write_line(node: Mapping[str, object], role: str) -> str:
    name, properties = _read_name(node), _read_properties(node)
    if properties.get("value") == name:
        properties.pop("value")
    if not name.strip() and (role == "listitem" or (role in _NAMELESS_ROLES and not properties)):
        return ""
    shown = [
        f"{key}: {text if key != 'value' and _WORD.fullmatch(text) else repr(text)}" for key, text in properties.items()
    ]
    return " ".join([f"{role} {name!r}", *shown])


def _read_name(node: Mapping[str, object]) -> str:
    return _read_value(node, "name")[:_MAX_NAME_LENGTH]


def _read_properties(node: JsonMapping) -> dict[str, str]:
    properties = {
        str(item["name"]): str(item["value"]["value"])[:_MAX_NAME_LENGTH]
        for item in node.get("properties", ())
        if item["name"] not in _IGNORED_PROPERTIES and item["value"].get("value") is not None
    }
    value = _read_value(node, "value")[:_MAX_NAME_LENGTH]
    return properties | ({"value": value} if value else {})


def _is_repeated(line: str, before: Sequence[str]) -> bool:
    """Return True if the line is a text that one of the lines before already has, or an empty one."""
    match = _TEXT.fullmatch(line)
    text = match[1][1:-1] if match else ""
    return match is not None and (not text.strip() or any(text in other for other in before))


def _read_value(node: JsonMapping, key: str) -> str:
    return str(node.get(key, {}).get("value", ""))
