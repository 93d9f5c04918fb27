"""A page's fenced blocks, and the comments above them that say how a test runs them.

    ```bash                   commands, which run in the page's folder
    ```text output            what the commands above print; `...` stands for what differs from run to run
    ```yaml my_run.yaml       a file of that name, which later commands use; likewise for any other language
    ```yaml                   a part of a config, which has to fit a kind of config
    ```python                 a program that continues where the page's earlier ones have ended

A comment of its own line above a block says more:

    <!-- run: skip, needs a cluster -->     the block does not run; every reason is one of `REASONS`
    <!-- run: serve until "TEXT" -->        the last command of the block continues, once it has printed the text
    <!-- run: with KEY=VALUE ... -->        overrides that make the block's runs and sweeps small
    <!-- run: fails -->                     the commands end with an error, as the text around says
    <!-- run: after PAGE -->                anywhere: the page continues where another page ends, in its folder
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md"]
)
WALKED = [
    page for page in PAGES if (page.name == "README.md" and page.parent == ROOT) or page.is_relative_to(ROOT / "docs")
]
"""Pages whose commands a test follows; the others are for those who change the code."""
LANGUAGES = {"bash", "json", "mermaid", "python", "text", "toml", "yaml"}
REASONS = {"needs a cluster", "needs a GPU", "needs a download", "needs root"}
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>.*)$")
COMMENT = re.compile(r"^\s*<!-- run: (.*) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """The line of the opening fence, from 1."""
    language: str
    words: tuple[str, ...]
    """The words behind the language."""
    text: str
    marks: tuple[str, ...]
    """The comments above the block."""

    @property
    def name(self) -> str | None:
        """The file that the block is."""
        return self.words[0] if self.words and "." in self.words[0] else None

    @property
    def is_output(self) -> bool:
        return "output" in self.words

    @property
    def skipped(self) -> str | None:
        """The reason for which the block does not run."""
        reasons = [mark.removeprefix("skip, ") for mark in self.marks if mark.startswith("skip, ")]
        return reasons[0] if reasons else None

    @property
    def fails(self) -> bool:
        return "fails" in self.marks

    @property
    def serves_until(self) -> str | None:
        """The text after which the block's last command is left running."""
        texts = [mark.removeprefix("serve until ").strip('"') for mark in self.marks if mark.startswith("serve until ")]
        return texts[0] if texts else None

    @property
    def overrides(self) -> str:
        return " ".join(mark.removeprefix("with ") for mark in self.marks if mark.startswith("with "))

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page in order, without the indent of their fences."""
    parts: list[Block] = []
    marks: list[str] = []
    body: list[str] = []
    opened: re.Match[str] | None = None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened, first, body = fence, number, []
            elif comment := COMMENT.match(line):
                marks.append(comment[1])
            elif line.strip():
                marks = []
        elif fence and fence["ticks"].startswith(opened["ticks"]) and not fence["info"].strip():
            language, *words = opened["info"].split() or [""]
            parts.append(Block(page, first, language, tuple(words), "\n".join(body) + "\n", tuple(marks)))
            opened, marks = None, []
        else:
            body.append(line.removeprefix(opened["indent"]))
    assert opened is None, f"{page.name}:{first}: the fence is never closed"
    return parts


def prose(page: Path) -> list[tuple[int, str]]:
    """The numbered lines of a page outside of its fenced blocks."""
    lines, opened = [], None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and not fence:
            lines.append((number, line))
        elif opened is None:
            opened = fence
        elif fence and fence["ticks"].startswith(opened["ticks"]) and not fence["info"].strip():
            opened = None
    return lines


def page_before(page: Path) -> Path | None:
    """The page in whose folder this page's commands run."""
    names = re.findall(r"^<!-- run: after (\S+) -->$", page.read_text(), re.MULTILINE)
    return (page.parent / names[0]).resolve() if names else None


def pages_before(page: Path) -> list[Path]:
    """The pages that a page continues after, the first one first."""
    before = page_before(page)
    return [*pages_before(before), before] if before else []


def first_page_of(page: Path) -> Path:
    """The page with which the walk of a page begins."""
    return [*pages_before(page), page][0]
