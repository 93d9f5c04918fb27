"""Each page, followed to the letter: its commands succeed, and print what the page shows."""

from pathlib import Path

import pytest
from docs.pages import ROOT, WALKED, Block, blocks, first_page_of, pages_before


def commands_of(page: Path) -> list[Block]:
    """The page's blocks that run."""
    return [block for block in blocks(page) if block.language in ("bash", "python") and not block.skipped]


STEPS = sorted(
    (page for page in WALKED if commands_of(page)),
    key=lambda page: (
        -len(commands_of(first_page_of(page))),
        WALKED.index(first_page_of(page)),
        len(pages_before(page)),
    ),
)
"""The longest walks begin first, so that none is left alone at the end; the pages of a walk are in order."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("walk", "page"),
    [pytest.param(first_page_of(page), page, id=str(page.relative_to(ROOT))) for page in STEPS],
    indirect=["walk"],
    scope="module",  # else pytest ends a walk after each of its pages, and the next page begins it anew
)
def test_a_page_can_be_followed(walk, page):
    for step in [*pages_before(page), page]:
        if step not in walk.followed:
            walk.follow(step)
