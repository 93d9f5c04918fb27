"""Says by its exit status whether the demo told its story.

It reads what the demo has printed:

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


def main(path: str) -> str:
    """Return the mistakes of the story; empty if there are none."""
    text, at = Path(path).read_text(), 0
    for line in STORY:
        match = re.compile(line).search(text, at)
        if match is None:
            return f"{path}: expected {line!r}"
        at = match.end()
    (curves,) = re.findall(r"^curves +(\S+)$", text, re.MULTILINE)
    if Path(curves).stat().st_size < 10_000:
        return f"{curves}: expected a drawing of the learning curves"
    folder = str(Path(curves).parent)
    running = [p.pid for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or [])]
    return f"processes {running} of the demo are still running" if running else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) or 0)
