"""Pages are readable as text: prose is wrapped at one width, and tables have no paragraphs in their cells."""

import re

import pytest
from docs.pages import PAGES, ROOT, prose

MAX_WIDTH = 110
"""Maximum number of characters of a line of prose, as CONTRIBUTING.md says."""
MAX_ROW = 200
"""Maximum number of characters of a row of a table, without the targets of its links."""
GENERATED = {ROOT / "docs/config.md", ROOT / "docs/command_line.md"}
MEASURED = {ROOT / "docs/recipes.md"}
"""Pages whose tables a benchmark writes."""
WRITTEN = sorted({*PAGES, *ROOT.glob("*.md")} - GENERATED)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
TARGET = re.compile(r"\]\([^)]*\)")
MARKER = re.compile(r"\s*([-*]|\d+\.)?\s*")


def is_prose(line: str) -> bool:
    """Return True unless the line is a row, a heading, a comment or an image, none of which can be wrapped."""
    return not line.lstrip().startswith(("|", "#", "<!--", "!["))


def is_one_word(line: str) -> bool:
    """Return True if a line has no place to break it: inline code is a word, whatever it contains."""
    return " " not in CODE.sub("code", line[MARKER.match(line).end() :])


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped_and_rows_are_short(page):
    lines = prose(page)
    wide = [number for number, line in lines if is_prose(line) and len(line) > MAX_WIDTH and not is_one_word(line)]
    assert wide == [], f"{page.name}: expected lines of at most {MAX_WIDTH} characters"
    rows = [(number, TARGET.sub("]", line)) for number, line in lines if line.lstrip().startswith("|")]
    long = [number for number, row in rows if len(row) > MAX_ROW and page not in MEASURED]
    assert long == [], f"{page.name}: expected rows of at most {MAX_ROW} characters; a list has room for paragraphs"


def test_contributors_read_the_width():
    assert f"at {MAX_WIDTH} characters" in (ROOT / "CONTRIBUTING.md").read_text()
    assert is_prose("- a line") and not is_prose("  | a | row |")
    assert is_one_word("  - `code with spaces`,") and not is_one_word("- two words")
