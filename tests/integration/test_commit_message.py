"""The messages of commits: a short subject that begins with its area, and a body that says why; and who checks them."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "commit_message.py"
find_mistake = runpy.run_path(str(SCRIPT))["find_mistake"]
WHY = "\n\nThe old one was slow.\n"


@pytest.mark.parametrize(
    "message",
    [
        "lint: sort an import" + WHY,
        f"docs: {'x' * 94}" + WHY,
        "# a template's comment\nlint: sort an import\n\nWhy.\n# Changes to be committed:\n#\tmodified: a.py\n",
        "lint: sort an import\n\nWhy.\n\nSigned-off-by: A <a@b.c>\n",
        f"lint: sort an import\n\n{'why ' * 32}it\nhttps://a.org/{'x' * 130}\n\nCo-authored-by: {'A ' * 70}<a@b.c>\n",
        "policies/engines: sort an import" + WHY,
        "code team: sort an import" + WHY,
        "Merge parity: both engines score the same" + WHY,
        "Merge policies/engines parity: both engines score the same" + WHY,
    ],
)
def test_messages_that_pass(message):
    assert find_mistake(message) is None


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
            f"lint: sort an import\n\nWhy.\n{'why ' * 32}not\n",
            "body: expected lines of at most 130 characters, got 131",
        ),
        (
            f"lint: sort an import\n# {'-' * 24} >8 {'-' * 24}\n\ndiff --git a b\n",
            "body: expected one to three sentences",
        ),
        ("Merge branch 'wt-parity'\n", "subject: expected what is merged"),
        ("Merge parity: both engines score the same\n", "body: expected one to three sentences"),
        ("Merge branches 'a' and 'b' into main" + WHY, "subject: expected what is merged"),
        ("Merge remote-tracking branch 'origin/main'\n", "subject: expected what is merged"),
        ("Merge\n", "subject: expected what is merged"),
        ("Merge wt-parity\n\nBoth engines score the same.\n", "subject: expected what is merged"),
        ("Merge pull request #12 from a/parity" + WHY, "subject: expected what is merged"),
        ("Merge parity-2: both engines score the same" + WHY, "subject: expected what is merged"),
        ("Merge engines parity-2: both score the same" + WHY, "subject: expected what is merged"),
        ("Merge wt-parity: both engines score the same" + WHY, "subject: expected what is merged"),
        ("fixup! lint: sort an import" + WHY, "subject: expected an area of one or two words"),
    ],
)
def test_messages_that_are_refused(message, start):
    assert find_mistake(message).startswith(start)


def ask(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


def test_git_calls_it_with_a_file_that_stays_as_it_is(tmp_path):
    file = tmp_path / "COMMIT_EDITMSG"
    for message, status in (
        ("lint: sort an import\n", 1),
        ("lint: sort an import" + WHY + "\n# comment\n", 0),
        ("fixup! lint: sort an import\n", 0),  # until it is squashed
    ):
        file.write_text(message)
        done = ask(file)
        assert (done.returncode, bool(done.stderr)) == (status, bool(status))
        assert done.stderr.count("\n") == status and file.read_text() == message


def test_without_arguments_it_says_what_it_takes():
    assert (done := ask()).returncode == 1 and "commit_message.py FILE" in done.stderr


class Clone:
    """A repository with the hooks and the checker of this one, and no environment. Its owner's settings do not count."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in (".ci", ".githooks", "Makefile", ".pre-commit-config.yaml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        (folder / "home").mkdir()
        names = [f"GIT_{role}_{part}" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")]
        rest = {"HOME": str(folder / "home"), "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
        self.environment = dict.fromkeys(names, "a") | rest

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=30
        )

    def git(self, *arguments: str, status: int = 0) -> str:
        done = self.run("git", *arguments)
        assert done.returncode == status, done.stderr
        return done.stdout.strip()

    def commit(self, message: str, *options: str, status: int = 0) -> None:
        self.git("commit", "--allow-empty", "-m", message, *options, status=status)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    clone = Clone(tmp_path)
    clone.git("init", "--initial-branch", "main")
    return clone


@pytest.fixture
def pushed(clone: Clone) -> Clone:
    """The clone, with the hooks and one commit, which its origin has."""
    clone.git("init", "--bare", "remote")
    clone.git("remote", "add", "origin", "remote")
    assert clone.run("make", "hooks").returncode == 0
    clone.commit("lint: sort an import" + WHY)
    clone.git("push", "origin", "main")
    return clone


def test_a_clone_without_an_environment_refuses_messages_and_commits_the_rest(clone):
    assert clone.run("make", "hooks").returncode == 0
    clone.commit("lint: sort an import", status=1)
    clone.commit("lint: sort an import" + WHY)
    clone.git("switch", "-c", "side")
    clone.commit("lint: sort another import" + WHY)
    clone.git("switch", "main")
    clone.git("merge", "--no-ff", "--no-edit", "side", status=1)  # git's own message; the merge waits for another
    clone.git("commit", "-m", "Merge side: another import is sorted" + WHY)
    assert clone.git("log", "-1", "--format=%P").count(" ") == 1


def test_a_worktree_has_its_own_hooks(clone):
    assert clone.run("make", "hooks").returncode == 0
    clone.git("add", ".ci", ".githooks")
    clone.commit("lint: sort an import" + WHY)
    clone.git("worktree", "add", "side")
    (clone.folder / "side/.githooks/commit-msg").write_text("#!/bin/sh\nexit 0\n")
    clone.git("-C", "side", "commit", "--allow-empty", "-m", "Any")
    clone.commit("Any", status=1)


def test_hooks_of_the_user_stay_and_an_archive_has_none(clone):
    clone.git("config", "core.hooksPath", "mine")
    assert clone.run("make", "hooks").returncode == 0
    assert clone.git("config", "core.hooksPath") == "mine"
    archive = clone.folder / "archive"  # inside of another repository, whose hooks are not ours
    archive.mkdir()
    shutil.copy(ROOT / "Makefile", archive)
    clone.git("config", "--unset", "core.hooksPath")
    assert clone.run("make", "-C", "archive", "hooks").returncode == 0
    assert clone.git("config", "--get", "core.hooksPath", status=1) == ""


def check(clone: Clone, base: str) -> subprocess.CompletedProcess:
    """Run the step of the workflow for the commits from `base` on."""
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["messages"]["steps"]
    clone.environment["BASE"] = base
    return clone.run("bash", "-e", "-c", steps[-1]["run"])


def test_ci_checks_the_new_commits_and_merges_alone(clone):
    clone.commit("An old one")
    base = clone.git("rev-parse", "HEAD")
    clone.commit("lint: sort an import" + WHY)
    assert check(clone, base).returncode == 0
    clone.git("switch", "-c", "side")
    clone.commit("fixup! lint: sort an import")
    clone.git("switch", "main")
    clone.git("merge", "--no-ff", "--no-edit", "side")
    done = check(clone, base)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{clone.git('log', '-1', '--format=%h')}: subject: expected what is merged, such as "
        "'Merge AREA: what it brings', got \"Merge branch 'side'\"",
        f"{clone.git('log', '-1', '--format=%h', 'side')}: subject: expected an area of one or two words, "
        "a colon and what changed, got 'fixup! lint: sort an import'",
    ]


