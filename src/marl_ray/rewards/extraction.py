"""Extraction of code from a model's answer.

The rule: the last complete fenced block that defines the entry point, else the last complete block, else nothing. A block
that was never closed was truncated by the token limit and counts for nothing, so a policy gains nothing by running on.

The text is only searched, never parsed or compiled here: it comes from a policy and may be made to crash a parser.
"""

import re
import unicodedata
from collections.abc import Iterator

PYTHON_LANGUAGES = {"", "py", "py3", "python", "python3"}
"""Languages of blocks that count: a block of shell or JSON after the program is not the program."""
_FENCE = re.compile(
    r"(?P<indent>[ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)*+)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^\n]*)"
)
_MAX_CLOSING_INDENT = 3
"""Spaces by which the closing fence may be further in than the opening one, as in Markdown."""
_LANGUAGE = re.compile(r"\{?\.?([\w+#-]*)(?:\.\d+)?(?=[\s:,{}]|$)")


def python_blocks(text: str) -> Iterator[str]:
    """Yield the complete fenced blocks of Python, in order, without the indent of their fence in a list.

    The rules are Markdown's: a block ends with a line of at least as many of the same characters and nothing else. So a
    program that contains three backticks on a line of their own needs a longer fence. The language is the first word
    behind the fence, whatever follows it (`python title="a.py"`, `{.python}`, `python:a.py`).
    """
    fence = ""
    indent = ""
    counts = False
    lines = list[str]()
    for line in text.split("\n"):
        fence_match = _FENCE.fullmatch(line.rstrip("\r"))
        if not fence:
            if fence_match and not (fence_match["fence"][0] == "`" and "`" in fence_match["info"]):
                fence, lines = fence_match["fence"], []
                indent = re.sub(r"[^\t]", " ", fence_match["indent"])
                language = _LANGUAGE.match(fence_match["info"])
                counts = language is not None and language[1].lower() in PYTHON_LANGUAGES
        elif (
            fence_match
            and not fence_match["info"].strip()
            and not fence_match["indent"].strip()
            and len(fence_match["indent"]) <= len(indent) + _MAX_CLOSING_INDENT
            and fence_match["fence"][0] == fence[0]
            and len(fence_match["fence"]) >= len(fence)
        ):
            if counts:
                yield "".join(f"{inner}\n" for inner in lines)
            fence = ""
        else:
            lines.append(_remove_indent(line, indent))


def _remove_indent(line: str, indent: str) -> str:
    """Return the line without the part of the indent that it has."""
    if line.startswith(indent):
        return line[len(indent) :]
    common = next((n for n, (left, right) in enumerate(zip(line, indent, strict=False)) if left != right), None)
    return line[min(len(line), len(indent)) if common is None else common :]


def defines(code: str, entry_point: str) -> bool:
    """Return True if a line of the code begins to define the name at top level.

    Such a line defines a function or a class, or assigns.
    """
    name = re.escape(unicodedata.normalize("NFKC", entry_point))
    pattern = rf"^(?:(?:async[ \t]+)?def[ \t]+{name}[ \t]*[(\[]|class[ \t]+{name}\b|{name}[ \t]*(?::[^=\n]*)?=(?!=))"
    return re.search(pattern, unicodedata.normalize("NFKC", code), re.MULTILINE) is not None


def extract(text: str, entry_point: str = "") -> str | None:
    """Return the program in a model's answer; None if the answer has no complete block.

    The program is the last block that defines the entry point, else the last block.
    """
    candidates = list(python_blocks(text))
    if not candidates:
        return None
    return next(
        (block for block in reversed(candidates) if entry_point and defines(block, entry_point)), candidates[-1]
    )
