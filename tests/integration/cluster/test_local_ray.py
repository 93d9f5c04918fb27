"""A local Ray serves only this machine and its token, and leaves nothing behind, however it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from processes.environment import without_ray

from marl_ray.cli.serving.local_gateway import serve_locally
from marl_ray.cluster import jobs
from marl_ray.cluster.local_ray import ensure_ray, local_ray, processes_of
from marl_ray.errors import MarlRayError

pytestmark = pytest.mark.shared_ray("one", last=True)

# Starts a Ray, says what it consists of, and then ends in the way that argv[1] names.
CHILD = """
import json, os, pathlib, signal, subprocess, sys, tempfile, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
before = {k: v for k, v in os.environ.items() if k.startswith(("RAY_", "GLOO_", "PATH"))}
from marl_ray.cli.cluster import PRINTER
from marl_ray.cluster import jobs
from marl_ray.cluster.local_ray import processes_of, local_ray
nowhere = subprocess.DEVNULL
stranger = subprocess.Popen(["sleep", "60"], stdout=nowhere, stderr=nowhere, start_new_session=True)
try:
    with local_ray(num_cpus=2) as ray, tempfile.TemporaryDirectory() as folder:
        script = f"import ray; assert ray.init().address_info['gcs_address'] == {ray.address!r}"
        pathlib.Path(folder, "main.py").write_text(script)
        client = jobs.connect(ray.dashboard_url)
        assert jobs.run_job(client, "python main.py", folder, PRINTER, timeout_s=100) == 0
        processes = [(p.pid, p.create_time()) for p in processes_of(ray.temp_dir)]
        facts = {"temp_dir": str(ray.temp_dir), "url": ray.dashboard_url, "processes": processes}
        print("FACTS", json.dumps(facts), flush=True)
        if sys.argv[1] == "raise":
            raise KeyError("body")
        if sys.argv[1] == "wait":
            time.sleep(100)
finally:
    after = {k: v for k, v in os.environ.items() if k in before or (k.startswith("RAY_") and k != "RAY_CLIENT_MODE")}
    assert after == before, (after, before)
    assert stranger.poll() is None, "a process that is not Ray's was ended"
    stranger.kill()
"""


@pytest.mark.parametrize(
    ("ending", "number", "status"),
    [
        pytest.param("return", None, 0, marks=pytest.mark.slow),
        pytest.param("raise", None, 1, marks=pytest.mark.slow),
        pytest.param("wait", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.long),
        pytest.param("wait", signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left(ray_cluster, tmp_path, ending, number, status):
    """Also two Rays at a time: the shared one keeps running beside this one, and each runs its own jobs."""
    env = without_ray() | {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, ending],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    facts = {}
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("FACTS"):
                facts = json.loads(line.removeprefix("FACTS"))
                break
        if number is not None:
            os.killpg(child.pid, number) if number == signal.SIGINT else child.send_signal(number)
        _, errors = child.communicate(timeout=240)
    finally:
        child.kill()
    assert facts and len(facts["processes"]) > 5, errors
    assert child.returncode == status, errors
    alive = [pid for pid, started in facts["processes"] if _is_running(pid, started)]
    assert alive == []
    assert not Path(facts["temp_dir"]).exists()
    assert not (tmp_path / ".ray").exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(facts["url"], timeout=5)
    assert jobs.connect(ray_cluster.dashboard_url).list_jobs() is not None


def _is_running(pid: int, started: float) -> bool:
    try:
        return psutil.Process(pid).create_time() == started
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("path", ["/api/jobs/", "/api/serve/applications/", "/nodes?view=summary"])
def test_the_dashboard_asks_for_the_token(ray_cluster, path):
    def status(**headers: str) -> int:
        return httpx.get(ray_cluster.dashboard_url + path, headers=headers, timeout=60).status_code

    assert status() == 401
    assert status(Authorization="Bearer wrong") == 403
    assert status(Authorization=f"Bearer {ray_cluster.token}") == 200


def test_only_loopback_listens(ray_cluster):
    hosts = set()
    for process in [psutil.Process(), *processes_of(ray_cluster.temp_dir)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                hosts.add(connection.laddr.ip.removeprefix("::ffff:"))
    assert hosts == {"127.0.0.1"}


def test_other_users_cannot_look_inside(ray_cluster):
    assert ray_cluster.temp_dir.stat().st_mode & 0o777 == 0o700


def test_a_port_on_which_somebody_listens_is_refused_before_ray_starts(tmp_path):
    """Serve's proxies share a port: a second gateway would answer some of the first one's requests."""
    config = tmp_path / "serve.yaml"
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        http = f"http_options: {{host: 127.0.0.1, port: {port}}}"
        args = "{experiments: [{name: x, arms: {a: {bundle: none}}}]}"
        config.write_text(
            f"{http}\napplications: [{{name: x, import_path: 'marl_ray.serving.app:build', args: {args}}}]\n"
        )
        with pytest.raises(MarlRayError, match=f"http_options: 127.0.0.1:{port} cannot be used: "):
            serve_locally(config, 60)


def test_a_temporary_folder_that_cannot_be_written_is_one_line(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(MarlRayError, match=r"^local_ray: Ray gets no folder in /proc/none: "), local_ray():
        pass


@pytest.mark.usefixtures("ray_cluster")
def test_a_second_ray_in_one_process_is_refused():
    with pytest.raises(MarlRayError, match="already initialised"), local_ray():
        pass


@pytest.mark.long
def test_workers_talk_over_loopback(ray_cluster, tmp_path):
    """Two of Ray's workers exchange tensors by torch's gloo.

    The listening socket of torch's rendezvous store is on all interfaces, which no option changes.
    """
    import ray

    def work(rank: int) -> set[str]:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2.0
        open_ones = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
        dist.destroy_process_group()
        return {c.laddr.ip.removeprefix("::ffff:") for c in open_ones}

    remote = ray.remote(work)
    assert ray.get([remote.remote(rank) for rank in (0, 1)], timeout=120) == [{"127.0.0.1"}] * 2


def test_a_cluster_that_does_not_answer_is_named_in_time(monkeypatch):
    """Nobody listens there, or somebody who is no Ray and says nothing."""
    monkeypatch.setattr("marl_ray.cluster.local_ray.CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for address in ("127.0.0.1:9", f"127.0.0.1:{silent.getsockname()[1]}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            message = f"RAY_ADDRESS: no cluster at '{address}' answers within 0.5 s"
            with pytest.raises(MarlRayError, match=message), ensure_ray():
                raise AssertionError("it is not there")
