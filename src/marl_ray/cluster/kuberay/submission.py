"""Submits training runs and sweeps as RayJobs, with the config in a ConfigMap and a cluster for each job."""

import contextlib
import json
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from marl_ray.cluster.job_paths import refuse_relative_paths
from marl_ray.cluster.jobs import read_config
from marl_ray.cluster.kuberay.client.connection import Connection
from marl_ray.cluster.kuberay.client.logs import log_lines, submitter_of
from marl_ray.cluster.kuberay.client.resources import apply, create, delete, read
from marl_ray.cluster.kuberay.client.waiting import wait
from marl_ray.cluster.kuberay.manifests.pods import CLUSTER_LABEL
from marl_ray.cluster.kuberay.manifests.rendering import render
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.waits import INTERRUPTED_STATUS, JOB_TIMEOUT_S
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
    timeout_s: float = JOB_TIMEOUT_S,
) -> int:
    """Run `marl-ray KIND CONFIG key=value...` as a RayJob on a cluster made by `cluster`, and return its exit status.

    A `name` that is there already is joined. The config is validated here before anything is sent. Ctrl-C asks whether the
    job is to end. Raises MarlRayError for wrong configs, and where the API refuses or stays away.
    """
    if cluster.service is not None or (cluster.job is not None and cluster.job.schedule is not None):
        raise MarlRayError("--kuberay: expected the config of a cluster without service and job.schedule")
    config = read_config(kind, config_path, overrides)
    refuse_relative_paths(config)
    _refuse_lost_storage(config, cluster)
    if not re.fullmatch(KUBERNETES_NAME, name):
        raise MarlRayError(f"--submission-id {name!r}: expected a-z, 0-9 and -, a letter first, 47 characters at most")
    job = (cluster.job or JobConfig(entrypoint="-")).model_copy(
        update={"entrypoint": shlex.join(["marl-ray", kind, f"{FILES_PATH}/config.yaml"])}
    )
    settings = cluster.model_copy(update={"name": name, "job": job, "files": f"{name}-files"})
    if read(connection, "RayJob", name) is not None or not create_job(connection, settings, config):
        _print_line(name, "it is there already, and runs what it was submitted with")
    return _follow(connection, name, timeout_s, job.start_deadline_s + OPERATOR_S)


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


def _follow(connection: Connection, name: str, timeout_s: float, start_s: float) -> int:
    """Print the job's states and log until it has ended, and return its exit status; Ctrl-C asks whether to end it."""
    ended = threading.Event()
    printer = threading.Thread(target=_print_log, args=(connection, name, ended), daemon=True)
    printer.start()
    try:
        try:
            state = wait(
                connection,
                "RayJob",
                name,
                (Phase.SUCCEEDED,),
                timeout_s,
                lambda state: _print_state(name, state),
                start_s,
            )
        finally:  # also when the wait raises: nobody reads the log any more
            ended.set()
        printer.join(LOG_S)
    except KeyboardInterrupt:
        offer_to_end(connection, name)
        return INTERRUPTED_STATUS
    return 0 if state.phase is Phase.SUCCEEDED else state.status or 1


def _print_log(connection: Connection, name: str, ended: threading.Event) -> None:
    """Print the log of each submitter of the job, one after another: a retry has one of its own."""
    printed: set[str] = set()
    while True:
        is_last_round = ended.is_set()
        try:
            submitter = submitter_of(connection, name)
            if submitter is not None and submitter[0] not in printed:
                printed.add(submitter[0])
                for line in log_lines(connection, *submitter, follow=True):
                    print(line, flush=True)
        except MarlRayError as error:  # the job's state is what counts
            if not ended.is_set():
                _print_line(name, f"its log cannot be read: {error}")
        if is_last_round:
            return
        time.sleep(POLL_S)


def offer_to_end(connection: Connection, name: str) -> None:
    """Ask the person at the terminal whether to end the job, and end it after a yes.

    Ctrl-C, Ctrl-D and a missing terminal mean no.
    """
    answer = ""
    if sys.stdin.isatty():
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            answer = input(f"\nrayjob/{name}: end the job? [y/N] ").strip().lower()
    if answer in ("y", "yes"):
        delete(connection, "RayJob", name)
        _print_line(name, f"it ends; marl-ray cluster delete rayjob/{name} waits for that and takes the rest away")
        return
    _print_line(name, f"it continues; marl-ray cluster logs|wait|delete rayjob/{name}")


def _print_state(name: str, state: ResourceState) -> None:
    _print_line(name, str(state))


def _print_line(name: str, text: str) -> None:
    print(f"rayjob/{name}: {text}", file=sys.stderr, flush=True)
