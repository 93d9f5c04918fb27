"""The suite's own runner ends what tests leave running."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

RUNNER = Path(__file__).parents[1] / "leave_nothing.py"
# Its grandchild has a session of its own and no parent, as a daemon.
DAEMON = (
    "import subprocess, sys, time\n"
    'code = \'import subprocess; print(subprocess.Popen(["sleep", "50"], stdout=-3, start_new_session=True).pid)\'\n'
    "print(subprocess.run([sys.executable, '-c', code], stdout=-1, text=True).stdout, flush=True)\n"
)


@pytest.mark.parametrize(("ending", "number", "status"), [("sys.exit(3)", None, 3), ("time.sleep(50)", 15, 143)])
def test_a_daemon_ends_with_the_command(ending: str, number: int | None, status: int) -> None:
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
