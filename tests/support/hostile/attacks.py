"""Parts that the files of sandbox attacks share, each of which another user can run."""

import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_ray.sandbox import Limits, Pool

SOURCE = Path(__file__).resolve().parents[3] / "src"
MB = 1 << 20
"""Bytes."""
TESTS = "assert add(1, 2) == 3\nassert add(5, 7) == 12\nassert add(-1, 1) == 0\n"
RIGHT = "def add(a, b):\n    return a + b\n"
PROBE = "import json, math, os, sys\nprint(json.dumps([1]), os.listdir(), math.pi)"
UNHARMED = ["passed", "[1] [] 3.141592653589793\n"]
"""The result of `honest_job` in a sandbox that no run has harmed."""
SETTINGS = {
    "best": (True, "NAMESPACES"),
    "ordinary user": (False, "NAMESPACES"),
    "ordinary user, no namespaces": (False, "PATHS"),
}
WALL_S = 0.5
"""Seconds that an attack has."""
LATEST_S, TRIES = 0.5, 5
"""Seconds that a run may end late, and its tries. One try in time suffices, so half a second does on a busy machine, too."""


def time_lateness(body: Callable[[], Any], max_s: float) -> tuple[Any, float]:
    """The result of a run, and the seconds that it was late: the least of some tries, as a busy machine is late too."""
    latest = float("inf")
    for _ in range(TRIES):
        started = time.monotonic()
        result = body()
        latest = min(latest, time.monotonic() - started - max_s)
        if latest <= LATEST_S:
            break
    return result, latest


def honest_job(pool: "Pool", limits: "Limits") -> list[str]:
    """Judge a right program and run a probe; returns the verdict, and what the probe printed."""
    honest, probe = pool.judge(RIGHT, TESTS, entry_point="add"), pool.run(PROBE, limits=limits)
    return [honest.verdict, probe.stdout.decode()]


def attack(file: str, setting: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Run a file's attacks, with a level, a process and a secret that they must not reach, and yield their successes."""
    import pytest  # which the process of the attacks has not

    as_we_are, level = SETTINGS[setting]
    python, user = sys.executable, None
    if os.geteuid() == 0 and not as_we_are:
        system_python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
        check = "import sys; sys.exit(sys.version_info < (3, 11))"
        if system_python is None or subprocess.run([system_python, "-c", check]).returncode:
            pytest.skip("needs a Python 3.11 that an ordinary user can run")
        python, user = system_python, pwd.getpwnam("nobody").pw_uid
        if subprocess.run(["test", "-r", file], user=user).returncode:
            pytest.skip(f"needs a checkout that an ordinary user can read, and {SOURCE} is none")
    secret = folder / "key"
    secret.write_text("hidden")
    secret.chmod(0o644)
    for path in (folder, *[p for p in folder.parents if p.stat().st_uid == os.geteuid() and p != Path("/")]):
        path.chmod(path.stat().st_mode | 0o055)
    victim = subprocess.Popen(["sleep", "600"], user=user)
    try:
        run = subprocess.run(
            [python, "-B", file, level, str(victim.pid), str(secret)],
            capture_output=True, text=True, timeout=290, user=user, cwd="/",
            env={"API_KEY": "hidden", "PATH": "/usr/bin:/bin", "PYTHONPATH": f"{SOURCE}:{Path(__file__).parents[1]}"},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert secret.read_text() == "hidden"
    assert secret.stat().st_mode & 0o777 == 0o644
    yield json.loads(run.stdout)
