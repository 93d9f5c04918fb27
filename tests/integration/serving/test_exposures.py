"""Exposures on their way to a real SQLite database: that goes away by losing its table, or hangs by being locked."""

import logging
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields

import orjson
import pytest
from waiting import until

from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.store.facade import Stores, open_stores
from marl_ray.experiments.store.units import Exposure
from marl_ray.serving.logs.exposures import ExposureLog, read_exposure
from marl_ray.serving.logs.spool import Spool

LIMIT = 10_000_000
REPLICA = """
import sys, time
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.units import Exposure
from marl_ray.serving.logs.exposures import ExposureLog
from marl_ray.serving.logs.spool import Spool
log = ExposureLog(open_stores(sys.argv[1]).units, Spool(sys.argv[2], 10_000_000))
log.start()
for i in range(500):
    log.put(Exposure("exp", f"u{i}", Assignment("ab"[i % 2], 1, 0.5), 1.0))
print("ready", flush=True)
while log.waiting or not log.spool.size:
    time.sleep(0.01)
print("on disk", flush=True)
sys.stdin.read()
"""


def exposure(i: int) -> Exposure:
    return Exposure("exp", f"u{i}", Assignment("ab"[i % 2], 1, 0.5), 1.0)


def count_stored(stores: Stores) -> int:
    return sum(arm.exposures for arm in stores.evidence.summary("exp").values())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "experiments.db"


