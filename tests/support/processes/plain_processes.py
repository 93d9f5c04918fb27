"""The driver and the workers of `plain_train` in their processes.

They die or stop before a chosen line or call of the product.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import marl_ray

SOURCES = Path(marl_ray.__file__).parent
PARTS = (
    "training/loop",
    "training/checkpoints",
    "training/journal",
    "training/run_folder",
    "training/tracking",
    "policies/bundles",
    "stored_files/ownership",
)
FILES = (
    "training/driver.py",
    "training/run_result.py",
    "training/worker.py",
    "stored_files/tail.py",
    "temporary_folders.py",
)
"""Files of the product in which processes die; PARTS are such folders."""
KILL, STOP = "kill", "stop"
MET = "met.txt"
"""The file with the places of the faults that processes have met since the command was started."""
BEAT_S, LOST_S = 0.3, 2.0
"""Those of the drivers, in place of the product's."""


@dataclass(frozen=True)
class Fault:
    """The place at which a process dies, or sleeps.

    It is before the `nth` line that the process runs of a file of the product, or before its `nth` call of
    a function there.
    """

    place: str
    """`FILE`, whose lines count, or `FILE:FUNCTION`, whose calls do; a method is `Class.method`."""
    nth: int
    how: str = KILL
    rank: int = 0
    """The worker whose fault it is; a driver has none."""


def watch_lines(fault: Fault | None, folder: Path) -> Counter[str]:
    """Count the lines that this process runs of the product's files, and die before the chosen one.

    The chosen place may be a call; a note of it is written in `folder` before.
    """
    counts: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    names: dict[str, str] = {}

    def name_of(path: str) -> str:
        if path not in names:
            file = path.removeprefix(f"{SOURCES}/")
            names[path] = file if file in FILES or file.startswith(PARTS) else ""
        return names[path]

    def count(counter: Counter[str], place: str) -> None:
        counter[place] += 1
        if fault is not None and place == fault.place and counter[place] == fault.nth:
            note_met(folder, place)
            os.kill(os.getpid(), signal.SIGKILL if fault.how == KILL else signal.SIGSTOP)

    def line(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            count(counts, names[frame.f_code.co_filename])
        return line

    def call(frame: Any, event: str, argument: Any) -> Any:
        name = name_of(frame.f_code.co_filename)
        if not name:
            return None
        count(calls, f"{name}:{frame.f_code.co_qualname}")
        return line

    threading.settrace(call)
    sys.settrace(call)
    return counts


def note_met(folder: Path, place: str) -> None:
    """Note that a process has met its fault. The line is written at once, because the process dies."""
    with (folder / MET).open("a", buffering=1) as file:
        file.write(f"{place}\n")


def write_counts(path: Path, counts: Mapping[str, int]) -> None:
    """Write them complete or not at all: another process may do so too, and this one may be killed."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(counts))
    temporary.replace(path)


class PlainTrainer:
    """The part of Ray Train's TorchTrainer that the driver uses."""

    def __init__(
        self, pipe: Any, worker: Any, *, train_loop_config: Any, scaling_config: Any, run_config: Any, **more: Any
    ):
        self.pipe, self.payload = pipe, train_loop_config
        self.workers, self.run_config = scaling_config.num_workers, run_config
        self.killed = threading.Event()
        self._create_default_callbacks: Any = list
        self._register_sigint_handler: Any = None

    def fit(self) -> Any:
        """Train to the end with one group of workers after the other."""
        from ray.train.v2.api.exceptions import WorkerGroupError

        self._register_sigint_handler(self)
        failures = 0
        while True:
            self.pipe.send((self.payload, self.workers))
            while not self.pipe.poll(0.05):
                if self.killed.is_set():
                    raise RuntimeError("the controller was killed")
            values, errors = self.pipe.recv()
            if errors is None:
                return SimpleNamespace(return_value=values[0])
            for callback in self.run_config.callbacks:
                if hasattr(callback, "after_exception"):
                    callback.after_exception(None, errors)
            failures += 1
            if 0 <= self.run_config.failure_config.max_failures < failures:
                raise WorkerGroupError("workers failed", errors)


def drive(config: dict[str, Any], pipe: Any, fault: Fault | None, output: Path, folder: Path) -> None:
    """Run the command in this process."""
    import ray
    import ray.train.torch

    from marl_ray.config import RunConfig, parse_config
    from marl_ray.errors import MarlRayError
    from marl_ray.stored_files.ownership import owners
    from marl_ray.training import driver
    from marl_ray.training.journal import deliveries, delivery

    with output.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    faulthandler.enable()  # what is said shows where a library crashed
    ray.train.torch.TorchTrainer = partial(PlainTrainer, pipe)  # type: ignore[misc,assignment]
    ray.kill = lambda controller: controller.killed.set()  # type: ignore[assignment,misc]
    # There is no cluster whose resources could be read.
    driver.check_capacity = lambda config: False  # type: ignore[attr-defined]
    delivery.RETRY_S, delivery.LOG_EVERY_S = 0.05, 0.02
    deliveries.REGISTERED_S = 1.0
    owners.BEAT_S, owners.LOST_S = BEAT_S, LOST_S
    counts = watch_lines(fault, folder)
    status = 0
    try:
        driver.train(parse_config(RunConfig, config))
    except MarlRayError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except BaseException:
        traceback.print_exc()
        status = 2
    sys.settrace(None)
    write_counts(folder / "lines-driver.json", counts)
    sys.stderr.flush()
    os._exit(status)


def work(payload: Any, rank: int, count: int, store: str, pipe: Any, fault: Fault | None, folder: Path) -> None:
    """Run one worker in this process."""
    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist

    from marl_ray.training.worker import train_in_worker

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context: Any = SimpleNamespace(get_world_rank=lambda: rank)
    ray.train.get_context = lambda: context
    ray.train.torch.get_device = lambda: torch.device("cpu")
    counts = watch_lines(fault, folder)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        answer = "value", train_in_worker(payload)
    except BaseException as error:
        answer = "error", RuntimeError(f"{type(error).__name__}: {error}")
    sys.settrace(None)
    if rank == 0:
        write_counts(folder / "lines-worker.json", counts)
    pipe.send(answer)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)
