"""The walks of the pages, and the list of blocks that none of them runs."""

from collections.abc import Iterator
from typing import Any

import pytest
from docs.pages import ROOT, WALKED, first_page_of
from docs.walks import Walk, skipped_blocks, walk_in


@pytest.fixture(scope="module")
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """The walk that begins with the page of the parameter; pages that continue after it share it."""
    with walk_in(tmp_path_factory.mktemp(request.param.stem)) as walk:
        yield walk


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadscope`, run the pages of one walk in one process, and all others in any.

    The others are pages and notebooks. The groups of `--dist loadgroup` do not work with this release of pytest, and a
    walk would be begun in both processes.
    """
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            page = ROOT / nodeid.partition("[")[2].removesuffix("]")
            return str(first_page_of(page)) if page in WALKED else nodeid

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = skipped_blocks(WALKED)
    terminalreporter.section(f"{len(lines)} blocks of the pages are not run")
    for line in lines:
        terminalreporter.line(line)
