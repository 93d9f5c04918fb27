"""Several Ray nodes on this machine: work is spread over them, and a node that is killed is lost."""

import itertools
import os
import subprocess
import sys

import psutil
import pytest
from processes.command_line import PROGRAM
from processes.environment import without_ray

from marl_ray.cluster.local_nodes import local_cluster
from marl_ray.errors import MarlRayError

SCRIPT = """
import time, ray
from marl_ray.cluster.local_nodes import local_cluster

with local_cluster(3, 1) as cluster:
    @ray.remote(num_cpus=1, max_retries=3)
    def where(seconds):
        time.sleep(seconds)
        return ray.get_runtime_context().get_node_id()
    spread = set(ray.get([where.remote(1) for _ in range(3)], timeout=60))
    cluster.nodes[0].kill()
    end = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) > 2 and time.monotonic() < end:
        time.sleep(0.2)
    alive = sum(node["Alive"] for node in ray.nodes())
    left = set(ray.get([where.remote(0.5) for _ in range(4)], timeout=60))
    print()
    print(len(spread), alive, len(left), cluster.head.temp_dir)
"""


@pytest.mark.slow
def test_work_is_spread_and_a_killed_node_is_lost():
    """In its own process: this one may have a Ray already."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=without_ray(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.count(" ") == 3 and line[0].isdigit())
    *counts, folder = line.split()
    assert counts[0] == "3" and counts[1] == "2" and counts[2] in ("1", "2")
    assert not os.path.exists(folder)
    assert not [process for process in psutil.process_iter() if folder in " ".join(_command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.mark.slow
def test_the_command_says_how_to_use_it_and_leaves_nothing():
    process = subprocess.Popen(
        [PROGRAM, "cluster", "local", "--nodes", "2", "--cpus", "1"],
        env=without_ray(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout
    # Of a command that hangs, pytest's own limit ends the test: reading from a pipe has no deadline.
    lines = [*itertools.takewhile(lambda line: not line.startswith("running"), iter(output.readline, ""))]
    assert lines[0].startswith("2 nodes of 1 CPUs") and lines[1].startswith("export RAY_ADDRESS=127.0.0.1:")
    assert "RAY_API_SERVER_ADDRESS=http://127.0.0.1:" in lines[1]
    commands = [_command(child) for child in psutil.Process(process.pid).children(recursive=True)]
    raylets = [command for command in commands if command and command[0].endswith("raylet/raylet")]
    # In a shared folder a node deletes the working directory of a job of the other one.
    assert len({part for command in raylets for part in command if part.startswith("--temp_dir=")}) == 2
    node = int(lines[2].split()[-1])
    process.send_signal(2)
    assert process.wait(120) == 0
    assert not psutil.pid_exists(node)


def test_a_cluster_has_a_node():
    with pytest.raises(MarlRayError, match="--nodes 0: expected 1 or more"), local_cluster(0, 1):
        pass
