"""Submits training runs and sweeps as RayJobs, with the config in a ConfigMap and a cluster for each job."""

import json
import re
import secrets
import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from marl_ray.cluster.job_paths import refuse_relative_paths
from marl_ray.cluster.jobs import read_config
from marl_ray.cluster.kuberay.client.connection import Connection
from marl_ray.cluster.kuberay.client.logs import log_lines, submitter_of
from marl_ray.cluster.kuberay.client.resources import apply, create, read
from marl_ray.cluster.kuberay.client.waiting import wait
from marl_ray.cluster.kuberay.manifests.pods import CLUSTER_LABEL
from marl_ray.cluster.kuberay.manifests.rendering import render
from marl_ray.cluster.kuberay.state.phases import Phase
from marl_ray.cluster.listeners import JobListener
from marl_ray.cluster.waits import JOB_TIMEOUT_S
from marl_ray.config import RunConfig
from marl_ray.config.base import KUBERNETES_NAME
from marl_ray.config.cluster import FILES_PATH, ClusterConfig, JobConfig
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonMapping, JsonObject

LOG_S = 20.0
"""Maximum seconds for the end of a log once its job has ended."""
OPERATOR_S = 120.0
"""Seconds beyond `start_deadline_s` by which an operator, if there is one, has failed a job that does not start."""
POLL_S = 1.0
"""Seconds between two looks for the pod of a job's next try."""
MAX_NAME_LENGTH = 40
"""Characters of a cluster's name in the name of a job, which has seven more and must not be longer than 47."""
SUBMISSION_ANNOTATION = "marl-ray/submission"
"""Annotation that tells one submission of a name from another."""


def submit(
    connection: Connection,
    kind: Literal["train", "sweep"],
    config_path: str | Path,
    overrides: Sequence[str],
    cluster: ClusterConfig,
    name: str,
) -> bool:
    """Make the RayJob `name` that runs `marl-ray KIND CONFIG key=value...` on a cluster made by `cluster`.

    The config is validated here before anything is sent. Returns False if a RayJob of this name is there already, which
    stays as it is. Raises MarlRayError for wrong configs, and where the API refuses or stays away.
    """
    if cluster.service is not None or (cluster.job is not None and cluster.job.schedule is not None):
        raise MarlRayError("--kuberay: expected the config of a cluster without service and job.schedule")
    config = read_config(kind, config_path, overrides)
    refuse_relative_paths(config)
    _refuse_lost_storage(config, cluster)
    if not re.fullmatch(KUBERNETES_NAME, name):
        raise MarlRayError(f"--submission-id {name!r}: expected a-z, 0-9 and -, a letter first, 47 characters at most")
    job = _job_config(cluster).model_copy(
        update={"entrypoint": shlex.join(["marl-ray", kind, f"{FILES_PATH}/config.yaml"])}
    )
    settings = cluster.model_copy(update={"name": name, "job": job, "files": f"{name}-files"})
    return read(connection, "RayJob", name) is None and create_job(connection, settings, config)


def _job_config(cluster: ClusterConfig) -> JobConfig:
    """Return the part of a cluster's config about its job, with the defaults where it has none."""
    return cluster.job or JobConfig(entrypoint="-")


def new_job_name(cluster: ClusterConfig) -> str:
    """Return a name that no other RayJob has, made of the cluster's name."""
    return f"{cluster.name[:MAX_NAME_LENGTH].rstrip('-')}-{secrets.token_hex(3)}"


