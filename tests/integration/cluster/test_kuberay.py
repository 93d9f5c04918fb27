"""The commands of clusters on a small real Kubernetes: every recorded story, and days on which the API is not well."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube.kubox import URL, kubeconfig, kubox, make_trouble, play
from kube.stories import STORIES, kind_of
from processes.command_line import keys_of, marl_ray
from waiting import until

from marl_ray.cluster.kuberay import submission
from marl_ray.cluster.kuberay.client import resources
from marl_ray.cluster.kuberay.client.connection import Connection, RequestRefusedError, connect
from marl_ray.cluster.kuberay.deletion import UNOWNED_KINDS, delete_all
from marl_ray.cluster.kuberay.manifests.rendering import render, to_yaml
from marl_ray.cluster.kuberay.state import pod_troubles
from marl_ray.config import RunConfig, parse_config, read_yaml
from marl_ray.config.cluster import ClusterConfig, JobConfig
from marl_ray.errors import MarlRayError

FAILED, LATE = 1, 124
ENDS = {
    "rayjob-fails": (3, "failed (AppFailed): Job entrypoint command failed with exit code 3"),
    "rayjob-deadline": (FAILED, "failed (DeadlineExceeded): The RayJob has passed the activeDeadlineSeconds"),
    "rayjob-refused-by-the-operator": (FAILED, "failed (ValidationFailed): The RayJob spec is invalid: BackoffLimit"),
    "rayjob-sidecar-mode-never-ready": (FAILED, "failed (SubmitterEnded): its submitter has ended before"),
    "rayjob-deleted-while-running": (FAILED, "gone (NotFound): there is no RayJob"),
    "rayjob-unschedulable": (LATE, "is not succeeded after 4 s: waiting (Unschedulable): pod rayjob-unschedulable-"),
    "rayjob-worker-crashes": (LATE, "waiting (CrashLoopBackOff): pod rayjob-worker-crashes-"),
    "raycluster-refused-by-the-operator": (FAILED, "failed (InvalidRayClusterSpec): The RayCluster spec is invalid"),
    "raycluster-ready-suspended-deleted": (FAILED, "gone (NotFound): there is no RayCluster"),
    "rayservice-application-broken": (FAILED, "failed (DEPLOY_FAILED): application app: AttributeError"),
    "rayservice-config-changed-in-place": (FAILED, "failed (DEPLOY_FAILED): application app: AttributeError"),
}
"""Exit status and words of `wait` at the end of a story; the others end well."""
HEAD = {"spec": {"containers": [{"name": "ray-head", "image": "marl-ray:1"}]}}
JOB: dict[str, Any] = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": "mine"},
    "spec": {
        "entrypoint": "python -c 'print(1)'",
        "rayClusterSpec": {"headGroupSpec": {"rayStartParams": {}, "template": HEAD}},
    },
}
GATEWAY = {
    "name": "gateway",
    "image": "marl-ray:1",
    "groups": {"gateway": {"replicas": 2}},
    "service": {"serve": {"applications": []}},
}


RUNS = {"volumes": [{"claim": "runs", "path": "/runs"}]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    folder = tmp_path_factory.mktemp("kubox")
    with pytest.MonkeyPatch.context() as patch, kubox(folder, "-keep", folder) as connection:
        patch.setenv("KUBECONFIG", str(kubeconfig(folder)))
        patch.setattr(pod_troubles, "SCHEDULED_S", 1.0)
        yield connection


def resource_of(story: str) -> str:
    return f"{kind_of(story).lower()}/{story}"


@pytest.mark.parametrize("story", STORIES)
def test_a_story_ends_with_a_status_and_a_message(cluster, story):
    play(cluster, story)
    status, words = ENDS.get(story, (0, ""))
    waited = marl_ray("cluster", "wait", resource_of(story), "--timeout-s", "4")
    assert waited.returncode == status, waited
    assert words in (waited.stderr if status == LATE else waited.stdout).splitlines()[-1]
    stands = marl_ray("cluster", "status", resource_of(story))
    assert stands.returncode == (0 if status == LATE else status)
    assert words.rpartition("s: ")[2] in stands.stdout
    stands = marl_ray("cluster", "status", resource_of(story), "--json")
    assert set(json.loads(stands.stdout)) == keys_of("cluster status")


@pytest.mark.parametrize(
    "bad_day",
    [
        "compact",
        *(pytest.param(f"fail?status={k}&times=4&path=ray", marks=pytest.mark.long) for k in (503, 0)),
    ],
)
def test_a_wait_outlives_what_happens_to_the_api(cluster, bad_day):
    """Versions that expire, errors and dropped connections, while the story continues."""
    story = "rayjob-retries-once"
    marl_ray("cluster", "delete", resource_of(story))
    player = threading.Thread(target=play, args=(cluster, story, 0.03))

    def make_trouble_four_times() -> None:
        for _ in range(4):
            make_trouble(bad_day)
            time.sleep(0.5)

    worse = threading.Thread(target=make_trouble_four_times)
    player.start()
    until(lambda: marl_ray("cluster", "status", resource_of(story)).returncode == 0, "the job to be there")
    worse.start()
    waited = marl_ray("cluster", "wait", resource_of(story), "--timeout-s", "40")
    player.join()
    worse.join()
    assert waited.returncode == 0, waited
    assert "succeeded (Complete): Job finished successfully." in waited.stdout.splitlines()[-1]


def test_manifests_are_applied_checked_and_deleted(cluster, tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(JOB))
    wrong = {**JOB, "metadata": {"name": "wrong"}, "spec": {**JOB["spec"], "entrypiont": "x"}}
    bad.write_text(yaml.safe_dump_all([JOB, wrong]))
    refused = marl_ray("cluster", "apply", bad)
    assert refused.returncode == 2 and "RayJob wrong: " in refused.stderr and "entrypiont" in refused.stderr
    assert resources.read(cluster, "RayJob", "mine") is None  # all or nothing
    assert marl_ray("cluster", "apply", good, "--dry-run").stdout == "rayjob/mine would be applied\n"
    assert resources.read(cluster, "RayJob", "mine") is None
    for _ in range(2):
        assert marl_ray("cluster", "apply", good).stdout == "rayjob/mine applied\n"
    deleted = marl_ray("cluster", "delete", "rayjob/mine", "--timeout-s", "10", "--json")
    assert json.loads(deleted.stdout) == {"resource": "rayjob/mine", "gone": True} and deleted.returncode == 0
    assert resources.read(cluster, "RayJob", "mine") is None
    for again in range(2):  # also where the resource alone has gone before
        (tmp_path / "all.yaml").write_text(to_yaml(render(parse_config(ClusterConfig, GATEWAY))))
        assert marl_ray("cluster", "apply", tmp_path / "all.yaml").returncode == 0
        if again:
            resources.delete(cluster, "RayService", "gateway")
        assert marl_ray("cluster", "delete", "rayservice/gateway", "--timeout-s", "10").returncode == 0
        assert not [
            resource
            for kind in UNOWNED_KINDS
            for resource in resources.list_all(cluster, *kind, "marl-ray/cluster=gateway")
        ]
    gateway = "marl-ray-gateway"  # written by hand
    assert marl_ray("cluster", "apply", "cluster/kuberay/rayservice.yaml").returncode == 0
    assert marl_ray("cluster", "delete", f"rayservice/{gateway}", "--timeout-s", "10").returncode == 0
    for kind in UNOWNED_KINDS:
        assert gateway not in [resource["metadata"]["name"] for resource in resources.list_all(cluster, *kind)]
    missing = marl_ray("cluster", "delete", "rayjob/mine")
    assert missing.returncode == 2 and "delete rayjob/mine: there is none in default" in missing.stderr


def test_a_field_of_another_owner_is_not_taken_unasked(cluster):
    path = resources.path_of(cluster, "ray.io/v1", "RayJob", "shared")
    other = {**JOB, "metadata": {"name": "shared"}}
    cluster.request("PATCH", path, {"fieldManager": "somebody"}, other, "application/apply-patch+yaml")
    changed = {**other, "spec": {**JOB["spec"], "entrypoint": "echo"}}
    with pytest.raises(RequestRefusedError, match=r"RayJob shared: .*somebody.*--force takes"):
        resources.apply(cluster, changed)
    assert resources.apply(cluster, changed, force=True)["spec"]["entrypoint"] == "echo"
    stale = {**changed, "metadata": {"name": "shared", "resourceVersion": "1"}}
    with pytest.raises(RequestRefusedError, match=r"RayJob shared: .*has been modified") as refused:
        resources.apply(cluster, stale, force=True)
    assert "--force" not in str(refused.value)


def test_of_several_submissions_of_a_name_one_makes_the_job(cluster):
    config = parse_config(ClusterConfig, GATEWAY | {"name": "once", "service": None, "files": "once-files"})
    config = config.model_copy(update={"job": JobConfig(entrypoint="x")})
    runs = [
        parse_config(RunConfig, read_yaml("jobs/configs/multigrid_mappo.yaml") | {"name": f"r{k}"}) for k in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda run: submission.create_job(cluster, config, run), runs))
    assert sorted(made) == [False, False, False, True]
    files = resources.read(cluster, "ConfigMap", "once-files", "v1")
    assert files is not None and json.loads(files["data"]["config.yaml"])["name"] == f"r{made.index(True)}"
    assert not submission.create_job(cluster, config, runs[0])
    assert resources.read(cluster, "ConfigMap", "once-files", "v1") == files
    resources.delete(cluster, "RayJob", "once")


def test_files_outlive_a_job_until_redis_has_forgotten_its_heads(cluster):
    """A pod like the head's, with the same volumes, cleans Redis up when the cluster ends; so does a finalizer here."""
    parts = {"name": "kept", "service": None, "files": "kept-files", "redis": {"address": "redis://redis:6379"}}
    config = parse_config(ClusterConfig, GATEWAY | parts).model_copy(update={"job": JobConfig(entrypoint="x")})
    run = parse_config(RunConfig, read_yaml("jobs/configs/multigrid_mappo.yaml"))
    assert submission.create_job(cluster, config, run)
    job = resources.read(cluster, "RayJob", "kept")
    assert job is not None
    metadata = {
        "name": "kept-abcde",
        "labels": {"ray.io/originated-from-crd": "RayJob", "ray.io/originated-from-cr-name": "kept"},
        "finalizers": ["ray.io/gcs-ft-redis-cleanup-finalizer"],
    }
    made = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata,
        "spec": job["spec"]["rayClusterSpec"],
    }
    resources.create(cluster, made)
    resources.delete(cluster, "RayCluster", "kept-abcde")
    with pytest.raises(
        MarlRayError, match=r"RayJob kept is gone, and after 1 s there is left of it: RayCluster kept-ab"
    ):
        delete_all(cluster, "RayJob", "kept", 1.0, lambda state: None)
    assert resources.read(cluster, "ConfigMap", "kept-files", "v1") is not None
    path = resources.path_of(cluster, "ray.io/v1", "RayCluster", "kept-abcde")
    no_finalizers = {"metadata": {"finalizers": None}}
    cluster.request("PATCH", path, body=no_finalizers, content_type="application/merge-patch+json")
    assert delete_all(cluster, "RayJob", "kept", 10.0, lambda state: None)
    assert resources.read(cluster, "ConfigMap", "kept-files", "v1") is None


