"""A leg of a trial on a Ray Train worker group of its own.

Rank 0 writes rows and the names of checkpoints to a file of messages in the trial's folder; the trial's process reads that
file and writes the trial's own files. So no process stands between the two whose death would end the leg. Workers that die
continue after the last checkpoint that the messages name; a trial's process that dies leaves its last checkpoint to the
next.
"""

import contextlib
import json
import os
import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from marl_ray.config import RunConfig
from marl_ray.config.sweep import MetricConfig
from marl_ray.config.tracking import TRACKING_URI
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonObject
from marl_ray.policies.agreement import all_gather_values
from marl_ray.ray_seams import end_controllers
from marl_ray.stored_files.tail import Tail
from marl_ray.training.checkpoints.loading import UnreadableCheckpointError
from marl_ray.training.checkpoints.storage import StoredFolder, UnwritableCheckpointError
from marl_ray.training.collectives import broadcast_from_rank0, rank_and_world_size
from marl_ray.training.errors import DivergedError, PassMemoryError
from marl_ray.training.loop.pass_sizes import note_smaller_pass, pass_sizes
from marl_ray.training.machines.ray_variables import START_VARIABLE, exchange_s
from marl_ray.training.machines.torch_trainer import torch_trainer
from marl_ray.training.machines.worker_watch import follow_notes
from marl_ray.training.machines.working_folder import enter_folder
from marl_ray.tuning.folder import Folder, trial_folder
from marl_ray.tuning.running.trial_files import CHECKPOINT_PREFIX, Leg, TrialWriter, is_takeover
from marl_ray.tuning.running.trial_seeds import load_seeds, run_leg

GROUP_START_S = 300
"""Seconds of one try to get the resources of a worker group; WorkerWatch bounds all tries together."""
MESSAGES_FILE = "messages.jsonl"
"""File in the folder of an attempt with the rows and checkpoints of its workers."""
UNREADABLE_S = 300.0
"""Seconds after which a storage that cannot be read ends the leg."""
JOINT_ERRORS = (DivergedError, UnreadableCheckpointError, UnwritableCheckpointError)
"""Kinds of errors that all workers raise together, besides those that say so by `shared`."""


def run_in_workers(leg: Leg, configs: list[RunConfig], writer: TrialWriter) -> JsonObject:
    """Run the leg on a worker group of its own. Raises MarlRayError with the cause of a failure."""
    from ray.train import TrainingFailedError

    from marl_ray.training.driver import describe_cause

    # Other trials may occupy the workers' resources for longer than Ray Train waits by itself.
    os.environ.setdefault(START_VARIABLE, str(GROUP_START_S))
    controllers: list[Any] = []
    ended: list[Any] = []
    lines: deque[str] = deque()
    with follow_notes(lines.append) as notes:
        trainer = torch_trainer(
            train_in_worker,
            asdict(leg) | {"place": writer.place, "starts": writer.starts},
            configs[0],
            label=f"{leg.sweep}-{leg.number:04d}",
            name=writer.place,
            storage=writer.folder.uri,
            use_gpu=leg.use_gpu,
            exchange_s=len(configs) * exchange_s(configs[0]),
            notes=notes,
            begun=controllers.append,
        )

        def fit() -> None:
            try:
                result: Any = trainer.fit()
                ended.append(result.return_value)
            except BaseException as error:
                ended.append(error)

        # Reports to Tune must come from this thread, while the workers train.
        thread = threading.Thread(target=fit, name="train", daemon=True)
        thread.start()
        try:
            _follow_messages(writer, thread, lines)
        finally:
            if thread.is_alive():  # the workers end with their controller
                end_controllers(controllers)
    _say_all(writer, lines)
    result = ended[0]
    if isinstance(result, TrainingFailedError):
        raise MarlRayError(describe_cause(result)) from result
    if isinstance(result, BaseException):
        raise result
    if "failed" in result:
        raise MarlRayError(result["failed"])
    return dict(result)


def _say_all(writer: TrialWriter, lines: deque[str]) -> None:
    """Say the lines, which another thread appends, on the thread that may report to Tune."""
    while lines:
        writer.say(lines.popleft())


