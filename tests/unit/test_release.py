"""The release's notes: the tag, the version and the changelog name one release, or nothing is published."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "release_notes.py"))
notes, ReleaseError = SCRIPT["notes"], SCRIPT["ReleaseError"]
SOURCES = '"""A package."""\n\n__version__ = "0.2.0"\n'
CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-31

### Fixed

- A defect.

## [0.1.0] - 2026-12-01

- The first.
"""


def test_the_notes_are_the_section_of_the_version():
    assert notes("v0.2.0", SOURCES, CHANGELOG) == "### Fixed\n\n- A defect.\n"


@pytest.mark.parametrize("tag", ["v0.1.0", "0.2.0", "v0.2.0rc1"])
def test_a_tag_of_another_version_is_refused(tag):
    with pytest.raises(ReleaseError, match=rf"expected the tag v0\.2\.0, because __version__ is 0\.2\.0; got {tag}"):
        notes(tag, SOURCES, CHANGELOG)


def test_a_version_without_a_dated_section_is_refused():
    with pytest.raises(ReleaseError, match=r"^CHANGELOG\.md: expected a heading '## \[0\.2\.0\] - YYYY-MM-DD'$"):
        notes("v0.2.0", SOURCES, CHANGELOG.replace("2027-01-31", "not yet released"))


def test_a_release_leaves_no_change_unreleased():
    """The page of the release would not name it, and the package would have it."""
    with pytest.raises(
        ReleaseError, match=r"^CHANGELOG\.md: expected nothing below '## \[Unreleased\]': v0\.2\.0 releases all of it$"
    ):
        notes("v0.2.0", SOURCES, CHANGELOG.replace("## [Unreleased]\n", "## [Unreleased]\n\n### Added\n\n- Later.\n"))


def test_the_changelog_the_citation_and_the_chart_name_this_version():
    sources = (ROOT / "src/marl_ray/__init__.py").read_text()
    version = sources.split('__version__ = "')[1].split('"')[0]
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    chart = yaml.safe_load((ROOT / "helm/marl-ray/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_the_readme_says_whether_an_index_has_the_package():
    unreleased = "- not yet released" in (ROOT / "CHANGELOG.md").read_text()
    readme = (ROOT / "README.md").read_text()
    assert ("is not on PyPI yet" in readme) == unreleased
    if unreleased:  # the first commands that a newcomer pastes must work
        block = readme.partition("```bash\n")[2].partition("```")[0]
        assert block.startswith("git clone ") and "make install" in block and "pip install" not in block


def test_every_action_is_pinned_by_the_hash_of_a_commit():
    """A tag can be moved to other code; the release's workflow may publish under this project's name."""
    files = [*(ROOT / ".github/workflows").glob("*.yml"), *(ROOT / ".github/actions").rglob("action.yml")]
    assert len(files) > 3
    for file in files:
        for action in re.findall(r"uses: (.*)", file.read_text()):
            is_own = action.startswith("./") and (ROOT / action / "action.yml").exists()
            assert is_own or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), (file.name, action)
