"""RayJobs on a real cluster: success, failure, a retry that goes on from its checkpoint, and a learner that is lost."""

import io
import json
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from kuberay_cluster import RUN_S, START_S, Site, until

from marl_ray.cluster.kuberay.client.logs import log_lines, submitter_of
from marl_ray.cluster.kuberay.client.resources import apply, delete, list_all, read
from marl_ray.cluster.kuberay.state.phases import Phase
from marl_ray.cluster.kuberay.submission import submit

RUN = {
    "algorithm": "ppo",
    "env": {"id": "gymnasium.CartPole-v1"},
    "train": {"total_steps": 4096, "env_copies": 8, "horizon": 64},
}
TWICE = """
import os, subprocess, sys
flag, folder, again = {flag!r}, {folder!r}, os.path.exists({flag!r})
steps = 8192 if again else 4096
command = ["marl-ray", "train", "/etc/marl-ray/files/config.yaml", f"train.total_steps={{steps}}", f"storage={{folder}}"]
status = subprocess.run(command).returncode
open(flag, "w").close()
sys.exit(status if again else status or 4)
"""


def test_a_job_succeeds_and_its_log_is_read(site: Site) -> None:
    name = site.name("job")
    site.apply(site.config(name, job={"entrypoint": "python -c 'print(40 + 2)'"}))
    assert site.wait("RayJob", name, Phase.SUCCEEDED).phase is Phase.SUCCEEDED
    submitter = submitter_of(site.connection, name)
    assert submitter is not None
    assert "42" in [line.strip() for line in log_lines(site.connection, *submitter, follow=False)]


def test_a_job_that_fails_tells_its_exit_status(site: Site) -> None:
    name = site.name("fails")
    site.apply(site.config(name, job={"entrypoint": "python -c 'raise SystemExit(3)'"}))
    state = site.wait("RayJob", name, Phase.SUCCEEDED)
    assert (state.phase, state.reason, state.status) == (Phase.FAILED, "AppFailed", 3)


def submitted(site: Site, tmp_path: Path, name: str, **more: object) -> tuple[int, str]:
    """A run submitted as a user does; its exit status and what was printed."""
    config = tmp_path / "run.yaml"
    storage = f"{site.storage}/{name}" if site.storage else "/tmp"
    config.write_text(json.dumps(RUN | {"name": name, "storage": storage} | more))
    printed = io.StringIO()
    site.made.append(("RayJob", name))
    cluster = site.config(name, groups={"learners": {"cpus": 1, "memory": "3Gi", "replicas": 2}})
    with redirect_stdout(printed), redirect_stderr(printed):
        status = submit(site.connection, "train", config, (), cluster, name, timeout_s=START_S + RUN_S)
    return status, printed.getvalue()


def test_a_run_is_submitted_followed_and_deleted_with_its_files(site: Site, tmp_path: Path) -> None:
    name = site.name("train")
    status, text = submitted(site, tmp_path, name, resources={"workers": 1})
    assert status == 0, text
    assert "succeeded (Complete)" in text and "best return" in text
    delete(site.connection, "RayJob", name)
    until(lambda: read(site.connection, "ConfigMap", f"{name}-files", "v1") is None, 180, "the end of the run's files")


def test_a_retry_is_a_new_cluster_and_goes_on_from_the_checkpoint(site: Site, tmp_path: Path) -> None:
    name, folder = site.name("again"), site.storage_path()
    config = {**RUN, "name": name}
    script = TWICE.format(flag=f"{folder}/{name}.flag", folder=f"{folder}/{name}")
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-files"}}
    apply(site.connection, files | {"data": {"config.yaml": json.dumps(config), "twice.py": script}})
    job = {"entrypoint": "python /etc/marl-ray/files/twice.py", "retries": 1}
    site.apply(site.config(name, job=job, files=f"{name}-files"))
    assert site.wait("RayJob", name, Phase.SUCCEEDED, timeout_s=2 * START_S).phase is Phase.SUCCEEDED
    resource = read(site.connection, "RayJob", name)
    assert resource is not None and resource["status"]["failed"] == 1
    submitter = submitter_of(site.connection, name)
    assert submitter is not None
    lines = list(log_lines(site.connection, *submitter, follow=False))
    assert any("4,096" in line or "continues" in line or "goes on" in line for line in lines), lines[-40:]


def test_a_learner_that_is_lost_costs_no_run(site: Site, tmp_path: Path) -> None:
    site.storage_path()
    name, result = site.name("lost"), []
    long = {"train": RUN["train"] | {"total_steps": 400_000}, "resources": {"workers": 2}, "checkpoint": {"every": 5}}
    runner = threading.Thread(target=lambda: result.append(submitted(site, tmp_path, name, **long)), daemon=True)
    runner.start()
    until(lambda: site.pods(name, group="learners"), START_S, "the learners")
    job = until(lambda: running(site, name), START_S, "the run")
    time.sleep(30)
    victim = site.pods(name, group="learners")[0]["metadata"]["name"]
    delete(site.connection, "Pod", victim, "v1")
    runner.join(START_S + RUN_S)
    assert job and result and result[0][0] == 0, result


def running(site: Site, name: str) -> bool:
    resource = read(site.connection, "RayJob", name) or {}
    return (resource.get("status") or {}).get("jobStatus") == "RUNNING"


def test_a_job_by_the_clock_makes_rayjobs(site: Site) -> None:
    name = site.name("clock")
    job = {"entrypoint": "python -c 'print(1)'", "schedule": "* * * * *", "keep_s": 0}
    site.apply(site.config(name, job=job))
    end = time.monotonic() + 180
    while not (jobs := list_all(site.connection, "RayJob", labels=f"ray.io/cronjob-name={name}")):
        if time.monotonic() > end:
            pytest.skip("the operator makes no RayCronJobs: its feature gate RayCronJob is off")
        time.sleep(1.0)
    first = jobs[0]["metadata"]["name"]
    assert site.wait("RayJob", first, Phase.SUCCEEDED).phase is Phase.SUCCEEDED
    delete(site.connection, "RayCronJob", name)
    for made in list_all(site.connection, "RayJob", labels=f"ray.io/cronjob-name={name}"):
        delete(site.connection, "RayJob", made["metadata"]["name"])