@pytest.fixture
def url(path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def stores(url):
    stores = open_stores(url)
    stores.experiments.open("exp", {"salt": "s", "arms": {a: {"digest": a, "weight": 1} for a in "ab"}})
    yield stores
    stores.close()


@pytest.fixture
def spool(tmp_path) -> Spool:
    return Spool(str(tmp_path / "spool"), LIMIT)


@pytest.fixture
def segments(tmp_path) -> Callable[[], list]:
    return lambda: sorted((tmp_path / "spool").glob("*"))


def rename(path, old: str, new: str) -> None:
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    connection.execute(f"ALTER TABLE {old} RENAME TO {new}")
    connection.close()


@contextmanager
def away(path):
    """The database fails every write of exposures."""
    rename(path, "exposures", "hidden")
    try:
        yield
    finally:
        rename(path, "hidden", "exposures")


@contextmanager
def hanging(path):
    """Every write to the database waits."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


@pytest.mark.parametrize("trouble", [away, hanging])
def test_an_outage_puts_exposures_on_disk_and_its_end_delivers_them(stores, spool, path, segments, trouble):
    log = ExposureLog(stores.units, spool)
    log.start()
    with trouble(path):
        for i in range(2500):
            assert log.put(exposure(i))
        until(lambda: not log.waiting and log.spool.size > 0, "all exposures on disk")
        assert segments()
    until(lambda: count_stored(stores) == 2500, "2500 exposures in the database")
    until(lambda: not segments(), "the end of the segments")
    log.put(exposure(2500))
    until(lambda: count_stored(stores) == 2501, "one more exposure in the database")
    log.close()
    assert (log.dropped, log.rejected, log.spool.size) == (0, 0, 0)


def test_flush_fails_while_the_database_is_away_and_then_delivers_all(stores, spool, path):
    log = ExposureLog(stores.units, spool)
    with away(path):
        log.put(exposure(0))
        with pytest.raises(StoreError):
            log.flush()
        log.spill()
        log.put(exposure(1))
        with pytest.raises(StoreError):
            log.flush()
        assert (log.waiting, log.spool.size > 0) == (1, True)
    log.flush()
    assert (count_stored(stores), log.waiting, log.spool.size) == (2, 0, 0)
    log.close()


def test_a_killed_replicas_exposures_are_delivered_by_the_next(stores, spool, url, path, tmp_path, segments):
    with away(path):
        # It opens the database as it is, hence without migrations to do.
        replica = subprocess.Popen(
            [sys.executable, "-c", REPLICA, url, str(tmp_path / "spool")], stdin=-1, stdout=-1, text=True
        )
        assert [replica.stdout.readline() for _ in range(2)] == ["ready\n", "on disk\n"]
        replica.send_signal(signal.SIGKILL)
        replica.communicate()
        assert len(segments()) == 1
    log = ExposureLog(stores.units, spool)
    log.start()
    until(lambda: count_stored(stores) == 500, "500 exposures in the database")
    until(lambda: not segments(), "the end of the segments")
    log.close()
    assert stores.units.assignment("exp", "u7") == Assignment("b", 1, 0.5)


def test_closing_during_an_outage_leaves_all_on_disk(stores, spool, path, tmp_path):
    log = ExposureLog(stores.units, spool)
    with away(path):
        log.start()
        for i in range(10):
            log.put(exposure(i))
        log.close()
    assert count_stored(stores) == 0
    after = ExposureLog(stores.units, Spool(str(tmp_path / "spool"), LIMIT))
    after.start()
    until(lambda: count_stored(stores) == 10, "ten exposures in the database")
    after.close()


def test_a_full_spool_keeps_the_rest_in_memory_and_a_full_memory_drops(stores, path, tmp_path):
    line = len(orjson.dumps(exposure(0))) + 1
    log = ExposureLog(stores.units, Spool(str(tmp_path / "spool"), 5 * line), capacity=3)
    log.start()
    with away(path):
        for i in range(9):  # one at a time: these go to disk as long as it has room
            log.put(exposure(i))
            until(lambda i=i: not log.waiting or i >= 5, f"exposure {i} on disk")
        assert (log.waiting, log.dropped) == (3, 1)
        assert not log.put(exposure(9))
    until(lambda: count_stored(stores) == 8, "eight exposures in the database")
    log.close()
    assert log.dropped == 2


def test_lines_that_cannot_be_read_are_counted_and_the_others_delivered(stores, tmp_path, caplog):
    lines = [orjson.dumps(exposure(i)) for i in range(4)]
    lines[1] = lines[1].replace(b'"epoch":1', b'"epoch":"x"')
    content = b"\n".join([lines[0], b"\xff\x00", lines[1], b"[]", lines[2], lines[3][:20]])
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "exposures-1-ab.jsonl").write_bytes(content)
    log = ExposureLog(stores.units, Spool(str(tmp_path / "spool"), LIMIT))
    with caplog.at_level(logging.ERROR):
        log.start()
        until(lambda: log.rejected == 3, "three lines that are rejected")
        log.close()
    assert (count_stored(stores), log.rejected) == (2, 3)
    assert "3 unreadable lines" in caplog.text


def test_what_the_database_never_takes_does_not_hold_up_the_rest(stores, spool):
    log = ExposureLog(stores.units, spool)
    for i in range(50):
        log.put(exposure(i) if i != 20 else Exposure("no such experiment", "u", Assignment("a", 1, 0.5), 1.0))
    log.flush()
    log.close()
    assert (count_stored(stores), log.rejected) == (49, 1)


def test_flush_covers_everything_put_before_it_while_others_write_and_spill(stores, spool):
    log = ExposureLog(stores.units, spool)
    log.start()
    for i in range(300):
        log.put(exposure(i))
        if i % 3 == 0:
            log.spill()
        if i % 10 == 0:
            log.flush()
            assert stores.units.assignment("exp", f"u{i}") is not None
    log.close()
    assert count_stored(stores) == 300


def test_every_field_of_an_exposure_survives_the_disk(stores, spool):
    log = ExposureLog(stores.units, spool)
    more = {"cluster": "match-1"} if "cluster" in {field.name for field in fields(Exposure)} else {}
    odd = Exposure("exp", 'ü "\\ 😀', Assignment("a", 3, 0.1), 1.25, **more)
    log.put(odd)
    log.spill()
    assert [read_exposure(line) for line in spool.peek().lines] == [odd]
    log.close()
    assert stores.units.assignment("exp", odd.unit) == odd.assignment
