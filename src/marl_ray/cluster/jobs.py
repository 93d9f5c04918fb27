"""Runs commands of marl-ray as Ray Jobs, and follows them to their end."""

import asyncio
import json
import logging
import secrets
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from marl_ray.cluster.job_paths import refuse_relative_paths
from marl_ray.cluster.listeners import JobListener
from marl_ray.cluster.waits import CONNECT_S, INTERRUPTED_STATUS, JOB_TIMEOUT_S, LOST_S, READ_S
from marl_ray.config import RunConfig, config_hash, load_config
from marl_ray.config.sweep import SweepConfig, load_sweep
from marl_ray.errors import MarlRayError, one_line
from marl_ray.ray_seams import dashboard_client
from marl_ray.temporary_folders import temporary_folder

if TYPE_CHECKING:
    from ray.dashboard.modules.job.pydantic_models import JobDetails
    from ray.job_submission import JobSubmissionClient

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts of a dashboard's URL that are this machine."""
STOP_S = 60.0
"""Seconds that a job has to end after it was asked to."""
GRACE_S = 30
"""Seconds between SIGTERM and SIGKILL that the job's driver has to write a checkpoint; Ray's own default is 3."""
_POLL_S = 0.5
"""Seconds between two questions about a job: a person who follows its log notices no delay."""


def submit(
    kind: Literal["train", "sweep"],
    config_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    address: str,
    listener: JobListener,
    submission_id: str | None = None,
    python: str = "python",
    timeout_s: float = JOB_TIMEOUT_S,
) -> int:
    """Run `marl-ray KIND CONFIG key=value...` on the cluster whose dashboard is `address`, and return its exit status.

    The config is validated here before anything is sent. A job fails once and for good, it is never retried. With a
    `submission_id` a second call joins the job that the first one started. `python` is the interpreter's name in the
    cluster's image, which must have marl-ray installed.
    """
    config = read_config(kind, config_path, overrides)
    if _is_this_machine(address) and not Path(config.storage).is_absolute() and "://" not in config.storage:
        # The cluster is this machine, so "here" means the same folder to both.
        overrides = [*overrides, f"storage={Path(config.storage).resolve()}"]
        config = read_config(kind, config_path, overrides)
    refuse_relative_paths(config)
    client = connect(address)
    with temporary_folder("job") as folder:
        # The folder is uploaded, so it has what the job reads and nothing that lies beside the config.
        if isinstance(config, SweepConfig):  # its file may name its run's, which stays here
            Path(folder, "config.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
        else:
            shutil.copyfile(config_path, Path(folder, "config.yaml"))
        return run_job(
            client,
            shlex.join([python, "-m", "marl_ray", kind, "config.yaml", *overrides]),
            str(folder),
            listener,
            submission_id=submission_id,
            metadata={"kind": kind, "run": config.name, "config_hash": config_hash(config)},
            timeout_s=timeout_s,
        )


def _is_this_machine(address: str) -> bool:
    try:
        return urlsplit(address).hostname in LOOPBACK
    except ValueError:  # no URL, as `connect` says
        return False


def new_submission_id() -> str:
    """Return a name for a job that no other has."""
    return f"marl-ray-{secrets.token_hex(8)}"


def read_config(kind: str, path: str | Path, overrides: Sequence[str]) -> RunConfig | SweepConfig:
    """Return the validated config of a run or a sweep. Raises MarlRayError."""
    return load_sweep(path, overrides) if kind == "sweep" else load_config(RunConfig, path, overrides)


def connect(address: str) -> "JobSubmissionClient":
    """Return a Jobs client whose requests have deadlines. Raises MarlRayError if the cluster cannot be used."""
    from ray.job_submission import JobSubmissionClient

    for module in ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(module).setLevel(logging.WARNING)  # they narrate uploads and connections
    return dashboard_client(JobSubmissionClient, address, (CONNECT_S, READ_S), "--address ")


def run_job(
    client: "JobSubmissionClient",
    entrypoint: str,
    working_dir: str | Path,
    listener: JobListener,
    *,
    submission_id: str | None = None,
    metadata: Mapping[str, str] | None = None,
    timeout_s: float = JOB_TIMEOUT_S,
) -> int:
    """Submit a command, give the job's log to the listener as it is, and return the driver's exit status.

    Ctrl-C stops the job, waits until it has ended, and returns 130. A job that outlives `timeout_s` is stopped too,
    and raises MarlRayError.
    """
    # Chosen here and not by the server: an interrupted submission can still be stopped by its name.
    job_id = submission_id or new_submission_id()
    follower = _LogFollower(client, job_id, listener)
    try:
        is_new = _submit_or_join(
            client, entrypoint, working_dir, job_id, dict(metadata or {}), may_exist=submission_id is not None
        )
        if not is_new:
            listener.say(f"job {job_id}: it is there already; following it")
        details = asyncio.run(follower.follow(timeout_s))
    except KeyboardInterrupt:
        listener.say(f"job {job_id}: stopping it")
        _stop(follower)
        return INTERRUPTED_STATUS
    if details is None:
        _stop(follower)
        raise MarlRayError(f"job {job_id} did not end within {timeout_s:g} s and was stopped")
    if end := _failure_of(details):
        listener.say(f"job {job_id}: {end}")
    return _exit_status(details)


def _submit_or_join(
    client: "JobSubmissionClient",
    entrypoint: str,
    working_dir: str | Path,
    job_id: str,
    metadata: dict[str, str],
    may_exist: bool,
) -> bool:
    """Submit a job and return True, or return False where the same job is there already and `may_exist`.

    Raises MarlRayError if the cluster does not accept it, or the name is that of a job with another command or config.
    """
    runtime_env = {"working_dir": str(working_dir), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_S)}}
    try:
        client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env, submission_id=job_id, metadata=dict(metadata))
        return True
    except (OSError, RuntimeError, ValueError) as error:
        if not (may_exist and "already exists" in str(error)):
            raise MarlRayError(f"job {job_id} was not accepted: {one_line(error)}") from error
    details = _details_of(client, job_id)
    if details.entrypoint != entrypoint or any(
        (details.metadata or {}).get(key) != value for key, value in metadata.items()
    ):
        raise MarlRayError(f"submission_id {job_id!r} already names a job with another command or config")
    return False


