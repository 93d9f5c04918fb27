"""Prints the section of CHANGELOG.md that belongs to a tag.

    python .ci/release_notes.py v0.2.0

A tag that is no release of this checkout is refused. The release's workflow runs it before anything is built, and gives
the release what it prints.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


class ReleaseError(Exception):
    """The tag, the version of the sources and the changelog do not name one release."""


def notes(tag: str, sources: str, changelog: str) -> str:
    """Return the text of the tag's section.

    `sources` is the text of the file with `__version__`. Raises ReleaseError if the tag is not `v` and the version, or
    if the changelog has no dated section of it, or names changes as unreleased.
    """
    match = VERSION.search(sources)
    version = match[1] if match else "none"
    if tag != f"v{version}":
        raise ReleaseError(f"expected the tag v{version}, because __version__ is {version}; got {tag}")
    section = section_of(changelog, rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d")
    if section is None:
        raise ReleaseError(f"CHANGELOG.md: expected a heading '## [{version}] - YYYY-MM-DD'")
    if section_of(changelog, r"\[Unreleased\]"):
        raise ReleaseError(f"CHANGELOG.md: expected nothing below '## [Unreleased]': {tag} releases all of it")
    return section + "\n"


def section_of(changelog: str, heading: str) -> str | None:
    """Return the text below the heading that fits the pattern; None if there is none.

    Headings of level 2 alone count.
    """
    match = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return None if match is None else match[1].strip()


if __name__ == "__main__":
    try:
        print(
            notes(
                sys.argv[1],
                (ROOT / "src/marl_ray/__init__.py").read_text(encoding="utf-8"),
                (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
            ),
            end="",
        )
    except ReleaseError as error:
        sys.exit(f"release: {error}")