def test_the_log_of_a_submitter_is_followed_to_its_end(cluster):
    """A real pod in place of the operator's submitter."""
    script = "for k in 1 2 3; do echo line $k; sleep 0.3; done"
    container = {"name": "ray-job-submitter", "image": "any", "command": ["sh", "-c", script]}
    resources.apply(cluster, {**JOB, "metadata": {"name": "logged"}})
    resources.apply(
        cluster,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "logged-x", "labels": {"job-name": "logged"}},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        },
    )

    def logs() -> subprocess.CompletedProcess[str] | None:
        """Return what the command shows; None while no pod submits the job."""
        shown = marl_ray("cluster", "logs", "rayjob/logged", "--follow")
        assert shown.returncode == 0 or "no pod that submits it" in shown.stderr, shown
        return shown if shown.returncode == 0 else None

    shown = until(logs, "the pod that submits the job")
    assert shown.stdout.splitlines() == ["line 1", "line 2", "line 3"]
    resources.delete(cluster, "RayJob", "logged")


WRONG = [
    (("status", "job/x"), "expected KIND/NAME, KIND one of rayjob"),
    (("status", "rayjob"), "expected KIND/NAME"),
    (("wait", "rayjob/x", "--for", "done"), "--for done: expected one of waiting"),
    (("status", "rayjob/x", "--context", "none"), "--context none: the kubeconfig has kubox"),
    (("logs", "rayservice/x"), "expected a rayjob"),
    (("logs", "rayjob/x"), "no pod that submits it"),
    (("apply", "missing.yaml"), "'missing.yaml' cannot be read: No such file"),
    (("apply", "Makefile"), "Makefile: not valid YAML at line"),
    (("delete", "rayjob/../x"), "rayjob/../x: expected KIND/NAME"),
    (("wait", "rayjob/x", "--timeout-s", "nan"), "--timeout-s nan: expected 0 or more"),
    (("delete", "rayjob/x", "--timeout-s", "-1"), "--timeout-s -1: expected 0 or more"),
]


