"""Every message that docs/messages.md explains is one that the source can print."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from docs.pages import ROOT

HOLE = "\0"
"""It stands in a template where a formatted text has a value."""
MIN_LETTERS = 8
"""Minimum number of letters that a quoted message shares with its template."""
ENTRY = re.compile(r"^### (`+)(.+?)\1\n\n\S[^#]+\n\n\*\*What to do\.\*\* [A-Z`[]", re.MULTILINE)
"""A heading, the cause of the message, and its remedy."""


def quoted_messages() -> list[str]:
    """The headings of the third level; the page's parts are of the second."""
    page = (ROOT / "docs/messages.md").read_text()
    messages = [match[2] for match in ENTRY.finditer(page)]
    headings = re.findall("^### ", page, re.MULTILINE)
    assert not re.search("^(#### |## .*`)", page, re.MULTILINE), "expected groups of level 2 and messages of level 3"
    assert len(messages) == len(headings), "expected headings of a message in backticks, its cause, and what to do"
    return messages


def template(node: ast.expr) -> str | None:
    """The text of a literal, with holes for its values; None of any other expression."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in parts)
    return None


@cache
def source_texts() -> list[str]:
    """All templates of the source that are long enough for a message."""
    return [text for text in dict.fromkeys(templates()) if len(text) >= MIN_LETTERS]


def templates() -> Iterator[str]:
    """All texts of the source; those of a field and its message also as the error prints them."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.expr) and (text := template(node)):
                yield text
            if isinstance(node, ast.Call):
                texts = [text for argument in node.args if (text := template(argument)) is not None]
                yield ": ".join(texts)


@pytest.mark.parametrize("message", quoted_messages())
def test_an_explained_message_is_one_of_the_source(message):
    parts = [part.strip() for part in re.split(r"\.\.\.|\b(?:NAME|KEY)\b", message) if part.strip()]
    assert sum(map(str.isalpha, "".join(parts))) >= MIN_LETTERS
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    assert any(pattern.search(text) for text in source_texts()), f"no text of the source fits {message!r}"


def test_the_page_explains_many_messages():
    assert len(set(quoted_messages())) == len(quoted_messages()) > 60
