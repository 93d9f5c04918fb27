"""Each page, followed to the letter: its commands succeed, and print what the page shows."""

from pathlib import Path

import pytest

from docs.pages import ROOT, WALKED, blocks, goes_on_after
from docs.walks import Walk


def pages_before(page: Path) -> list[Path]:
    """The pages that a page goes on after, the first one first."""
    before = goes_on_after(page)
    return [*pages_before(before), before] if before else []


STEPS = sorted(
    (
        page
        for page in WALKED
        if any(block.language in ("bash", "python") and not block.skipped for block in blocks(page))
    ),
    key=lambda page: (WALKED.index([*pages_before(page), page][0]), len(pages_before(page))),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("walk", "page"),
    [
        pytest.param(first, page, id=str(page.relative_to(ROOT)), marks=pytest.mark.xdist_group(str(first)))
        for page in STEPS
        for first in [*pages_before(page), page][:1]
    ],
    indirect=["walk"],
)
def test_a_page_can_be_followed(walk: Walk, page: Path) -> None:
    for step in [*pages_before(page), page]:
        if step not in walk.followed:
            walk.follow(step)
