"""Each page, followed to the letter: its commands succeed, and print what the page shows."""

from pathlib import Path

import pytest

from docs.pages import ROOT, WALKED, blocks, first_of, pages_before
from docs.walks import Walk

STEPS = sorted(
    (
        page
        for page in WALKED
        if any(block.language in ("bash", "python") and not block.skipped for block in blocks(page))
    ),
    key=lambda page: (WALKED.index(first_of(page)), len(pages_before(page))),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("walk", "page"),
    [pytest.param(first_of(page), page, id=str(page.relative_to(ROOT))) for page in STEPS],
    indirect=["walk"],
    scope="module",  # else pytest ends a walk after each of its pages, and the next page begins it anew
)
def test_a_page_can_be_followed(walk: Walk, page: Path) -> None:
    for step in [*pages_before(page), page]:
        if step not in walk.followed:
            walk.follow(step)
