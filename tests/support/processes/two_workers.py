"""Two or more processes that work together.

They are forked from one which has loaded the libraries, so that a start takes milliseconds.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = [
    "marl_ray.training.single_process",
    "marl_ray.training.learner.families.language_policies",
    "marl_ray.training.imitation.warm_start",
    "marl_ray.training.tracking.mlflow_run",
    "mlflow.store.db.utils",
]
WAIT_S = 120.0
"""Deadline of a worker's answer and of its end, in seconds."""

FORKS = multiprocessing.get_context("forkserver")
"""Its processes are forked from one that has no thread of Python. A fork of pytest's own process, which has threads of
many libraries, inherits the locks that they hold and may wait for them for ever."""
FORKS.set_forkserver_preload(PRELOADED)


def two_workers(body: Callable[..., Any], *arguments: Any, cpu: bool = True) -> Any:
    """Call `body(*arguments)` in two workers of one process group, and return the value of worker 0.

    With `cpu=False` the group exchanges no tensor of the CPU, as NCCL does not. Raises AssertionError if a worker fails
    or none answers in time. Body and arguments travel by pickle.
    """
    return workers(2, body, *arguments, cpu=cpu)


def workers(count: int, body: Callable[..., Any], *arguments: Any, cpu: bool = True) -> Any:
    """Call a function in `count` workers as `two_workers` does, and return the value of worker 0."""
    with tempfile.TemporaryDirectory(prefix="marl-ray-two-") as folder:
        answers = FORKS.SimpleQueue()
        store = str(Path(folder, "store"))
        processes = [
            FORKS.Process(target=_work, args=(k, count, store, answers, cpu, body, arguments), daemon=True)
            for k in range(count)
        ]
        try:
            for worker in processes:
                worker.start()
            deadline = time.monotonic() + WAIT_S
            while answers.empty() and not any(worker.exitcode for worker in processes):
                assert time.monotonic() < deadline, f"no answer within {WAIT_S:g} s"
                time.sleep(0.01)
            assert not answers.empty(), f"exit statuses {[worker.exitcode for worker in processes]}"
            answer = answers.get()
            for worker in processes:
                worker.join(WAIT_S)
            assert [worker.exitcode for worker in processes] == [0] * count
            return answer
        finally:
            for worker in processes:
                if worker.is_alive():
                    worker.kill()


def _work(
    rank: int, count: int, store: str, answers: Any, cpu: bool, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if cpu:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    else:
        from processes.far_device import meet

        meet(store, rank)
    answer = body(*arguments)
    if rank == 0:
        answers.put(answer)
    dist.destroy_process_group()
