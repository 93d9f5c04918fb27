"""Nothing survives a run: whatever a program does, worker and host are afterwards as they were before."""

import json
import random
import sys
from typing import Any

from hostile.attacks import RIGHT, TESTS
from hostile.programs import PROBE, candidate, hostile, known_programs, state

EXAMPLES = 25


def find_changes(pool: Any, program: str, shared: str, before: dict, world: bytes, limits: Any) -> str:
    """The things that a hostile program changed, run as a script, as a candidate and in official mode; empty if none."""
    pool.run(program, limits=limits)
    pool.judge(candidate(program), TESTS, entry_point="add", limits=limits)
    pool.official(program, limits)
    seen = pool.run(PROBE)
    if seen.stdout != world or seen.returncode:
        return f"the next program's world: {seen.stdout!r} {seen.stderr!r}"
    if not pool.judge(RIGHT, TESTS, entry_point="add").passed:
        return "the next verdict"
    after = state(pool, shared)
    return "; ".join(f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key])


def ready(pool: Any) -> bytes:
    """The world of an honest program, once everything has been used."""
    for _ in range(3):
        pool.judge(RIGHT, TESTS, entry_point="add")
        pool.official("assert True")
        world = pool.run(PROBE)
    assert world.returncode == 0, world.stderr
    return world.stdout


def attack(max_level: str, shared: str) -> list[list[str]]:
    """Programs that changed something, in a pool of one worker. Below PATHS they would reach the files of this host."""
    from marl_ray.sandbox import Level, Limits, Pool

    assert Level[max_level] >= Level.PATHS
    limits = Limits(cpu_s=0.2, wall_s=0.4, memory_bytes=256 << 20)
    traces = []
    with Pool(workers=1, max_level=Level[max_level]) as pool:
        assert pool.level >= Level.PATHS
        world = ready(pool)
        for program in (*known_programs(shared), *(hostile(random.Random(seed), shared) for seed in range(EXAMPLES))):
            before = state(pool, shared)
            changed = find_changes(pool, program, shared, before, world, limits)
            if changed:
                traces.append([program, changed])
    return traces


if __name__ == "__main__":
    print(json.dumps(attack(sys.argv[1], sys.argv[3])))
    sys.exit()

import pytest  # noqa: E402  the process of the attacks has none

ATTACKS = __file__


def test_worker_and_host_are_as_before_after_hostile_programs(results):
    assert results == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", ["PATHS", "NAMESPACES"])
def test_worker_and_host_are_as_before_after_any_hostile_program(level, tmp_path):
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from marl_ray.sandbox import Level, Limits, Pool

    shared = tmp_path / "shared"
    shared.write_text("x")
    limits = Limits(cpu_s=0.2, wall_s=0.4, memory_bytes=256 << 20)
    with Pool(workers=1, max_level=Level[level]) as pool:
        world = ready(pool)

        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(st.randoms())
        def check(chance: random.Random) -> None:
            before = state(pool, str(shared))
            assert find_changes(pool, hostile(chance, str(shared)), str(shared), before, world, limits) == ""

        check()
