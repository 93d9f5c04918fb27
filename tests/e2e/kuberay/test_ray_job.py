"""RayJobs on a real cluster.

They succeed, fail, continue from a checkpoint in a retry, and lose a learner.
"""

import json
import re
import threading

import pytest
from kuberay_cluster import END_S, RUN, RUN_S, START_S, until

from marl_ray.cluster.kuberay.client.resources import delete, list_all, path_of, read
from marl_ray.cluster.kuberay.state.phases import Phase

TWICE = """
import subprocess, sys

def train(*more):
    command = ["marl-ray", "train", "/etc/marl-ray/config.yaml", *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout

if "is finished, and nothing was trained" not in train():
    sys.exit(4)  # the first try, which ends after its checkpoint as if its machine had been lost
train("train.total_steps=8192")
"""
LOG_S = 60.0
"""Longest time from the end of a job to the end of its submitter's log."""
CLOCK_S = 150.0
"""Longest time for a clock that strikes every minute."""


def steps_in(log: str) -> list[int]:
    """The numbers of steps that a run has told, in their order."""
    return [int(number.replace(",", "")) for number in re.findall(r": ([\d,]+) steps ", log)]


def test_a_job_succeeds_and_its_log_is_read(site):
    name = site.name("job")
    site.apply(site.config(name, job={"entrypoint": "python -c 'print(40 + 2)'", "retries": 0}))
    assert site.wait("RayJob", name, Phase.SUCCEEDED).phase is Phase.SUCCEEDED
    until(lambda: "42" in site.log(name).split(), LOG_S, "the end of the log", lambda: site.log(name))
    site.delete("RayJob", name)


def test_a_job_that_fails_tells_its_exit_status(site):
    name = site.name("fails")
    site.apply(site.config(name, job={"entrypoint": "python -c 'raise SystemExit(3)'", "retries": 0}))
    state = site.wait("RayJob", name, Phase.SUCCEEDED)
    assert (state.phase, state.reason, state.status) == (Phase.FAILED, "AppFailed", 3)


def test_a_run_is_submitted_followed_and_deleted_with_its_files(site, tmp_path):
    name = site.name("train")
    status, text = site.submit(tmp_path, site.run(name))
    assert status == 0, text
    assert "succeeded (Complete)" in text and "best return" in text
    assert read(site.connection, "ConfigMap", f"{name}-files", "v1") is not None
    site.delete("RayJob", name)
    until(
        lambda: read(site.connection, "ConfigMap", f"{name}-files", "v1") is None, END_S, "the end of the run's files"
    )


def test_a_retry_is_a_new_cluster_and_goes_on_from_the_checkpoint(site):
    name = site.name("again")
    files = site.apply_files(name, config_yaml=json.dumps(site.run(name)), twice_py=TWICE)
    job = {"entrypoint": "python /etc/marl-ray/twice.py", "retries": 1}
    site.apply(site.config(name, job=job, files=files))
    state = site.wait("RayJob", name, Phase.SUCCEEDED, timeout_s=2 * START_S)
    assert state.phase is Phase.SUCCEEDED, site.log(name)
    resource = read(site.connection, "RayJob", name)
    assert resource is not None and (resource["status"]["failed"], resource["status"]["succeeded"]) == (1, 1)
    until(lambda: 8192 in steps_in(site.log(name)), LOG_S, "the end of the log", lambda: site.log(name))
    assert min(steps_in(site.log(name))) > 4096, site.log(name)


def test_a_learner_that_is_lost_costs_no_run(site, tmp_path):
    name, results = site.name("lost"), []
    train = RUN["train"] | {"total_steps": 300_000}
    config = site.run(name, train=train, resources={"workers": 2}, checkpoint={"every": 5})
    runner = threading.Thread(target=lambda: results.append(site.submit(tmp_path, config)), daemon=True)
    runner.start()
    until(lambda: max(steps_in(site.log(name)), default=0) > 15_000, START_S, "the run", lambda: site.log(name))
    victim = site.pods(name, group="learners")[0]["metadata"]["name"]
    before = max(steps_in(site.log(name)))
    assert delete(site.connection, "Pod", victim, "v1")
    runner.join(START_S + RUN_S)
    assert results and results[0][0] == 0, site.log(name)
    until(lambda: max(steps_in(site.log(name))) >= 300_000, LOG_S, "the end of the log", lambda: site.log(name))
    steps = steps_in(site.log(name))
    # It went on from a checkpoint, of which there is one every 2,560 steps, and did not begin again.
    assert min(steps[steps.index(before) :]) > before - 10_000, steps
    assert victim not in [pod["metadata"]["name"] for pod in site.pods(name)]


def test_a_job_by_the_clock_makes_rayjobs(site):
    name = site.name("clock")
    job = {"entrypoint": "python -c 'print(1)'", "schedule": "* * * * *", "retries": 0}
    site.apply(site.config(name, job=job))
    path, jobs = path_of(site.connection, "ray.io/v1", "RayCronJob", name), f"ray.io/cronjob-name={name}"
    try:
        until(lambda: list_all(site.connection, "RayJob", labels=jobs), CLOCK_S, "a RayJob")
    except AssertionError:
        pytest.skip("the operator makes no RayJobs by the clock: its feature gate RayCronJob is off")
    # One is enough for a small machine.
    suspended = {"spec": {"suspend": True}}
    site.connection.request("PATCH", path, body=suspended, content_type="application/merge-patch+json")
    assert site.wait("RayCronJob", name, Phase.SUSPENDED, timeout_s=END_S).phase is Phase.SUSPENDED
    first = list_all(site.connection, "RayJob", labels=jobs)[0]["metadata"]["name"]
    assert site.wait("RayJob", first, Phase.SUCCEEDED).phase is Phase.SUCCEEDED
    site.delete("RayCronJob", name)
    until(lambda: not list_all(site.connection, "RayJob", labels=jobs), END_S, "the end of the clock's RayJobs")
