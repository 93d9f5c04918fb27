"""The servers and tools that tests start: which are installed, and what becomes of a test without one."""

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

PROGRAMS = {
    "PostgreSQL": ("initdb", "pg_ctl", "pg_isready"),
    "Redis": ("redis-server",),
    "Chromium": ("chromium", "chromedriver"),
    "wrk": ("wrk",),
    "iproute2": ("ip",),
}
"""Server or tool that `make servers` installs -> its programs that tests start."""
HINT = "is not installed here: `make servers` installs it"


def find(program: str) -> str | None:
    """Return the path of a program; Debian keeps those of PostgreSQL in a folder of each version."""
    versions = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")))
    return shutil.which(program) or (shutil.which(program, path=versions[-1]) if versions else None)


def need(*servers: str) -> None:
    """Skip the test if one of these servers is missing; if the environment has REQUIRE_SERVERS=1, fail it."""
    missing = [server for server in servers if None in map(find, PROGRAMS[server])]
    if missing:
        end = pytest.fail if os.environ.get("REQUIRE_SERVERS") == "1" else pytest.skip
        end(f"{' and '.join(missing)} {HINT}")


def missing_servers(reasons: Iterable[str]) -> list[str]:
    """Return lines that say which servers were missing for how many tests.

    `reasons` are those for which tests were skipped.
    """
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons if reason.endswith(HINT))
    return [f"{count} skipped, because {reason}" for reason, count in counts.items()]
