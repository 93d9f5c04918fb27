"""The code in what a model said.

The rule: the last complete fenced block that defines the entry point, else the last complete block, else nothing. A block
that was never closed was cut off by the token limit and counts for nothing, so a policy gains nothing by running on.

The text is only searched, never parsed or compiled here: it comes from a policy and may be made to crash a parser.
"""

import re
import unicodedata
from collections.abc import Iterator

PYTHON = {"", "py", "py3", "python", "python3"}
"""Info strings of blocks that count; a block of shell or JSON after the answer is not the answer."""
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^\n]*)")


def blocks(text: str) -> Iterator[str]:
    """Complete fenced blocks of Python, in order.

    As in Markdown: a block ends with a line of at least as many of the same characters and nothing else. So a program
    that contains three backticks on a line of their own needs a longer fence.
    """
    fence, counts, lines = "", False, list[str]()
    for line in text.split("\n"):
        found = _FENCE.fullmatch(line.rstrip("\r"))
        if not fence:
            if found and "`" not in found[2]:
                fence, lines = found[1], []
                counts = found[2].strip().split(" ")[0].lower() in PYTHON
        elif found and not found[2].strip() and found[1][0] == fence[0] and len(found[1]) >= len(fence):
            if counts:
                yield "".join(f"{inner}\n" for inner in lines)
            fence = ""
        else:
            lines.append(line)


def defines(code: str, entry_point: str) -> bool:
    """Whether a line of the code begins to define the name at top level: a function, a class, an assignment."""
    name = re.escape(unicodedata.normalize("NFKC", entry_point))
    pattern = rf"^(?:(?:async[ \t]+)?def[ \t]+{name}[ \t]*[(\[]|class[ \t]+{name}\b|{name}[ \t]*(?::[^=\n]*)?=(?!=))"
    return re.search(pattern, unicodedata.normalize("NFKC", code), re.MULTILINE) is not None


def extract(text: str, entry_point: str = "") -> str | None:
    """The program in a model's answer, or None where there is no complete block. Without entry point: the last block."""
    found = list(blocks(text))
    if not found:
        return None
    return next((block for block in reversed(found) if entry_point and defines(block, entry_point)), found[-1])
