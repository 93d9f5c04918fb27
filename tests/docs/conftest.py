"""The walks of the pages, and the list of blocks that none of them runs."""

from collections.abc import Iterator

import pytest

from docs.pages import WALKED
from docs.walks import Walk, skipped_blocks, walk_in


@pytest.fixture(scope="module")
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """The walk that begins with the page of the parameter; pages that go on after it share it."""
    with walk_in(tmp_path_factory.mktemp(request.param.stem)) as walk:
        yield walk


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = skipped_blocks(WALKED)
    terminalreporter.section(f"{len(lines)} blocks of the pages are not run")
    for line in lines:
        terminalreporter.line(line)
