"""The hook of commit messages: a short subject that begins with its area, and a body that says why."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "commit_message.py"
problem = runpy.run_path(str(SCRIPT))["problem"]
WHY = "\n\nThe old one was slow.\n"


@pytest.mark.parametrize(
    "message",
    [
        "lint: sort an import" + WHY,
        f"docs: {'x' * 94}" + WHY,
        "# a template's comment\nlint: sort an import\n\nWhy.\n# Changes to be committed:\n#\tmodified: a.py\n",
        "lint: sort an import\n\nWhy.\n\nSigned-off-by: A <a@b.c>\n",
        "policies/engines: sort an import" + WHY,
        "code team: sort an import" + WHY,
        "Merge wt-parity: both engines score the same\n",
    ],
)
def test_messages_that_pass(message: str):
    assert problem(message) is None


@pytest.mark.parametrize(
    ("message", "start"),
    [
        ("", "subject: "),
        ("# nothing but comments\n", "subject: "),
        (f"docs: {'x' * 95}" + WHY, "subject: expected 1 to 100 characters that say what changed, got 101"),
        ("Sort an import" + WHY, "subject: expected an area of one or two words, a colon and what changed"),
        ("The lease is kept: sort an import" + WHY, "subject: expected an area of one or two words"),
        ("lint:sort an import" + WHY, "subject: expected an area of one or two words"),
        ("lint: " + WHY, "subject: expected an area of one or two words"),
        ("lint: sort an import\n", "body: expected one to three sentences"),
        ("lint: sort an import\n\n\n", "body: expected one to three sentences"),
        ("lint: sort an import\n\n# only a comment\n", "body: expected one to three sentences"),
        ("lint: sort an import\n\nSigned-off-by: A <a@b.c>\n", "body: expected one to three sentences"),
        ("lint: sort an import\nThe old one was slow.\n", "body: expected an empty line"),
        (
            f"lint: sort an import\n# {'-' * 24} >8 {'-' * 24}\n\ndiff --git a b\n",
            "body: expected one to three sentences",
        ),
        ("Merge branch 'wt-parity'\n", "subject: expected what is merged"),
        ("Merge branches 'a' and 'b' into main" + WHY, "subject: expected what is merged"),
        ("Merge remote-tracking branch 'origin/main'\n", "subject: expected what is merged"),
        ("Merge\n", "subject: expected what is merged"),
    ],
)
def test_messages_that_are_refused(message: str, start: str):
    assert problem(message).startswith(start)


def test_git_calls_it_with_a_file_that_stays_as_it_is(tmp_path: Path):
    file = tmp_path / "COMMIT_EDITMSG"
    for message, status in (("lint: sort an import\n", 1), ("lint: sort an import" + WHY + "\n# comment\n", 0)):
        file.write_text(message)
        done = subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True, timeout=30)
        assert (done.returncode, bool(done.stderr)) == (status, bool(status))
        assert done.stderr.count("\n") == status and file.read_text() == message
