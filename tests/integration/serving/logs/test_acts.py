"""The act log: what was put is read back, whatever becomes of the process, the disk or the bucket."""

import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from marl_ray.errors import MarlRayError
from marl_ray.serving.logs import acts
from marl_ray.serving.logs.act_reader import read_logged, sorted_by_unit
from marl_ray.serving.logs.acts import ActLog, LoggedAct

WRITER = """
import sys, time
from pathlib import Path
from marl_ray.serving.logs.acts import LoggedAct, ActLog
log = ActLog(sys.argv[1], sys.argv[2] or None)
log.start()
for i in range(100):
    log.put(LoggedAct("exp", f"u{i % 7}", "a", "d", 1, 0.5, float(i), False, {"x": [i]}, {"x": 1}, {"x": -0.5}))
folder = Path(sys.argv[2] or sys.argv[1])
while log.waiting or not any(path.stat().st_size for path in folder.rglob("*.partial")):
    time.sleep(0.01)
print("written", flush=True)
sys.stdin.read()
"""


def decision(i: int, unit: str = "u", experiment: str = "exp") -> LoggedAct:
    seen = {"a": [i, 0.5], "b": [[1, 2], [3, i]]}
    return LoggedAct(
        experiment, unit, "arm", "digest", 1, 0.25, float(i), False, seen, {"a": 1, "b": [0.5]}, {"a": -1.0, "b": -2.0}
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[2] for path in folder.rglob("decisions-*"))


def fill(folder: str, decisions: list[LoggedAct], **more) -> ActLog:
    log = ActLog(folder, **more)
    log.start()
    assert all(log.put(act) for act in decisions)
    log.close()
    return log


def test_decisions_of_several_logs_come_back_by_unit_and_time(tmp_path):
    made = [decision(i, f"u{i % 3}") for i in range(90)]
    made[7] = replace(made[7], masks={"a": [0, 1, 1]}, greedy=True)
    order = np.random.default_rng(0).permutation(90)
    for part in np.split(order, 3):
        fill(str(tmp_path), [made[i] for i in part])
    fill(str(tmp_path), [decision(0, experiment="other")])
    assert names(tmp_path) == ["jsonl.zst"] * 4
    assert list(read_logged(str(tmp_path), "exp")) == sorted(made, key=lambda act: (act.unit, act.at))
    assert list(read_logged(str(tmp_path), "none")) == []


def test_segments_end_by_size(tmp_path):
    log = ActLog(str(tmp_path), segment_bytes=1000)
    log.start()
    log.put(decision(0))
    until(lambda: names(tmp_path) == ["jsonl.partial"], "the first segment")
    for i in range(1, 10):
        log.put(decision(i))
    until(lambda: names(tmp_path) == ["jsonl.zst"], "the end of the segment")
    log.close()
    assert [act.at for act in read_logged(str(tmp_path), "exp")] == list(range(10))
    assert log.dropped == 0


def test_segments_end_by_age(tmp_path):
    log = ActLog(str(tmp_path), segment_s=0.0)
    log.start()
    for number in range(2):
        log.put(decision(number))
        until(lambda segments=number + 1: names(tmp_path) == ["jsonl.zst"] * segments, f"the end of segment {number}")
    log.close()
    assert [act.at for act in read_logged(str(tmp_path), "exp")] == [0, 1]


def test_putting_never_waits_and_counts_what_it_drops(tmp_path):
    log = ActLog(str(tmp_path), capacity=3)  # not started: nobody writes
    assert [log.put(decision(i)) for i in range(5)] == [True] * 3 + [False] * 2
    assert (log.waiting, log.dropped) == (3, 2)
    log.close()
    assert len(list(read_logged(str(tmp_path), "exp"))) == 3


def test_what_cannot_be_written_is_dropped_and_the_rest_goes_on(tmp_path):
    made = [decision(0), replace(decision(1), actions={"a": object()}), decision(2, experiment="../up"), decision(3)]
    made.append(replace(decision(4), actions={"a": np.array([1, 2])}))
    log = fill(str(tmp_path / "log"), made)
    assert log.dropped == 2
    assert [act.at for act in read_logged(str(tmp_path / "log"), "exp")] == [0, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_killed_process_leaves_a_readable_segment_which_the_next_completes(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, ""], stdin=-1, stdout=-1, text=True)
    assert writer.stdout.readline() == "written\n"
    fill(str(tmp_path), [decision(1000, "z")])
    assert names(tmp_path) == ["jsonl.partial", "jsonl.zst"]  # its owner lives
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    (partial,) = tmp_path.rglob("*.partial")
    with partial.open("ab") as file:
        file.write(b'{"experiment":"exp","unit":"u1"')
    expected = [*sorted((f"u{i % 7}", i) for i in range(100)), ("z", 1000)]
    assert [(act.unit, act.at) for act in read_logged(str(tmp_path), "exp")] == expected
    fill(str(tmp_path), [])
    assert names(tmp_path) == ["jsonl.zst"] * 2
    assert [(act.unit, act.at) for act in read_logged(str(tmp_path), "exp")] == expected


