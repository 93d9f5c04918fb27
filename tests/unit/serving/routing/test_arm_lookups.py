"""Lookups of sessions: none where every table agrees, one for many that ask, and one statement for many sessions."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until_async

from marl_ray.experiments.assignment.rendezvous import Assignment, AssignmentTable, PastTables
from marl_ray.serving.routing import arm_lookups
from marl_ray.serving.routing.arm_lookups import ArmLookups

WEIGHTS = st.fixed_dictionaries({arm: st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0]) for arm in "abc"}).filter(
    lambda weights: any(weights.values())
)


@given(st.lists(WEIGHTS, min_size=1, max_size=6), st.text(min_size=1, max_size=20))
def test_past_tables_agree_where_each_of_them_assigns_the_same_arm(tables, unit):
    arms = {AssignmentTable(weights, "salt", epoch).assign(unit).arm for epoch, weights in enumerate(tables)}
    assert PastTables(tables, "salt").agree(unit) == (len(arms) == 1)


def test_a_ramp_leaves_most_units_where_they_are():
    past = PastTables([{"a": 1 - share, "b": share} for share in (0.01, 0.05, 0.25, 0.25)], "salt")
    assert len(past) == 3
    unmoved_share = sum(past.agree(f"unit-{number}") for number in range(5000)) / 5000
    assert unmoved_share == pytest.approx(1 - 0.24, abs=0.02)
    assert PastTables([{"a": 1, "b": 1}, {"a": 2.0, "b": 2, "c": 0}], "salt").agree("anyone")


async def test_sessions_asked_for_together_share_a_statement_and_nobody_is_asked_for_twice():
    reads: list[list[tuple[str, str]]] = []
    gate = threading.Event()

    def read(keys):
        reads.append(list(keys))
        assert gate.wait(60)
        return {key: Assignment("a", 1, 0.5) for key in keys if key[1] != "new"}

    lookups = ArmLookups(read, threads=1)
    first = [asyncio.create_task(lookups.look_up("e", "s0")) for _ in range(3)]
    await until_async(lambda: reads, "the first statement")
    later = [asyncio.create_task(lookups.look_up("e", name)) for name in ("s1", "s2", "new", "s0", "s2")]
    await asyncio.sleep(0)  # all have asked
    later[0].cancel()  # it leaves, and the others have their answers
    gate.set()
    answers = await asyncio.wait_for(asyncio.gather(*first, *later[1:]), 60)
    lookups.close()
    arms = [answer and answer.arm for answer in answers]
    assert arms == ["a", "a", "a", "a", None, "a", "a"]
    assert [len(keys) for keys in reads] == [1, 3]


async def test_a_failure_reaches_everyone_who_waits_and_the_next_one_asks_anew():
    calls = []

    def read(keys):
        calls.append(keys)
        if len(calls) == 1:
            raise OSError("away")
        return {}

    lookups = ArmLookups(read, threads=1)
    results = await asyncio.gather(*(lookups.look_up("e", "s") for _ in range(2)), return_exceptions=True)
    assert [str(error) for error in results] == ["away", "away"]
    assert await lookups.look_up("e", "s") is None
    lookups.close()


async def test_a_statement_that_hangs_stops_no_other():
    begun, hung = threading.Event(), threading.Event()

    def read(keys):
        if keys[0][1] == "slow":
            begun.set()
            assert hung.wait(60)
        return {}

    lookups = ArmLookups(read, threads=2)
    slow = asyncio.create_task(lookups.look_up("e", "slow"))
    await until_async(begun.is_set, "the slow statement")
    assert await lookups.look_up("e", "quick") is None
    assert not slow.done()
    hung.set()
    await slow
    lookups.close()


async def test_closing_does_not_wait_for_a_lookup_that_hangs(monkeypatch, caplog):
    begun, gate = threading.Event(), threading.Event()

    def read(keys):
        begun.set()
        assert gate.wait(60)
        return {}

    monkeypatch.setattr(arm_lookups, "CLOSE_S", 0.05)
    lookups = ArmLookups(read, threads=1)
    answer = asyncio.create_task(lookups.look_up("e", "s0"))
    await until_async(begun.is_set, "the statement")
    try:
        await asyncio.wait_for(asyncio.to_thread(lookups.close), 30)
    finally:
        gate.set()
    assert caplog.messages == ["a lookup of sessions' arms has not ended within 0.05 s"]
    assert await asyncio.wait_for(answer, 60) is None