@pytest.mark.parametrize(("command", "words"), WRONG)
def test_wrong_commands_say_what_was_expected(cluster, command, words):
    refused = marl_ray("cluster", *command)
    [line] = refused.stderr.strip().splitlines()
    assert refused.returncode == 2 and words in line


def test_an_api_that_stays_away_is_named(tmp_path, monkeypatch):
    path = kubeconfig(tmp_path)
    path.write_text(path.read_text().replace(URL, "http://127.0.0.1:9"))
    with pytest.raises(MarlRayError, match=r"http://127.0.0.1:9 gave no answer for 0.5 s: "):
        connect(str(path)).request("GET", "/api/v1", lost_s=0.5)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    refused = marl_ray("cluster", "status", "rayjob/x")
    assert refused.returncode == 2 and f"kubeconfig {tmp_path / 'none'}: " in refused.stderr
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no cluster is named" in marl_ray("cluster", "status", "rayjob/x").stderr


CLUSTER = Path(__file__).parents[3] / "cluster" / "configs" / "training.yaml"


@pytest.mark.parametrize("parts", [{}, {"job": None}, {"job": None, "service": {"serve": {"applications": []}}}])
def test_the_server_takes_what_is_rendered(cluster, parts):
    """With all rules of KubeRay's CRDs, those in CEL too."""
    config = parse_config(ClusterConfig, read_yaml(CLUSTER) | parts)
    for manifest in render(config):
        resources.apply(cluster, manifest, dry_run=True)
    clock = config.model_copy(update={"job": JobConfig(entrypoint="x", schedule="0 3 * * *"), "service": None})
    resources.apply(cluster, render(clock)[0], dry_run=True)


