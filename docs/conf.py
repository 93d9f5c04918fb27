"""The site: the pages of this repository as they are on GitHub, a sidebar made of docs/README.md, and an API reference.

`make docs` builds it into build/docs. Every warning is an error: a link that leads nowhere, a page that no part has.
"""

import re
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent

project = "marl-ray"
copyright = "the marl-ray developers"
root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    *("docs/*.md", "docs/*/*.md"),
    *("benchmarks/README.md", "benchmarks/results/*.md", "tests/support/kubox/*.md"),
]
extensions = ["myst_parser", "autoapi.extension"]
html_theme = "furo"
html_title = "marl-ray"

myst_heading_anchors = 6
myst_enable_extensions = ["attrs_inline"]
myst_fence_as_directive = []
pygments_style = "default"

UNLISTED = ["cli", "cluster", "conformance", "experiments", "rollout", "training"]
"""Packages without a name in docs/python_names.md, which need not be read."""
# Read as text, never imported: the environment of the site has neither torch nor Ray.
autoapi_dirs = [str(ROOT / "src" / "marl_ray")]
autoapi_ignore = [f"*/marl_ray/{folder}/*" for folder in UNLISTED]
autoapi_generate_api_docs = False
autoapi_add_toctree_entry = False
autoapi_keep_files = False
# Constants and lazy names, which docs/python_names.md does not list; and outputs of JSON in which `...` stands for what
# differs.
suppress_warnings = ["autoapi.python_import_resolution", "misc.highlighting_failure"]

PARTS = re.compile(r"^## (.*?)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]*)?\)")
NAMED = re.compile(r"^- `(marl_ray\.[\w.]+)(\(\))?`( \(constant\))?: .*(?:\n  .*)*$", re.MULTILINE)

FOLDERS = {
    "docs/decisions/README": "docs/decisions",
    "benchmarks/README": "benchmarks/results",
    "CONTRIBUTING": "tests/support/kubox",
}
"""Page -> the folder whose pages it leads to."""


def parts() -> dict[str, list[str]]:
    """Heading of docs/README.md -> the pages that its table names, from the repository's root."""
    text = (ROOT / "docs/README.md").read_text()
    listed = {}
    for heading, body in PARTS.findall(text):
        pages = [(ROOT / "docs" / link).resolve().relative_to(ROOT) for link in LINK.findall(body)]
        listed[heading] = [str(page.with_suffix("")) for page in dict.fromkeys(pages) if str(page) != "README.md"]
    extending = sorted(path.relative_to(ROOT) for path in (ROOT / "docs/extending").glob("*.md"))
    listed["How-to"] += [str(page.with_suffix("")) for page in extending]
    return {heading: list(dict.fromkeys(pages)) for heading, pages in listed.items()}


def add_sidebar(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the sidebar: a list of pages at the end of the first one."""
    if page == root_doc:
        for heading, pages in parts().items():
            source[0] += toctree(pages, f":caption: {heading}\n")
        source[0] += toctree(["docs/README"])
    if page in FOLDERS:
        paths = sorted((ROOT / FOLDERS[page]).glob("*.md"))
        pages = [str(path.relative_to((ROOT / page).parent).with_suffix("")) for path in paths]
        source[0] += toctree([path for path in pages if path != "README"])
    if page.startswith("benchmarks/") and not source[0].startswith("# "):
        source[0] = f"# {page.rsplit('/', maxsplit=1)[-1].capitalize()}\n\n{source[0]}"


def pages_with_lists(*_: object) -> list[str]:
    """Return the pages that are read at every build, because their lists change with other files.

    Otherwise a new page of a folder would be listed nowhere until everything is built anew.
    """
    return [root_doc, "docs/python_names", *FOLDERS]


def toctree(pages: list[str], options: str = "") -> str:
    return f"\n```{{toctree}}\n:hidden:\n{options}\n" + "\n".join(pages) + "\n```\n"


def add_api(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the names in the list of docs/python_names.md by their documentation."""
    if page == "docs/python_names":
        source[0] = NAMED.sub(documentation, source[0])


def documentation(line: re.Match[str]) -> str:
    if line[3]:
        return line[0]  # a constant has no documentation of its own
    directive = "autoapifunction" if line[2] else "autoapiclass"
    # The keys of a config are in docs/config.md.
    options = "" if line[2] or line[1].startswith("marl_ray.config.") else "\n   :members:"
    return f"\n```{{eval-rst}}\n.. {directive}:: {line[1]}{options}\n```\n"


def setup(app: Sphinx) -> None:
    app.add_lexer("mermaid", TextLexer)  # GitHub draws it, and the site shows its text
    app.connect("env-get-outdated", pages_with_lists)
    app.connect("source-read", add_sidebar)
    app.connect("source-read", add_api)
