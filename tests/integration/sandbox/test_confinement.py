"""Attacks on the host and on other jobs: what a program must not reach, use up or leave behind."""

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hostile import confinement_attacks
from hostile.attacks import LATEST_S, RIGHT, TESTS, UNHARMED
from hostile.confinement_attacks import RUNS
from hostile.programs import descendants
from waiting import until

if TYPE_CHECKING:
    from marl_ray.sandbox import Pool

ATTACKS = confinement_attacks.__file__


def test_hostile_scripts_end_with_their_status(results):
    unexpected = []
    for number, name, _, allowed in RUNS:
        status, error, out, err = results["runs"][f"{number} {name}"]
        if status not in allowed or max(out, err) > 1 << 16:
            unexpected.append((number, name, status, error, out, err))
    assert unexpected == []


def test_what_a_program_must_not_do_is_refused(results):
    for name, (status, output) in results["refused"].items():
        assert "SUCCEEDED" not in output and "hidden" not in output, (name, output)
        assert status == "crash" or "refused" in output, (name, status, output)


def test_the_next_job_is_unharmed(results):
    assert {name: job for name, job in results["unharmed"].items() if job != UNHARMED} == {}


def test_attacks_end_with_their_limit(results):
    assert {name: late for name, late in results["late"].items() if late > LATEST_S} == {}
    for name, (status, cpu_s) in results["cpu"].items():
        assert status == "timeout" and 0.6 <= cpu_s <= 1.1, (name, status, cpu_s)


def test_nothing_is_left_behind(results):
    assert results["left"] == []


def descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:  # another user's eyes are not wanted there
        return 0


def count_resources(pool: "Pool") -> list[list[int]]:
    """Numbers of the pool's processes, of their descendants, of the descriptors of each, and of each worker's files."""
    processes = [pid for worker in pool.workers for pid in worker.pids]
    below = [pid for process in processes for pid in descendants(process)]
    files = [sum(len(files) for _, _, files in os.walk(worker.folder)) for worker in pool.workers]
    return [[len(processes)], [len(below)], [descriptors(pid) for pid in (os.getpid(), *processes, *below)], files]


def count_at_rest(pool: "Pool") -> list[list[int]]:
    """The resources once two readings in a row are equal: a run that has answered may still be ending."""
    readings: list[list[list[int]] | None] = [None]

    def has_settled() -> bool:
        try:
            readings.append(count_resources(pool))
        except FileNotFoundError:  # a process ended while it was read
            readings.append(None)
        return readings[-1] is not None and readings[-1] == readings[-2]

    until(has_settled, "two equal readings of the pool's resources")
    resources = readings[-1]
    assert resources is not None
    return resources


def count_again(pool: "Pool", before: list[list[int]]) -> list[list[int]]:
    """The resources as soon as they are those of `before`; after 30 seconds, whatever they are."""
    deadline = time.monotonic() + 30
    while (resources := count_at_rest(pool)) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return resources


def run_honest_job(pool: "Pool", number: int) -> bool:
    """One of three honest jobs."""
    if number % 3 == 0:
        return pool.judge(RIGHT, TESTS, entry_point="add").passed
    if number % 3 == 1:
        return pool.run("open('f', 'w').write('x')\nprint(1)").stdout == b"1\n"
    return pool.official("import os\nopen('f', 'w')\nassert True") == "passed"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_runs_leak_nothing():
    from concurrent.futures import ThreadPoolExecutor

    from marl_ray.sandbox import Pool

    with Pool(workers=2) as pool, ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda number: run_honest_job(pool, number), range(60)))
        before = count_at_rest(pool)
        assert all(threads.map(lambda number: run_honest_job(pool, number), range(10_000)))
        assert count_again(pool, before) == before
        assert pool.run("import os\nprint(os.listdir())").stdout == b"[]\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_jobs_at_once_all_get_their_answer():
    """Family 30: every job waits in its own thread."""
    from marl_ray.sandbox import Pool

    right: list[int] = []

    def job(number: int) -> None:
        if run_honest_job(pool, number):
            right.append(number)

    size = threading.stack_size(256 << 10)
    try:
        with Pool(workers=2) as pool:
            assert all(run_honest_job(pool, number) for number in range(60))
            before = count_at_rest(pool)
            threads = [threading.Thread(target=job, args=(number,)) for number in range(10_000)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(right) == 10_000
            assert count_again(pool, before) == before
    finally:
        threading.stack_size(size)
