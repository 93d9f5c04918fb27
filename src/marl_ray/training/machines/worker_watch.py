"""Reports what a run or a trial waits for while workers are missing or silent.

A report says which workers, for what, since when and until when. Ray Train starts lost workers again without a word. Its
controller calls a WorkerWatch, which appends lines to a file. The process that drives the workers, on the same node, reads
the lines (`follow_notes`). Nothing depends on the file.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from marl_ray.errors import MarlRayError, describe_error
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.machines.cluster_state import alive_nodes, free_resources, has_all_placement_groups
from marl_ray.training.machines.full_disk import DiskFullError
from marl_ray.training.machines.ray_variables import lost_after_s

SAY_S = (10.0, 60.0, 300.0)
"""Seconds after which a wait is reported; later it is reported again each time that the last of them passes."""
SILENT_S = 10.0
"""Seconds without an answer after which a worker is reported as silent."""
POLL_S = 0.5
"""Seconds between two looks at whether a wait is over, and at the file of notes."""
MAX_FAILED_STARTS = 5
"""Number of times that workers may die while they start, one after the other, until the run or the trial fails."""
WAIT_S = 6 * 3600.0
"""Maximum seconds of a wait for the workers' resources, at first or after some were lost, until the run or trial fails."""


class WorkerWatch:
    """Follows the workers of one run, or of one trial, from the process that starts them."""

    def __init__(self, notes: Path, wait_s: float = WAIT_S):
        """Append the lines to the file `notes`. `wait_s` bounds the wait for resources."""
        self.notes, self.wait_s = notes, wait_s
        self.nodes: dict[int, str] = {}
        """Rank -> address of its node, of the workers that ran last."""
        self.causes: dict[int, str] = {}
        """Rank -> why it ended."""
        self.since = 0.0
        """Time at which the wait began, in seconds since 1970; 0 while there is none."""
        self.waits = 0
        """Number of waits so far."""
        self.silent_ranks: set[int] = set()
        self.failed_starts = 0
        """Number of starts that have failed since workers ran."""
        self.end_reason = ""
        """The reason why no workers are started again, in one line; empty while they are."""

    def on_start_requested(self, workers: int, each: Mapping[str, float]) -> None:
        """Note that so many workers are to be started, for `each` of which these resources are needed.

        Raises MarlRayError if they have been waited for since more than `wait_s` seconds, or could not be started
        MAX_FAILED_STARTS times, or if a disk is full.
        """
        if self.end_reason:
            raise MarlRayError(self.end_reason)
        if not self.since:
            self.since, self.waits = time.time(), self.waits + 1
            threading.Thread(target=self._say_again, args=(self.waits, workers, each), daemon=True).start()
        elif time.time() - self.since > self.wait_s:
            # Between two tries these workers have no placement group, whatever else of the job has one.
            wait = self._describe_wait(workers, each, has_resources=False)
            raise MarlRayError(f"gave up after {time.time() - self.since:.0f} s: {wait}")

    def on_started(self, nodes: Mapping[int, str]) -> None:
        """Note that the workers run, on the nodes of these addresses by rank."""
        if self.since and time.time() - self.since > SAY_S[0]:
            self._note(f"its workers are there, after {time.time() - self.since:.0f} s")
        self.since = 0.0
        self.nodes = dict(nodes)
        self.causes = {}
        self.failed_starts = 0
        self.silent_ranks.clear()

    def on_silence(self, seconds: Mapping[int, float]) -> None:
        """Note since how many seconds workers have not answered."""
        for rank, duration in seconds.items():
            if duration > SILENT_S and rank not in self.silent_ranks:
                self.silent_ranks.add(rank)
                self._note(
                    f"worker {rank} on node {self.nodes.get(rank)} has not answered for {duration:.0f} s; it counts as "
                    f"lost at {_format_time(time.time() - duration + lost_after_s())}, and all start again from the last "
                    "checkpoint"
                )
        for rank in self.silent_ranks - seconds.keys():
            self.silent_ranks.remove(rank)
            self._note(f"worker {rank} on node {self.nodes.get(rank)} answers again")

    def on_failure(self, errors: Mapping[int, BaseException]) -> None:
        """Note why workers have ended."""
        self.causes |= {rank: describe_error(error) for rank, error in errors.items()}
        for rank, error in errors.items():
            if isinstance(error, DiskFullError):
                self.end_reason = f"worker {rank}: {error}"

    def on_start_failed(self, error: BaseException) -> None:
        """Note why workers could not be started."""
        self.failed_starts += 1
        self._note(
            f"its workers could not be started ({self.failed_starts} of {MAX_FAILED_STARTS} times): {describe_error(error)}"
        )
        if self.failed_starts >= MAX_FAILED_STARTS:
            self.end_reason = f"its workers could not be started {MAX_FAILED_STARTS} times: {describe_error(error)}"

    def _say_again(self, wait: int, workers: int, each: Mapping[str, float]) -> None:
        """Note what the wait of this number is for after each of SAY_S, until it is over."""
        begin, pauses = time.monotonic(), list(SAY_S)
        while True:
            until = pauses.pop(0) if len(pauses) > 1 else time.monotonic() - begin + pauses[0]
            while time.monotonic() - begin < until:
                time.sleep(POLL_S)
                if not self.since or self.waits != wait:
                    return
            with contextlib.suppress(Exception):  # a cluster that does not answer is no reason to end
                self._note(self._describe_wait(workers, each, has_all_placement_groups()))

    def _describe_wait(self, workers: int, each: Mapping[str, float], has_resources: bool) -> str:
        """Return one line about the wait. `has_resources` says that only processes are waited for."""
        nodes, free = alive_nodes(), free_resources()
        need = " and ".join(f"{number:g} {kind}" for kind, number in each.items() if number)
        needing = f"{workers} worker{'s' if workers > 1 else ''} of {need} each, since {_format_time(self.since)}"
        have = " and ".join(f"{free.get(kind, 0.0):g} {kind}" for kind, number in each.items() if number)
        lost = [
            f"worker {rank} was lost on node {node}{'' if node in nodes else ', which is gone'} ({cause})"
            for rank, cause in sorted(self.causes.items())
            for node in [self.nodes.get(rank)]
        ]
        if has_resources:  # nothing is free because the workers have it
            return "; ".join([f"starting the processes of {needing}", *lost[:2]])
        return "; ".join(
            [
                f"waiting for {needing} and at most until {_format_time(self.since + self.wait_s)}",
                f"the cluster has {have} free on {len(nodes)} node{'s' if len(nodes) > 1 else ''}",
                *lost[:2],
            ]
        )

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError), self.notes.open("a") as file:
            file.write(f"{line}\n")


@contextlib.contextmanager
def follow_notes(say: Callable[[str], None]) -> Iterator[Path]:
    """Say each line that a WorkerWatch appends to the file of the path that is yielded, within the block.

    A line is said within two looks, of POLL_S each.
    """
    done = threading.Event()

    def read(path: Path) -> None:
        position = 0
        while True:
            ended = done.wait(POLL_S)
            with contextlib.suppress(OSError), path.open() as file:
                file.seek(position)
                while (line := file.readline()).endswith("\n"):
                    position += len(line.encode())
                    say(line.strip())
            if ended:
                return

    with temporary_folder("notes") as folder:
        path = folder / "lines"
        thread = threading.Thread(target=read, args=(path,), name="notes", daemon=True)
        thread.start()
        try:
            yield path
        finally:
            done.set()
            thread.join(2 * POLL_S)


def _format_time(at: float) -> str:
    """Return the local time of day, with the date where it is another day."""
    moment = time.localtime(at)
    return time.strftime("%H:%M:%S" if moment[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M:%S", moment)
