"""The driver and the workers of a run as plain processes.

They die or stop before a chosen line or call of the product. `marl_ray.training.driver.train` and
`marl_ray.training.worker.train_in_worker` run as they are. Of Ray Train there is what these call: a trainer that starts a
group of workers and starts another where one is lost. One process, which has loaded the libraries and has no threads,
forks all others, so a start takes milliseconds:

    python -m processes.plain_train     reads requests from stdin and writes answers to stdout, one JSON document a line
"""

import contextlib
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import psutil

from processes.plain_processes import (
    MET,
    SOURCES,
    Fault,
    drive,
    work,
)

PRELOADED = (
    "boto3.session",
    "marl_ray.algorithms.with_critic.mappo",
    "marl_ray.policies.bundles.actor_critic",
    "marl_ray.training.driver",
    "marl_ray.training.learner.families.actor_critic_policies",
    "marl_ray.training.single_process",
    "matplotlib.pyplot",
    "mlflow.store.model_registry.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "multigrid.envs",
    "ray.train.torch",
    "numba.typed",
    "scipy.special",
    "tensorboardX",
    "torch._dynamo",
)
"""Forks have them then."""
START_S = 90.0
"""Most seconds from the start of a driver to its end."""
ANSWER_S = START_S + 60.0
AWAKE_S = 1.0
"""Seconds for which a process continues that slept while others took its place."""


@dataclass(frozen=True)
class Start:
    """One start of the command."""

    driver: Fault | None = None
    groups: tuple[Fault | None, ...] = ()
    """For each group of workers in turn, the fault of one of them; later groups have none."""
    linger_s: float = 0.0
    """Seconds beside the next workers for which the workers of a driver that was killed continue, and others sleep on. With
    0 they are killed at once."""


@dataclass(frozen=True)
class Ended:
    """The end of one start."""

    status: int | None
    """Exit status of the driver; negative for a signal, and None where it sleeps."""
    output: str
    groups: int
    met: list[str] = field(default_factory=list)
    """Places of the faults that processes have met."""
    lines: dict[str, dict[str, int]] = field(default_factory=dict)
    """`driver` and `worker` -> file -> number of lines that one which ended by itself has run."""


