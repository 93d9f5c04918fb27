"""Refuses commit messages that do not say where and why.

    commit_message.py FILE                   # the message of a commit that is being made
    commit_message.py --commits BASE [LAST]  # those of all commits from BASE, without it, to LAST, or else HEAD

Git's hook `commit-msg` calls it with a file, and `pre-push` and CI with commits. What `git commit --fixup` writes is
refused by these two alone, because it is there to be squashed.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

MAX_SUBJECT = 100
"""Characters of the first line."""
MAX_EARLIER = 500
"""Maximum number of earlier commits whose subjects new ones are compared with."""
MAX_LINE = 130
"""Characters of a line of the body. A line of one word, such as an address, may be longer."""
AREA = re.compile(r"[\w./-]+( [\w./-]+)?: \S")
"""Beginning of a subject: an area of one or two words, a colon, and what changed."""
MERGE = re.compile(r"Merge [\w./-]+( [\w./-]+)?: \S")
"""Beginning of a merge's subject. Git's own names a branch, and GitHub's own a number."""
BRANCH = re.compile(r"Merge ([\w./-]+ )?(wt-[\w./-]+|[\w./-]*-\d+)( [\w./-]+)?: ")
"""Beginning of a merge's subject that has a branch in place of an area: it begins with wt- or ends in -NUMBER."""
TO_SQUASH = re.compile(r"(fixup|squash|amend)! ")
TRAILER = re.compile(r"[A-Z][a-z]+(-[a-z]+)*-by: ")
SCISSORS = "# ------------------------ >8 ------------------------"


def find_mistake(message: str) -> str | None:
    """Return the mistake of a message, in one line; None if there is none.

    Comments of git's template do not count.
    """
    lines = [line.rstrip() for line in message.split(SCISSORS, maxsplit=1)[0].splitlines() if not line.startswith("#")]
    subject, *rest = "\n".join(lines).strip().splitlines() or [""]
    if not subject or len(subject) > MAX_SUBJECT:
        return f"subject: expected 1 to {MAX_SUBJECT} characters that say what changed, got {len(subject)}"
    if re.match(r"Merge\b", subject):
        if not MERGE.match(subject) or BRANCH.match(subject):
            return f"subject: expected what is merged, such as 'Merge AREA: what it brings', got {subject!r}"
    elif not AREA.match(subject):
        return f"subject: expected an area of one or two words, a colon and what changed, got {subject!r}"
    if rest and rest[0]:
        return "body: expected an empty line between subject and body"
    longest = max((len(line) for line in rest if " " in line and not TRAILER.match(line)), default=0)
    if longest > MAX_LINE:
        return f"body: expected lines of at most {MAX_LINE} characters, got {longest}"
    if not any(line and not TRAILER.match(line) for line in rest):
        return "body: expected one to three sentences that say why, got none"
    return None


def find_mistakes(base: str, last: str) -> list[str]:
    """Return the mistakes of the commits from `base` to `last`, merges among them, each with its commit.

    Raises subprocess.CalledProcessError if git knows no such commit, which it then says itself.
    """
    pairs = _messages(f"{base}..{last}")
    subjects = Counter(subject_of(message) for _, message in pairs)
    subjects.update({subject_of(message) for _, message in _messages(base, f"--max-count={MAX_EARLIER}")})
    mistakes = [
        (commit, find_mistake(message) or find_repetition(subject_of(message), subjects)) for commit, message in pairs
    ]
    return [f"{commit}: {mistake}" for commit, mistake in mistakes if mistake]


def subject_of(message: str) -> str:
    """Return the first line of a message."""
    return message.strip().partition("\n")[0]


def find_repetition(subject: str, subjects: Counter[str]) -> str | None:
    """Return the mistake of a subject that several commits have; None if one alone has it.

    A branch that was merged and then rebased has such commits.
    """
    return f"subject: expected one commit of this subject, got {subjects[subject]}" if subjects[subject] > 1 else None


def _messages(*arguments: str) -> list[tuple[str, str]]:
    """Return the short hash and the message of commits, the newest first."""
    command = ["git", "log", "-z", "--format=%h%n%B", *arguments]
    messages = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")
    return [(commit, text) for commit, _, text in (message.partition("\n") for message in messages if message)]


def main(arguments: list[str]) -> str | None:
    """Return the mistakes, one a line; None if there are none."""
    match arguments:
        case ["--commits", base, *rest] if len(rest) < 2:
            return "\n".join(find_mistakes(base, *rest or ["HEAD"])) or None
        case [file]:
            message = Path(file).read_text(encoding="utf-8")
            mistake = None if TO_SQUASH.match(message) else find_mistake(message)
            return f"commit message: {mistake}" if mistake else None
    return __doc__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