def _details_of(client: "JobSubmissionClient", job_id: str) -> "JobDetails":
    """Return what the cluster knows of a job. Raises MarlRayError if it does not say it."""
    try:
        return client.get_job_info(job_id)
    except (OSError, RuntimeError, ValueError) as error:
        raise MarlRayError(f"job {job_id} is there already and cannot be read: {one_line(error)}") from error


class _LogFollower:
    """Copies one job's log to a listener and waits for the job's end.

    It remembers how many characters were copied, so that nothing comes twice.
    """

    def __init__(self, client: "JobSubmissionClient", job_id: str, listener: JobListener) -> None:
        self.client = client
        self.job_id = job_id
        self._listener = listener
        self._copied = 0

    async def follow(self, timeout_s: float) -> "JobDetails | None":
        """Return the job's last state once it has ended; None if it still runs after `timeout_s`.

        Raises MarlRayError once the cluster has not answered for `LOST_S`; the job may still run.
        """
        deadline = time.monotonic() + timeout_s
        last_answer = time.monotonic()
        copy_task = asyncio.create_task(self._copy_log())
        try:
            while time.monotonic() < deadline:
                try:
                    details = await asyncio.to_thread(self.client.get_job_info, self.job_id)
                    last_answer = time.monotonic()
                except (OSError, RuntimeError, ValueError) as error:
                    if time.monotonic() - last_answer > LOST_S:
                        raise MarlRayError(
                            f"job {self.job_id}: the cluster has not answered for {LOST_S:g} s "
                            f"and the job may still run: {one_line(error)}"
                        ) from error
                else:
                    if details.status.is_terminal():
                        await asyncio.wait([copy_task], timeout=READ_S)
                        await asyncio.to_thread(self._copy_remaining_log)
                        return details
                if copy_task.done():  # the connection dropped
                    copy_task = asyncio.create_task(self._copy_log())
                await asyncio.wait([copy_task], timeout=_POLL_S)
                if copy_task.done():
                    await asyncio.sleep(_POLL_S)
            return None
        finally:
            copy_task.cancel()
            await asyncio.gather(copy_task, return_exceptions=True)

    async def _copy_log(self) -> None:
        """Copy the log from one websocket; every connection sends the log from its beginning."""
        position = 0
        try:
            async for text in self.client.tail_job_logs(self.job_id):
                self._write(text, position)
                position += len(text)
        except (OSError, RuntimeError):
            return  # aiohttp's errors are either; `follow` reconnects

    def _copy_remaining_log(self) -> None:
        try:
            self._write(self.client.get_job_logs(self.job_id), 0)
        except (OSError, RuntimeError, ValueError) as error:
            self._listener.say(f"job {self.job_id}: the end of its log cannot be read: {one_line(error)}")

    def _write(self, text: str, position: int) -> None:
        new_text = text[max(0, self._copied - position) :]
        if new_text:
            self._listener.write_log(new_text)
            self._copied += len(new_text)


def _stop(follower: _LogFollower) -> None:
    """Ask the job to end until it has ended, because one that has not started yet ignores the first request.

    Raises MarlRayError after STOP_S.
    """
    deadline = time.monotonic() + STOP_S
    reason = ""
    while time.monotonic() < deadline:
        try:
            follower.client.stop_job(follower.job_id)
            if asyncio.run(follower.follow(timeout_s=5.0)) is not None:
                return
        except (OSError, RuntimeError, ValueError) as error:
            if "does not exist" in str(error):
                return  # interrupted before it was submitted
            reason = f": {one_line(error)}"
            time.sleep(_POLL_S)
    raise MarlRayError(f"job {follower.job_id} did not stop within {STOP_S:g} s{reason}")


def _failure_of(details: "JobDetails") -> str:
    """Return how a job ended that did not succeed, in one line; empty for one that did."""
    if details.status.value == "SUCCEEDED":
        return ""
    code = details.driver_exit_code
    # A job without a status never ran, or was stopped: Ray's message is all there is to say.
    reason = " ".join((details.message or "").split()) if code is None else f"exit status {code}"
    return f"{details.status.value}: {reason}"


def _exit_status(details: "JobDetails") -> int:
    """Return the driver's exit status as shells report it, and 1 for a job that has failed without one."""
    if details.status.value == "SUCCEEDED":
        return 0
    code = details.driver_exit_code or 1
    return 128 - code if code < 0 else code
