"""Jobs on a real Ray."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes.environment import without_ray

from marl_ray.cluster import jobs
from marl_ray.cluster.listeners import JobListener
from marl_ray.cluster.local_ray import LocalRay
from marl_ray.errors import MarlRayError

pytestmark = pytest.mark.shared_ray("one")

SLEEPER = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: exit('told'))\nprint('up')\ntime.sleep(120)\n"


def run(ray: LocalRay, folder: Path, script: str, job_lines: list[str] | None = None, **options) -> tuple[int, str]:
    """Run a script as a job; return its status and log. Lines about the job are added to `job_lines`."""
    (folder / "main.py").write_text(script)
    log = io.StringIO()
    listener = JobListener(log.write, [].append if job_lines is None else job_lines.append)
    client = jobs.connect(ray.dashboard_url)
    status = jobs.run_job(client, "python main.py", folder, listener, **({"timeout_s": 120.0} | options))
    return status, log.getvalue()


def test_success_brings_the_whole_log_unwrapped(ray_cluster, tmp_path):
    long_line = "x" * 50_000
    status, log = run(ray_cluster, tmp_path, f"print('first')\nprint({long_line!r})\nprint('last', end='')")
    assert status == 0, log
    assert f"first\n{long_line}\nlast" in log


@pytest.mark.long
def test_the_driver_is_this_python_and_sees_ray(ray_cluster, tmp_path):
    status, log = run(ray_cluster, tmp_path, "import ray, sys\nray.init()\nprint('exe', sys.executable)")
    assert status == 0, log
    assert f"exe {Path(sys.executable).parent}/python" in log


def test_failure_returns_the_drivers_status(ray_cluster, tmp_path):
    job_lines: list[str] = []
    status, log = run(ray_cluster, tmp_path, "print('so far')\nraise SystemExit(3)", job_lines, submission_id="failing")
    assert status == 3
    assert "so far" in log
    assert job_lines == ["job failing: FAILED: exit status 3"]


@pytest.mark.long
def test_submission_id_joins_the_same_job_and_refuses_another(ray_cluster, tmp_path):
    job_lines: list[str] = []
    options = {"job_lines": job_lines, "submission_id": "same-job", "metadata": {"config_hash": "a"}}
    first = run(ray_cluster, tmp_path, "print('once')", **options)
    assert job_lines == []
    assert run(ray_cluster, tmp_path, "print('once')", **options) == first
    assert job_lines == ["job same-job: it is there already; following it"]
    with pytest.raises(MarlRayError, match=r"submission_id 'same-job' already names a job"):
        run(ray_cluster, tmp_path, "print('once')", submission_id="same-job", metadata={"config_hash": "b"})


@pytest.mark.long
def test_a_dropped_log_connection_loses_and_repeats_nothing(ray_cluster, tmp_path, monkeypatch):
    script = "import time\nfor i in range(8):\n    print('line', i)\n    time.sleep(0.5)\n"
    (tmp_path / "main.py").write_text(script)
    client = jobs.connect(ray_cluster.dashboard_url)
    tail, drops = client.tail_job_logs, iter(range(2))

    async def drops_twice(job_id: str):
        async for text in tail(job_id):
            yield text
            if "line" in text and next(drops, None) is not None:
                raise RuntimeError("WebSocket connection closed unexpectedly")

    monkeypatch.setattr(client, "tail_job_logs", drops_twice)
    log = io.StringIO()
    assert jobs.run_job(client, "python main.py", tmp_path, JobListener(log.write, print), timeout_s=120) == 0
    assert [line for line in log.getvalue().splitlines() if line.startswith("line")] == [f"line {i}" for i in range(8)]
    assert next(drops, None) is None


@pytest.mark.long
def test_a_job_that_outlives_its_deadline_is_stopped(ray_cluster, tmp_path):
    with pytest.raises(MarlRayError, match="slow-job did not end within 4 s and was stopped"):
        run(ray_cluster, tmp_path, SLEEPER, timeout_s=4.0, submission_id="slow-job")
    assert jobs.connect(ray_cluster.dashboard_url).get_job_status("slow-job").value == "STOPPED"


@pytest.mark.long
def test_ctrl_c_stops_the_job(ray_cluster, tmp_path):
    (tmp_path / "main.py").write_text(SLEEPER)
    code = (
        "import signal, sys; from marl_ray.cli.cluster import PRINTER; from marl_ray.cluster import jobs\n"
        # Whoever runs the tests in the background may have had the signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"client = jobs.connect({ray_cluster.dashboard_url!r})\n"
        f"status = jobs.run_job(client, 'python main.py', {str(tmp_path)!r}, PRINTER, submission_id='interrupted')\n"
        "sys.exit(status)"
    )
    submitter = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert submitter.stdout is not None
        for line in submitter.stdout:
            if line == "up\n":
                break
        submitter.send_signal(signal.SIGINT)
        log, errors = submitter.communicate(timeout=60)
    finally:
        submitter.kill()
    assert submitter.returncode == 130, errors
    assert "told" in log and "job interrupted: stopping it\n" in errors
    assert jobs.connect(ray_cluster.dashboard_url).get_job_status("interrupted").value == "STOPPED"


@pytest.mark.parametrize(
    ("token", "message"),
    [(None, "asks for a token; set RAY_AUTH_TOKEN"), ("wrong", "refuses the token in RAY_AUTH_TOKEN")],
)
def test_a_cluster_that_asks_for_a_token_says_so(ray_cluster, token, message):
    env = without_ray() | ({"RAY_AUTH_TOKEN": token} if token else {})
    code = (
        "from marl_ray.cluster import jobs\nfrom marl_ray.errors import MarlRayError\n"
        f"try:\n    jobs.connect({ray_cluster.dashboard_url!r})\nexcept MarlRayError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"--address {ray_cluster.dashboard_url}: the cluster {message}", done.stderr


def test_an_address_in_the_environment_does_not_replace_the_given_one(ray_cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    started = time.monotonic()
    assert jobs.connect(ray_cluster.dashboard_url).get_address() == ray_cluster.dashboard_url
    assert time.monotonic() - started < 10
    assert os.environ["RAY_ADDRESS"] == "http://127.0.0.1:1"
