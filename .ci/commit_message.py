"""Refuses a commit message that does not say where and why.

    commit_message.py FILE

Git's hook `commit-msg` calls it so.
"""

import re
import sys
from pathlib import Path

LONGEST_SUBJECT = 100
AREA = re.compile(r"[\w./-]+( [\w./-]+)?: \S")
"""Beginning of a subject: an area of one or two words, a colon, and what changed."""
GITS_OWN_MERGE = re.compile(r"Merge( (remote-tracking )?(branch|branches|tag|tags|commit) '.*)?")
"""Subjects that git writes by itself: they name a branch, and not what is merged."""
TRAILER = re.compile(r"[A-Z][a-z]+(-[a-z]+)*-by: ")
SCISSORS = "# ------------------------ >8 ------------------------"


def problem(message: str) -> str | None:
    """Return the mistake of a message, in one line; None if there is none. Comments of git's template do not count."""
    lines = [line.rstrip() for line in message.split(SCISSORS)[0].splitlines() if not line.startswith("#")]
    subject, *rest = "\n".join(lines).strip().splitlines() or [""]
    if not subject or len(subject) > LONGEST_SUBJECT:
        return f"subject: expected 1 to {LONGEST_SUBJECT} characters that say what changed, got {len(subject)}"
    if subject.startswith("Merge"):
        if GITS_OWN_MERGE.fullmatch(subject):
            return f"subject: expected what is merged, such as 'Merge NAME: what it brings', got {subject!r}"
        return None
    if not AREA.match(subject):
        return f"subject: expected an area of one or two words, a colon and what changed, got {subject!r}"
    if rest and rest[0]:
        return "body: expected an empty line between subject and body"
    if not any(line and not TRAILER.match(line) for line in rest):
        return "body: expected one to three sentences that say why, got none"
    return None


if __name__ == "__main__":
    refusal = problem(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if refusal is not None:
        sys.exit(f"commit message: {refusal}")
