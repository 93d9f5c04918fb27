"""Starts several Ray nodes as processes of this machine, for tests of scheduling and of nodes that are lost."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from marl_ray.cluster.local_ray import EXIT_S, LocalRay, local_ray
from marl_ray.errors import MarlRayError

START_S = 120.0
"""Maximum seconds for the nodes to join."""
POLL_S = 0.2
"""Seconds between two counts of the nodes that have joined."""
OBJECT_STORE_BYTES = 128 << 20
"""Bytes of a node's object store, so that several fit into the memory of one machine."""
JOIN_PROGRAM = "from marl_ray.ray_seams import join_loopback; join_loopback()"
NODE_LABEL = "marl-ray-node"
"""Ray label of the nodes, 1 and up; the head has none."""


@dataclass(frozen=True)
class LocalCluster:
    """A head and its nodes."""

    head: LocalRay
    nodes: tuple["subprocess.Popen[bytes]", ...]
    """The process of each node besides the head: to kill one is to lose it."""


@contextmanager
def local_cluster(nodes: int, cpus: int) -> Iterator[LocalCluster]:
    """Start `nodes` Ray nodes of `cpus` logical CPUs each, the head among them, which end with the block.

    Raises MarlRayError if not all join in time, with the end of a log.
    """
    if nodes < 1:
        raise MarlRayError(f"--nodes {nodes}: expected 1 or more")
    with local_ray(num_cpus=cpus, log_monitor=True) as head:
        processes = tuple(_start_node(head, number, cpus) for number in range(1, nodes))
        try:
            _wait_for_nodes(nodes, processes, head.temp_dir)
            yield LocalCluster(head, processes)
        finally:
            for process in processes:
                process.kill()  # what it has started ends with the head's processes
            for process in processes:
                process.wait(EXIT_S)


def _start_node(head: LocalRay, number: int, cpus: int) -> "subprocess.Popen[bytes]":
    command = [
        *(sys.executable, "-c", JOIN_PROGRAM, "start", "--block", "--disable-usage-stats"),
        *("--address", head.address, "--node-ip-address", "127.0.0.1", "--num-cpus", str(cpus)),
        *("--dashboard-agent-listen-port", "0", "--object-store-memory", str(OBJECT_STORE_BYTES)),
        *("--labels", f"{NODE_LABEL}={number}"),
        # In a shared folder a node deletes the working directories of jobs that run on other nodes.
        *("--temp-dir", str(head.temp_dir / str(number))),
    ]
    with _log_path(head.temp_dir, number).open("wb") as log:
        # A session of its own: Ctrl-C is for whoever has started the nodes, who ends them.
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def _wait_for_nodes(nodes: int, processes: tuple["subprocess.Popen[bytes]", ...], folder: Path) -> None:
    """Wait until all nodes have joined. Raises MarlRayError after START_S, or as soon as one ends."""
    import ray

    end = time.monotonic() + START_S
    while (joined := sum(node["Alive"] for node in ray.nodes())) < nodes:
        for number, process in enumerate(processes, 1):
            if (status := process.poll()) is not None:
                failure = f"node {number} has ended with status {status}"
                raise MarlRayError(f"local cluster: {failure}; its log ends: {_last_line(folder, number)}")
        if time.monotonic() > end:
            failure = f"{joined} of {nodes} nodes have joined in {START_S:g} s"
            last_line = _last_line(folder, len(processes))
            raise MarlRayError(f"local cluster: {failure}; the log of node {len(processes)} ends: {last_line}")
        time.sleep(POLL_S)


def _last_line(folder: Path, number: int) -> str:
    lines = _log_path(folder, number).read_text(errors="replace").strip().splitlines()
    return " ".join(lines[-1].split()) if lines else "nothing"


def _log_path(folder: Path, number: int) -> Path:
    return folder / f"node-{number}.log"