def test_what_a_process_left_for_one_uri_is_not_uploaded_to_another(tmp_path):
    first, other, staging = f"file://{tmp_path}/one", f"file://{tmp_path}/other", str(tmp_path / "staging")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, first, staging], stdin=-1, stdout=-1, text=True)
    assert writer.stdout.readline() == "written\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    fill(other, [decision(0)], staging=staging)
    assert len(list(read_logged(other, "exp"))) == 1
    fill(first, [decision(0)], staging=staging)
    assert len(list(read_logged(first, "exp"))) == 101


def test_what_is_nested_as_deeply_as_requests_may_be_is_read_again(tmp_path):
    nested: dict = {}
    for _ in range(245):
        nested = {"a": nested}
    made = [replace(decision(0), observations={"x": nested}), decision(1)]
    fill(str(tmp_path), made)
    assert list(read_logged(str(tmp_path), "exp")) == made


def test_a_segment_that_was_completed_but_not_yet_removed_counts_once(tmp_path):
    fill(str(tmp_path), [decision(i) for i in range(3)])
    (complete,) = tmp_path.rglob("*.zst")
    complete.with_name(complete.name.replace(".jsonl.zst", ".jsonl.partial")).write_bytes(
        orjson.dumps(decision(0)) + b"\n"
    )
    assert len(list(read_logged(str(tmp_path), "exp"))) == 3
    (complete.parent / "decisions-1-x.jsonl.zst.tmp").write_bytes(b"half")
    assert len(list(read_logged(str(tmp_path), "exp"))) == 3


def test_segments_wait_while_their_place_is_away_and_a_bound_drops(tmp_path, monkeypatch):
    monkeypatch.setattr(acts, "RETRY_S", 0.05)
    monkeypatch.setattr(acts, "WRITE_INTERVAL_S", 0.02)
    blocked = tmp_path / "bucket"
    blocked.write_text("a file where the folder should be")
    uri, staging = f"file://{blocked}/prefix", tmp_path / "staging"
    log = ActLog(uri, str(staging), segment_bytes=1, limit_bytes=1000)
    log.start()
    for i in range(20):
        log.put(decision(i))
        until(lambda: not log.waiting, f"act {i} to leave memory")
    until(lambda: log.dropped > 0, "an act that is dropped")
    log.put(decision(20))
    until(lambda: not log.waiting, "the last act to leave memory")
    assert names(staging) != []
    blocked.unlink()
    until(lambda: names(staging) == [], "all segments to be delivered")
    log.put(decision(21))
    log.close()
    times = [act.at for act in read_logged(uri, "exp")]
    assert times[-1] == 21
    assert len(times) == 22 - log.dropped


def test_what_a_killed_process_had_staged_is_uploaded_by_the_next(tmp_path):
    uri, staging = f"file://{tmp_path}/bucket", tmp_path / "staging"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, uri, staging], stdin=-1, stdout=-1, text=True)
    assert writer.stdout.readline() == "written\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert list(read_logged(uri, "exp")) == []
    fill(uri, [], staging=str(staging))
    assert len(list(read_logged(uri, "exp"))) == 100
    assert names(staging) == []


def test_unreadable_lines_are_left_out_and_unreadable_segments_are_named(tmp_path, caplog):
    fill(str(tmp_path), [decision(0)])
    good = orjson.dumps(decision(1))
    (tmp_path / "exp" / "decisions-1-a.jsonl.partial").write_bytes(b"{}\n" + good + b"\n\xff\n" + good[:30])
    assert len(list(read_logged(str(tmp_path), "exp"))) == 2
    assert "2 unreadable lines" in caplog.text
    (tmp_path / "exp" / "decisions-1-b.jsonl.zst").write_bytes(b"not compressed")
    with pytest.raises(MarlRayError, match=r"decisions: .* cannot be read"):
        list(read_logged(str(tmp_path), "exp"))


@pytest.mark.parametrize("folder", ["{}/file/x", "nope://bucket/x"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(MarlRayError, match=r"^decision_log: ") as caught:
        ActLog(folder.format(tmp_path))
    assert "\n" not in str(caught.value)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.text(max_size=3), st.floats(0, 9)), max_size=60), st.integers(1, 5000))
def test_sorting_on_disk_is_sorting(rows, run_bytes):
    def parse(line: bytes) -> tuple[str, float, tuple[str, float]]:
        unit, at = orjson.loads(line)
        return unit, at, (unit, at)

    ordered = sorted_by_unit((orjson.dumps(row) for row in rows), parse, run_bytes)
    assert list(ordered) == sorted(rows)


def test_sorting_needs_the_memory_of_one_run():
    def parse(line: bytes) -> tuple[str, float, int]:
        return line.decode(), 0.0, len(line)

    lines = (b"%0400d" % (i * 7919 % 20_000) for i in range(20_000))  # 8 MB
    tracemalloc.start()
    assert sum(sorted_by_unit(lines, parse, run_bytes=500_000)) == 8_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000