@pytest.mark.parametrize(("story", "status"), [("rayjob-succeeds", 0), ("rayjob-fails", 3), ("rayjob-retries-once", 0)])
def test_a_run_is_submitted_as_a_rayjob_and_followed(cluster, story, status):
    """Write the operator's recorded acts onto the job that is submitted here."""
    for name in (story, "rayjob-retries-once"):
        marl_ray("cluster", "delete", resource_of(name))

    def once_there() -> None:
        until(lambda: resources.read(cluster, "ConfigMap", f"{story}-files", "v1") is not None, "the job's files")
        play(cluster, story, 0.01)

    player = threading.Thread(target=once_there)
    player.start()
    submitted = marl_ray(
        "submit", "train", "jobs/configs/multigrid_mappo.yaml", "storage=/runs", "name=mine",
        "--kuberay", CLUSTER, "--submission-id", story, "--json",
    )  # fmt: skip
    player.join()
    assert submitted.returncode == status, submitted
    assert json.loads(submitted.stdout) == {"name": "mine", "job": f"rayjob/{story}", "status": status}
    assert f"rayjob/{story}: waiting (" in submitted.stderr and "there already" not in submitted.stderr
    again = marl_ray(
        "submit", "train", "jobs/configs/multigrid_mappo.yaml", "storage=/runs", "name=other",
        "--kuberay", CLUSTER, "--submission-id", story,
    )  # fmt: skip
    assert again.returncode == status and "it is there already, and runs what it was submitted with" in again.stderr
    files = resources.read(cluster, "ConfigMap", f"{story}-files", "v1")
    assert files is not None and json.loads(files["data"]["config.yaml"])["name"] == "mine"
    assert (
        marl_ray("submit", "train", "jobs/configs/multigrid_mappo.yaml", "--kuberay", CLUSTER).returncode == 2
    )  # storage
    assert marl_ray("cluster", "delete", f"rayjob/{story}").returncode == 0
    until(
        lambda: resources.read(cluster, "ConfigMap", f"{story}-files", "v1") is None,
        "the end of the deleted job's files",
    )


@pytest.mark.parametrize("storage", ["/var/runs", "/tmp/runs", "file:///elsewhere"])
def test_a_run_whose_storage_is_on_no_volume_is_not_submitted(cluster, storage):
    refused = marl_ray(
        "submit", "train", "jobs/configs/multigrid_mappo.yaml", f"storage={storage}", "--kuberay", CLUSTER
    )
    assert refused.returncode == 2
    assert (
        f"storage={storage!r}: expected a URL, or a path on a volume of the cluster's config (/runs)" in refused.stderr
    )


def test_a_run_whose_files_are_refused_leaves_no_job(cluster):
    make_trouble("fail?status=403&times=1&path=configmaps")
    submitted = marl_ray(
        "submit", "train", "jobs/configs/multigrid_mappo.yaml", "storage=/runs", "--kuberay", CLUSTER,
        "--submission-id", "refused",
    )  # fmt: skip
    assert submitted.returncode == 2, submitted
    assert resources.read(cluster, "RayJob", "refused") is None


def test_a_run_that_no_operator_starts_is_given_up(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(submission, "OPERATOR_S", 0.5)
    config = tmp_path / "cluster.yaml"
    job = {"entrypoint": "-", "start_deadline_s": 1}
    config.write_text(yaml.safe_dump(GATEWAY | {"name": "alone", "service": None, "job": job} | RUNS))
    submitted = marl_ray(
        "submit", "train", "jobs/configs/multigrid_mappo.yaml", "storage=/runs", "--kuberay", config,
        "--submission-id", "alone",
    )  # fmt: skip
    assert submitted.returncode == LATE
    assert "RayJob alone did not start within 1.5 s: waiting (New)" in submitted.stderr.splitlines()[-1]
    resources.delete(cluster, "RayJob", "alone")
