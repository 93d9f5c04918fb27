"""A walk follows a page: it runs the blocks one after another in one folder, as a reader does in one terminal.

Servers that a block starts run in terminals of their own until the walk ends. The ports 8000 and 8265 of the pages become
free ones. `NAME=...` takes the value that an earlier command of the walk has printed, as a reader pastes it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from processes.environment import without_ray

from docs.pages import ROOT, Block, blocks
from marl_ray.cluster.local_ray import free_port

BLOCK_S = 300.0
"""Deadline of a block."""
END_S = 60.0
"""Seconds that a server has to end after Ctrl-C."""
LEFT_OUT = {".git", ".venv", "runs", "serve", "build", "dist"}
"""Parts of the checkout that a walk does not share: results, and what has a port in it."""
PROGRAM = """#!/bin/sh
set -f
case "$1" in
    train | sweep | submit) set -- "$@" $WALK_OVERRIDES ;;
esac
exec {python} -c 'from marl_ray.cli import main; main()' "$@"
"""
PYTHON = """#!/bin/sh
exec {python} "$@"
"""
PROGRAM_OF_BLOCKS = """\
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()):
    exec({earlier!r})
{program}
"""
"""A block continues where the page's earlier ones have ended, which run again in silence: a finished run is only read."""
SCRIPT = """cd {folder}
[ ! -e {state} ] || . {state}
set -eo pipefail
export WALK_OVERRIDES={overrides!r}
{commands}
export -p >{state}
echo "cd $(pwd)" >>{state}
"""


@dataclass
class Walk:
    """A folder like a fresh clone after `make install`, and what the walk has printed and left running in it."""

    folder: Path
    port: int = field(default_factory=free_port)
    printed: str = ""
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    followed: list[Path] = field(default_factory=list)

    def follow(self, page: Path) -> None:
        """Run the page's blocks. Raises AssertionError naming the first block that does not do what the page says."""
        self.followed.append(page)
        output, skipped, earlier = "", False, ""
        for block in blocks(page):
            if block.is_output and not skipped:
                expect(block, self.localised(block.text), output)
            if block.is_output:
                continue
            skipped = block.skipped is not None
            if block.name and not skipped:
                (self.folder / block.name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / block.name).write_text(self.localised(block.text))
            elif block.language == "bash" and not skipped:
                output = self.run(block, self.localised(block.text))
            elif block.language == "python" and not skipped:
                program = self.localised(block.text)
                (self.folder / "block.py").write_text(PROGRAM_OF_BLOCKS.format(earlier=earlier, program=program))
                output, earlier = self.run(block, "python block.py"), earlier + program

    def localised(self, text: str) -> str:
        """The text with this walk's port, and with the values that were printed before."""
        text = re.sub(r"(?<=:)8000\b|(?<=port: )8000\b", str(self.port), text)
        return re.sub(
            r"\b([A-Z_]+)=\.\.\.(?=\s|$)", lambda match: f"{match[1]}={self.value(match[1])}", text, flags=re.MULTILINE
        )

    def value(self, name: str) -> str:
        values: list[str] = re.findall(rf"\b{name}=(\S+)", self.printed)
        assert values, f"no command before has printed a value of {name}"
        return values[-1]

    def run(self, block: Block, commands: str) -> str:
        """Run the commands and return their prints. A block that serves continues once it has printed its known text."""
        number = sum(1 for _ in self.folder.parent.glob("*.log"))
        log, script = (self.folder.parent / f"{number}.{kind}" for kind in ("log", "sh"))
        words = {"folder": self.folder, "state": self.folder.parent / "state", "overrides": block.overrides}
        script.write_text(SCRIPT.format(commands=commands, **words))
        with log.open("wb") as file:
            shell = subprocess.Popen(
                ["bash", script], env=self.environment(), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  ignored in the background
            )  # fmt: skip
        self.servers.append(shell)
        status = wait_for(shell, log, block)
        output = log.read_text(errors="replace")
        self.printed += output
        if status is not None:
            self.servers.remove(shell)
            end(shell)
            assert (status != 0) == block.fails, f"{block}: exit status {status}\n{commands}\n{output}"
        return output

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in without_ray().items() if not name.startswith("MARL_RAY_")}
        programs = [self.folder / ".venv/bin", Path(sys.executable).parent]
        return inherited | {
            "PATH": os.pathsep.join([*map(str, programs), inherited["PATH"]]),
            "MARL_RAY_GATEWAY": f"http://127.0.0.1:{self.port}",
            "COLUMNS": "120",
        }


def wait_for(shell: subprocess.Popen[bytes], log: Path, block: Block) -> int | None:
    """The shell's exit status; None once a block that serves has printed its text."""
    deadline = time.monotonic() + BLOCK_S
    while shell.poll() is None:
        if block.serves_until and block.serves_until in log.read_text(errors="replace"):
            return None
        if time.monotonic() > deadline:
            end(shell)
            raise AssertionError(f"{block}: not done within {BLOCK_S:g} s\n{log.read_text(errors='replace')}")
        time.sleep(0.05)
    assert block.serves_until is None, f"{block}: ended instead of serving\n{log.read_text(errors='replace')}"
    return shell.returncode


def end(shell: subprocess.Popen[bytes]) -> None:
    """Ctrl-C in the shell's terminal, and an end after a deadline."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, number)
        with suppress(subprocess.TimeoutExpired):
            shell.wait(END_S)
            return


def expect(block: Block, shown: str, printed: str) -> None:
    """Raise AssertionError if a page shows other output than was printed."""
    if block.language == "json":
        same = re.fullmatch(pattern("".join(shown.split())), "".join(printed.split()) + "\n")
    else:
        same = re.fullmatch(pattern(tidy(shown)), tidy(printed) + "\n")
    assert same, f"{block}: shows\n{shown}\nbut the commands print\n{printed}"


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def pattern(shown: str) -> str:
    """`...` stands for anything within a line; a line of its own, for any lines."""
    lines = [
        r"(?:.*\n)*?" if line.strip() == "..." else ".*?".join(map(re.escape, line.split("..."))) + r"\n"
        for line in shown.splitlines()
    ]
    return "".join(lines)


@contextmanager
def walk_in(folder: Path) -> Iterator[Walk]:
    """A walk in a new folder, whose servers end with the block."""
    walk = Walk(folder / "marl-ray")
    (walk.folder / ".venv/bin").mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name not in LEFT_OUT and not path.name.startswith("."):
            (walk.folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "serve", walk.folder / "serve")
    for path in (walk.folder / "serve/configs").glob("*.yaml"):
        path.write_text(walk.localised(path.read_text()))
    (walk.folder / ".venv/bin/activate").write_text("# The walk's PATH has the programs already.\n")
    for name, text in (("marl-ray", PROGRAM), ("python", PYTHON)):
        program = walk.folder / ".venv/bin" / name
        program.write_text(text.format(python=sys.executable))
        program.chmod(0o755)
    try:
        yield walk
    finally:
        for shell in reversed(walk.servers):
            end(shell)


def skipped_blocks(pages: list[Path]) -> list[str]:
    """A line for each block that no walk runs."""
    return [f"{block}: {block.skipped}" for page in pages for block in blocks(page) if block.skipped]
