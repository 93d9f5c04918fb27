"""The suite's own runner ends what tests leave running, and knows what CPU time the suite takes."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

RUNNER = Path(__file__).parents[1] / "runner" / "leave_nothing.py"
# Its grandchild has a session of its own and no parent, as a daemon.
DAEMON = (
    "import subprocess, sys, time\n"
    'code = \'import subprocess; print(subprocess.Popen(["sleep", "50"], stdout=-3, start_new_session=True).pid)\'\n'
    "print(subprocess.run([sys.executable, '-c', code], stdout=-1, text=True).stdout, flush=True)\n"
)


@pytest.mark.parametrize(("ending", "number", "status"), [("sys.exit(3)", None, 3), ("time.sleep(50)", 15, 143)])
def test_a_daemon_ends_with_the_command(ending, number, status):
    command = [sys.executable, str(RUNNER), sys.executable, "-c", DAEMON + ending]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as runner:
        try:
            assert runner.stdout is not None
            daemon = psutil.Process(int(runner.stdout.readline()))
            started = time.monotonic()
            if number is not None:
                runner.send_signal(signal.Signals(number))
            _, errors = runner.communicate(timeout=60)
        finally:
            runner.kill()
    assert runner.returncode == status and "sleep 50" in errors, errors
    assert not daemon.is_running() and time.monotonic() - started < 40


BURN = "import time\nwhile time.process_time() < 1.8:\n    pass"
# As Ray's raylet, whose workers take most of the suite's time: whoever ignores SIGCHLD never waits for its children.
RAYLET = (
    "import signal, subprocess, sys\n"
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    f"subprocess.run([sys.executable, '-c', {BURN!r}])"
)
NAMED = "open('/proc/self/comm', 'wb').write(b') Z \\xff')\n"
"""A name that is no text, of which reading all processes must not be in the way."""


@pytest.mark.parametrize(("code", "status"), [(NAMED + RAYLET, 1), ("pass", 0), ("raise SystemExit(3)", 3)])
def test_a_command_that_takes_more_cpu_time_than_its_budget_fails(code, status):
    command = [sys.executable, str(RUNNER), "--cpu-budget", "0.7", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert ("expected at most 1 s of CPU time" in done.stderr) == (status == 1)
    assert re.search(r"^leave_nothing: \d s of CPU time$", done.stderr, re.MULTILINE)
