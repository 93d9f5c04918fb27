"""Says by its exit status whether the demo told its story.

The file has what the demo printed:

    python .ci/demo_story.py OUTPUT_OF_THE_DEMO
"""

import re
import sys
from pathlib import Path

import psutil

STORY = [
    r"experiment gridworld: promoted",
    r"│ ippo +│ +0\.9\d\d",
    r"│ mappo +│ +0\.9\d\d",
    r"promote mappo +by gateway: the promotion bound holds",
    r"experiment gridworld-2: rolled_back",
    r"│ candidate +│.*│ +worse +│",
    r"rollback candidate +by gateway: harm proven by outcome",
]
"""Events of the story that must come, in this order."""
CURVES = re.compile(r"^curves +(\S+)$", re.MULTILINE)
"""The line that names the drawing of the learning curves."""
MIN_DRAWING_BYTES = 10_000
"""Minimum size of a drawing; one that broke off is smaller."""


def main(path: str) -> str:
    """Return the first mistake of the story; empty if there is none."""
    text, at = Path(path).read_text(encoding="utf-8"), 0
    for line in STORY:
        match = re.compile(line).search(text, at)
        if match is None:
            return f"{path}: expected {line!r}"
        at = match.end()
    curves_line = CURVES.search(text)
    if curves_line is None:
        return f"{path}: expected a line 'curves FILE'"
    drawing = Path(curves_line[1])
    if not drawing.is_file() or drawing.stat().st_size < MIN_DRAWING_BYTES:
        return f"{drawing}: expected a drawing of the learning curves"
    folder = str(drawing.parent)
    running = [p.pid for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or [])]
    return f"processes {running} of the demo are still running" if running else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) or 0)