@contextlib.contextmanager
def plain_train(folder: Path, **environment: str) -> Iterator[Callable[[Mapping[str, Any], Start], Ended]]:
    """A function that starts the command with a config. `folder` holds what processes say. Afterwards none is left."""
    paths = os.pathsep.join([str(SOURCES.parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    folder.mkdir(exist_ok=True)
    with (folder / "machine.log").open("w") as log:
        machine = subprocess.Popen(
            [sys.executable, "-m", "processes.plain_train", str(folder)],
            env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder)} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    answers: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        assert machine.stdout is not None
        for line in machine.stdout:
            answers.put(line)

    threading.Thread(target=listen, daemon=True).start()

    def start(config: Mapping[str, Any], how: Start) -> Ended:
        assert machine.stdin is not None
        machine.stdin.write(json.dumps([config, asdict(how)]) + "\n")
        machine.stdin.flush()
        try:
            return Ended(**json.loads(answers.get(timeout=ANSWER_S)))
        except queue.Empty:
            raise AssertionError((folder / "machine.log").read_text()[-2000:]) from None

    try:
        yield start
    finally:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(machine.pid).children(recursive=True):
                process.kill()
        machine.kill()
        machine.wait(60)


@dataclass
class Stray:
    """A process that counts as lost and is not dead."""

    process: Any
    linger_s: float
    until: float = 0.0
    """Time, of the monotonic clock, at which one that sleeps wakes and another dies; 0 until others have its place."""


class Machine:
    """Plays the part of Ray: it starts groups of workers for a driver, and says which are lost."""

    def __init__(self, folder: Path):
        self.folder, self.forks = folder, get_context("fork")
        self.strays: list[Stray] = []
        self.name, self.starts = "", 0

    def start(self, config: dict[str, Any], how: Start) -> Ended:
        """Start the command, and wait until its driver has ended or sleeps."""
        if config["name"] != self.name:
            self.close()
        self.name = config["name"]
        # A file of its own, because a driver of before that slept may wake and continue writing.
        self.starts += 1
        met = self.folder / MET
        met.write_text("")
        output, (receiver, other) = self.folder / f"said-{self.starts}.txt", self.forks.Pipe()
        driver = self._fork(drive, config, other, how.driver, output)
        other.close()
        faults, groups = list(how.groups), 0
        workers: list[tuple[Any, Any]] = []
        deadline = time.monotonic() + START_S
        while driver.exitcode is None and not _sleeps(driver):
            assert time.monotonic() < deadline, f"the run did not end in {START_S:g} s: {output.read_text()[-2000:]}"
            self._end_strays()
            connection.wait([receiver, driver.sentinel, *(pipe for _, pipe in workers)], 0.02)
            with contextlib.suppress(EOFError, OSError):
                if not workers and receiver.poll():
                    payload, count = receiver.recv()
                    groups += 1
                    workers = self._group(payload, count, faults.pop(0) if faults else None)
                    for stray in self.strays:
                        stray.until = stray.until or time.monotonic() + stray.linger_s
                if workers and (answer := self._answer(workers)) is not None:
                    self._leave([process for process, _ in workers], how.linger_s)
                    workers = []
                    receiver.send(answer)
        status = None if driver.exitcode is None else driver.exitcode
        self._leave([process for process, _ in workers], how.linger_s)
        if status is None:
            self._leave([driver], how.linger_s)
        lines = {
            role: json.loads(path.read_text()) for role in ("driver", "worker") if (path := self._lines(role)).exists()
        }
        return Ended(status, output.read_text(), groups, met.read_text().splitlines(), lines)

    def close(self) -> None:
        """End all that count as lost."""
        for stray in self.strays:
            stray.process.kill()
            stray.process.join()
        self.strays = []

    def _fork(self, target: Callable[..., None], *arguments: Any) -> Any:
        process = self.forks.Process(target=target, args=(*arguments, self.folder), daemon=False)
        process.start()
        return process

    def _lines(self, role: str) -> Path:
        return self.folder / f"lines-{role}.json"

    def _group(self, payload: Any, count: int, fault: Fault | None) -> list[tuple[Any, Any]]:
        store = self.folder / "store"
        store.unlink(missing_ok=True)
        workers = []
        for rank in range(count):
            receiver, other = self.forks.Pipe()
            rank_fault = fault if fault is not None and fault.rank == rank else None
            workers.append((self._fork(work, payload, rank, count, str(store), other, rank_fault), receiver))
            other.close()
        return workers

    def _answer(self, workers: list[tuple[Any, Any]]) -> Any:
        """The end of a group: (values or None, errors by rank); None while it trains."""
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        for rank, (process, pipe) in enumerate(workers):
            dead = process.exitcode is not None or _sleeps(process)
            if pipe.poll():
                with contextlib.suppress(EOFError):
                    kind, value = pipe.recv()
                    (results if kind == "value" else errors)[rank] = value
                    pipe.send("taken")
            if dead and rank not in results and rank not in errors:
                errors[rank] = RuntimeError("The actor died unexpectedly before finishing this task.")
        if errors:
            return None, errors
        while len(results) < len(workers):
            if not results:
                return None
            rank = next(rank for rank in range(len(workers)) if rank not in results)
            try:
                kind, value = workers[rank][1].recv()
            except EOFError:
                return None, {rank: RuntimeError("The actor died unexpectedly before finishing this task.")}
            if kind == "error":
                return None, {rank: value}
            results[rank] = value
        return results, None

    def _leave(self, processes: list[Any], linger_s: float) -> None:
        for process in processes:
            if not linger_s:
                process.kill()
                process.join()
            else:
                self.strays.append(Stray(process, linger_s))

    def _end_strays(self) -> None:
        """Wake those that slept when others have taken their place, and end them when their time is over."""
        for stray in [stray for stray in self.strays if stray.until and time.monotonic() > stray.until]:
            if _sleeps(stray.process):
                os.kill(stray.process.pid, signal.SIGCONT)
                stray.until = time.monotonic() + AWAKE_S
            else:
                stray.process.kill()
                stray.process.join()
                self.strays.remove(stray)


def _sleeps(process: Any) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    return False


def main(folder: Path) -> None:
    """Answer requests until stdin ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    machine = Machine(folder)
    for line in sys.stdin:
        config, how = json.loads(line)
        faults = [how["driver"], *how["groups"]]
        driver, *groups = (None if each is None else Fault(**each) for each in faults)
        print(json.dumps(asdict(machine.start(config, Start(driver, tuple(groups), how["linger_s"])))), flush=True)
    machine.close()
    shutil.rmtree(folder / "store", ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