def test_ci_checks_the_last_commit_of_a_branch_that_is_new_or_was_forced(clone):
    clone.commit("An old one")
    clone.commit("lint: sort an import" + WHY)
    for base in ("0" * 40, "1234" * 10):
        assert check(clone, base).returncode == 0
    clone.commit("A new one")
    assert check(clone, "0" * 40).returncode == 1


def test_ci_refuses_a_subject_that_the_history_has(clone):
    clone.commit("lint: sort an import" + WHY)
    base = clone.git("rev-parse", "HEAD")
    clone.commit("lint: sort another import" + WHY)
    assert check(clone, base).returncode == 0
    clone.commit("lint: sort an import" + WHY)  # a branch that was merged, rebased and merged again
    done = check(clone, base)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{clone.git('log', '-1', '--format=%h')}: subject: expected one commit of this subject, got 2"
    ]


def test_a_push_is_refused_if_a_message_was_made_around_the_hook(pushed):
    pushed.git("switch", "-c", "side")
    pushed.commit("lint: sort another import" + WHY)
    pushed.git("push", "origin", "side")
    pushed.git("commit", "--amend", "--allow-empty", "-m", "lint: sort one more import" + WHY)
    pushed.git("push", "--force", "origin", "side")  # a branch of its own may be rebased
    pushed.git("switch", "main")
    pushed.git("merge", "--no-ff", "--no-edit", "--no-verify", "side")
    assert "expected what is merged" in pushed.run("git", "push", "origin", "main").stderr
    assert pushed.git("rev-parse", "HEAD^") == pushed.git("-C", "remote", "rev-parse", "main")
    pushed.git("commit", "--amend", "--allow-empty", "-m", "Merge side: one more import is sorted" + WHY)
    pushed.git("push", "origin", "main")


def test_a_push_is_of_what_it_sends_and_not_of_what_is_checked_out(pushed):
    pushed.git("branch", "good")
    pushed.git("switch", "-c", "bad")
    pushed.commit("Any", "--no-verify")
    pushed.git("push", "origin", "good", "main:other")
    pushed.git("push", "origin", "--delete", "other")
    pushed.git("switch", "main")
    refused = pushed.run("git", "push", "origin", "good", "bad")
    assert refused.returncode == 1
    assert (
        f"{pushed.git('rev-parse', '--short', 'bad')}: subject: expected an area of one or two words" in refused.stderr
    )
    assert pushed.git("-C", "remote", "branch", "--format=%(refname:short)").split() == ["good", "main"]
    pushed.git("tag", "v1", "bad")
    assert pushed.run("git", "push", "origin", "v1").returncode == 1


def test_a_push_to_an_address_is_compared_with_what_lies_there(clone):
    clone.git("init", "--bare", "remote")
    clone.commit("An old one")
    clone.git("push", str(clone.folder / "remote"), "main")
    assert clone.run("make", "hooks").returncode == 0
    clone.commit("lint: sort an import" + WHY)
    clone.git("push", str(clone.folder / "remote"), "main")
    clone.commit("Any", "--no-verify")
    assert clone.run("git", "push", str(clone.folder / "remote"), "main").returncode == 1