def create_job(connection: Connection, cluster: ClusterConfig, config: RunConfig | SweepConfig) -> bool:
    """Make the job, then what it needs, owned by it, so that Kubernetes deletes everything with the job.

    Only the files of a job with Redis have no owner. Returns False if somebody else has made a job of this name
    meanwhile: a run's files must not change under it.
    """
    job, *policies = render(cluster)
    text = json.dumps(config.model_dump(mode="json", exclude_unset=True), indent=1)
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": cluster.files, "labels": {CLUSTER_LABEL: cluster.name}},
        "data": {"config.yaml": text},
    }
    # A job whose files are refused would wait for them, and a second submission would join it.
    if create(connection, job, dry_run=True) is None:
        return False
    for manifest in (files, *policies):
        apply(connection, manifest, dry_run=True)
    token = secrets.token_hex(8)
    job["metadata"].setdefault("annotations", {})[SUBMISSION_ANNOTATION] = token
    stored_job = create(connection, job) or read(connection, "RayJob", job["metadata"]["name"])
    # The answer to a request that made the job may have been lost, so the token tells whose it is.
    if stored_job is None or (stored_job["metadata"].get("annotations") or {}).get(SUBMISSION_ANNOTATION) != token:
        return False
    owner = {key: stored_job["metadata"][key] for key in ("name", "uid")} | {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
    }
    # Once the job is deleted, a pod like the head, with its files, clears Redis; `cluster delete` takes them after it.
    apply(connection, with_owner(files, owner) if cluster.redis is None else files)
    for manifest in policies:
        apply(connection, with_owner(manifest, owner))
    return True


def _refuse_lost_storage(config: RunConfig | SweepConfig, cluster: ClusterConfig) -> None:
    """Raise MarlRayError for storage that is on no volume: it lies in one pod, which a retry does not have."""
    folder = PurePosixPath(config.storage.removeprefix("file://"))
    volumes = [volume.path for volume in cluster.volumes]
    if folder.is_absolute() and not any(folder.is_relative_to(volume) for volume in volumes):
        raise MarlRayError(
            f"storage={config.storage!r}: expected a URL, or a path on a volume of the cluster's config "
            f"({', '.join(volumes) or 'it has none'}), because a retry is a new cluster"
        )


def with_owner(manifest: JsonMapping, owner: JsonMapping) -> JsonObject:
    """Return the manifest with an owner; Kubernetes deletes it with the owner."""
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [dict(owner)]}}


def follow(
    connection: Connection,
    cluster: ClusterConfig,
    name: str,
    listener: JobListener,
    timeout_s: float = JOB_TIMEOUT_S,
) -> int:
    """Give a RayJob's states and log to the listener until it has ended, and return its entrypoint's exit status.

    Where there is no such status, 1 stands for any failure. `cluster` is what the job was submitted with. Raises
    WaitTimeoutError for a job that does not start or end in time, and MarlRayError where the API stays away.
    """
    ended = threading.Event()
    log_reader = threading.Thread(target=_copy_log, args=(connection, name, listener, ended), daemon=True)
    log_reader.start()
    try:
        state = wait(
            connection,
            "RayJob",
            name,
            (Phase.SUCCEEDED,),
            timeout_s,
            lambda state: listener.say(f"rayjob/{name}: {state}"),
            _job_config(cluster).start_deadline_s + OPERATOR_S,
        )
    finally:  # also when the wait raises: nobody reads the log any more
        ended.set()
    log_reader.join(LOG_S)
    return 0 if state.phase is Phase.SUCCEEDED else state.status or 1


def _copy_log(connection: Connection, name: str, listener: JobListener, ended: threading.Event) -> None:
    """Give the log of each submitter of the job to the listener, one after another: a retry has one of its own."""
    read_pods: set[str] = set()
    while True:
        is_last_round = ended.is_set()
        try:
            submitter = submitter_of(connection, name)
            if submitter is not None and submitter[0] not in read_pods:
                read_pods.add(submitter[0])
                for line in log_lines(connection, *submitter, follow=True):
                    listener.write_log(f"{line}\n")
        except MarlRayError as error:  # the job's state is what counts
            if not ended.is_set():
                listener.say(f"rayjob/{name}: its log cannot be read: {error}")
        if is_last_round:
            return
        time.sleep(POLL_S)