def _follow_messages(writer: TrialWriter, thread: threading.Thread, lines: deque[str]) -> None:
    """Take in the messages of rank 0, and say the lines about its group, until the thread has ended.

    Raises OSError if the storage cannot be read or written.
    """
    with closing(Tail(writer.folder.filesystem, f"{writer.folder.path}/{writer.place}/{MESSAGES_FILE}")) as messages:
        taken, read_at = 0, time.monotonic()
        while True:
            over = not thread.is_alive()
            _say_all(writer, lines)
            try:
                new_messages = messages.read(taken)
                read_at = time.monotonic()
            except OSError:
                if over or time.monotonic() - read_at > UNREADABLE_S:
                    raise
                new_messages = []
            for message in new_messages:
                _take_message(writer, json.loads(message))
            taken += len(new_messages)
            if not new_messages:
                if over:
                    return
                thread.join(messages.poll_s)


def _take_message(writer: TrialWriter, message: JsonObject) -> None:
    """Take in one message of rank 0.

    `begun` tells what was played before, `back` to which checkpoint the trial returned, and why, `kept` names a checkpoint
    that was written, and `line` is for people. Any other message is a row of metrics.
    """
    if "begun" in message:
        writer.note_begin(message["begun"])
    elif "back" in message:
        writer.return_to(*message["back"])
    elif "kept" in message:
        writer.note_checkpoint(message["kept"], message["steps"], message["played"])
    elif "line" in message:
        writer.say(message["line"])
    else:
        writer.add_row(message)


def train_in_worker(payload: dict[Any, Any]) -> Any:
    """Train a leg on the device of this worker, and return its result.

    Ray Train calls this function in every worker.
    """
    import ray.train.torch

    return train_leg(payload, ray.train.torch.get_device())


def train_leg(payload: dict[Any, Any], device: torch.device) -> JsonObject:
    """Train a leg in one of its workers.

    Returns `objectives` and `done`, or under `failed` the message of an error that all workers raise together, and
    would raise again after every restart.

    Raises the error of this worker alone: the others wait for it, until its process ends, and theirs with it.
    """
    leg = Leg(**{key: payload[key] for key in Leg.__dataclass_fields__})
    os.environ[TRACKING_URI] = leg.tracking_uri
    enter_folder(leg.folder)
    place, (rank, _) = payload["place"], rank_and_world_size()
    folder = trial_folder(leg.storage, leg.sweep, leg.number)
    configs = [RunConfig.model_validate(data) for data in leg.configs]
    metrics = [MetricConfig.model_validate(metric) for metric in leg.metrics]
    messages = folder.open_lines(f"{place}/{MESSAGES_FILE}") if rank == 0 else None

    def send(message: JsonObject, durable: bool = False) -> None:
        if messages is not None:
            messages.append([json.dumps(message)], durable)

    def keep(local: Path) -> None:
        name = broadcast_from_rank0(lambda: f"{place}/{CHECKPOINT_PREFIX}{seeds.iteration:06d}-{time.time_ns()}")
        folder.upload(local, name)
        all_gather_values(None)  # wait until every worker has written its part
        send({"kept": name, "steps": seeds.steps, "played": seeds.played}, durable=True)

    trial = StoredFolder(folder.filesystem, folder.path)
    # The checkpoints of this attempt, if a worker has died, and the passes for which one had no room.
    kept_names, sizes = broadcast_from_rank0(
        lambda: (_kept_checkpoints(folder, place), pass_sizes(trial, lambda line: send({"line": line})))
    )
    starts = [*kept_names, *(name for name in payload["starts"] if name not in kept_names)]
    try:
        seeds, start, damages = load_seeds(folder, starts, configs, metrics, device, sizes)
        with seeds.close_after():
            if damages:
                send({"back": [start, seeds.iteration, seeds.steps, damages]})
            send({"begun": seeds.played})
            run_leg(seeds, leg.until, send, keep, start is not None and is_takeover(start))
    except PassMemoryError as error:
        with contextlib.suppress(OSError):  # then the workers start again with passes of the same size
            note_smaller_pass(trial, error)
        raise
    except MarlRayError as error:
        if not (error.shared or isinstance(error, JOINT_ERRORS)):
            raise
        return {"failed": str(error)}
    finally:
        if messages is not None:
            messages.close()
    return {"objectives": seeds.objectives(), "done": seeds.done}


def _kept_checkpoints(folder: Folder, place: str) -> list[str]:
    """Return the checkpoints that earlier worker groups of this attempt have kept, the newest first.

    Those that are no longer there are left out.
    """
    names = [json.loads(line).get("kept") for line in folder.lines(f"{place}/{MESSAGES_FILE}")]
    return [name for name in reversed(names) if name and folder.exists(name)]
