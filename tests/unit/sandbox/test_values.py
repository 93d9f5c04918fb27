"""Values that may cross between candidate and judge, and the folder of the runs."""
# ruff: noqa: E501  rows of tables

import json
import math
import os
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marl_ray.sandbox import codec, wire
from marl_ray.sandbox.confinement import run_folder
from marl_ray.sandbox.confinement.seccomp import ARCHES, Filter
from marl_ray.sandbox.limits import (
    MAX_MEMORY_BYTES,
    MAX_RUN_S,
    MAX_SIZE,
    MIN_MEMORY_BYTES,
    WALL_FACTOR,
    Limits,
    check_memory,
)
from marl_ray.sandbox.server.official import first_result

TAGS = ["g", "x", *codec.VALUE_MAKERS, *codec.VALUE_PARSERS]
hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
values = st.recursive(
    hashable | st.sets(hashable, max_size=3) | st.binary().map(bytearray) | st.builds(range, st.integers(-99, 99), st.integers(-9999, 9999)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(hashable, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(TAGS), inner, max_size=2),
    max_leaves=12,
)


FRAME = 1 << 22


def through(value: object) -> Any:
    """Send a value and return the one that arrives on the other side."""
    return codec.unpack(codec.loads(codec.dumps(codec.pack(value), FRAME)), FRAME)


def types(value: object) -> object:
    if isinstance(value, dict):
        return dict, [(types(key), types(item)) for key, item in value.items()]
    return (type(value), list(map(types, value))) if isinstance(value, (list, tuple)) else type(value)


@given(values)
def test_builtin_values_cross_unchanged(value):
    crossed = through(value)
    assert crossed == value
    assert types(crossed) == types(value)


def test_what_equality_hides_crosses_too():
    for value in (-0.0, math.inf, 1 << 20_000, True, "\ud800", 2**63):
        crossed = through(value)
        assert repr(crossed)[:50] == repr(value)[:50] if isinstance(value, float) else crossed == value
    assert math.isnan(through(math.nan))


class Number(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    "value", [Number(1), [Number(1)], {Number(1): 0}, iter([]), len, Number, object(), {1: (Number(0),)}]
)
def test_anything_else_is_refused(value):
    with pytest.raises(codec.ForeignTypeError):
        codec.pack(value)


class Point(NamedTuple):
    x: int
    y: list[int]


STANDARD = [
    Counter("aab"), defaultdict(int, a=[1]), OrderedDict(b=1, a=2), deque([1, (2,)], maxlen=3), {3: 1}.keys(), {3: [1]}.items(),
    Decimal("1.10"), Fraction(2, 3), datetime(2020, 1, 2, 3, tzinfo=UTC), date(2020, 1, 2), time(3, 4), timedelta(1, 2, 3),
    UUID(int=7), int, type(None), [deque([Counter(a=1)])], {Fraction(1, 2): Decimal(3)},
]  # fmt: skip


@pytest.mark.parametrize("value", STANDARD, ids=repr)
def test_values_of_the_standard_library_cross_as_what_they_are(value):
    crossed = through(value)
    assert crossed == value
    assert type(crossed) is type(value)
    assert repr(crossed) == repr(value)


def test_named_tuples_and_views_cross_with_their_ways():
    crossed = through([Point(1, [2]), {1: [2]}.values()])
    assert (crossed[0].x, crossed[0]._asdict(), crossed[0] == (1, [2])) == (1, {"x": 1, "y": [2]}, True)
    assert [*crossed[1]] == [[2]] and len(crossed[1]) == 1
    for fields in (["x", "x"], ["class"], ["_x"], ["a b"], [1], ["x\uff41", "xa"], "xy"):
        with pytest.raises(wire.MalformedMessageError):
            codec.unpack({"named": ["P", fields, [1, 2]]}, FRAME)
    assert through(defaultdict(lambda: 1, a=1)) == {"a": 1}  # its factory is a function, and stays behind


def test_iterators_cross_where_somebody_says_how():
    assert codec.pack([map(str, [1])], lambda items: [codec.pack(item) for item in items]) == [{"g": ["1"]}]
    assert [*codec.unpack({"g": [1, 2]}, FRAME, iter)] == [1, 2]
    with pytest.raises(wire.MalformedMessageError):
        codec.unpack({"g": [1]}, FRAME)


def test_depth_and_size_are_bounded():
    cyclic: list = []
    cyclic.append(cyclic)
    with pytest.raises(wire.MalformedMessageError):
        codec.pack(cyclic)
    with pytest.raises(wire.MalformedMessageError):
        codec.dumps("x" * FRAME, FRAME)
    with pytest.raises(wire.MalformedMessageError):
        codec.unpack(codec.pack(range(FRAME)), FRAME)
    with pytest.raises(wire.MalformedMessageError):
        codec.unpack(codec.pack(range(1 << 80)), FRAME)
    with pytest.raises(wire.MalformedMessageError):  # the same list a thousand million times
        codec.pack([[[0] * 1000] * 1000] * 1000, max_items=FRAME)
    with pytest.raises(wire.MalformedMessageError):
        codec.loads(b"[" * 1_000_000)
    with pytest.raises(wire.MalformedMessageError):
        codec.loads(b"9" * 100_000)
    with pytest.raises(wire.MalformedMessageError):
        codec.unpack(json.loads("[" * 400 + "]" * 400), FRAME)


def test_the_parser_is_bounded_also_where_tests_have_lifted_the_limits_of_the_interpreter():
    recursion, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    try:
        sys.setrecursionlimit(1 << 30)
        sys.set_int_max_str_digits(0)
        with pytest.raises(wire.MalformedMessageError):
            codec.loads(b"[" * 10_000_000)
        with pytest.raises(wire.MalformedMessageError):
            codec.loads(b"9" * 1_000_000)
        assert (sys.getrecursionlimit(), sys.get_int_max_str_digits()) == (1 << 30, 0)
    finally:
        sys.setrecursionlimit(recursion)
        sys.set_int_max_str_digits(digits)


@given(json_values)
@example({"values": [1]})
def test_decoding_makes_builtin_values_or_says_malformed(value):
    try:
        crossed = codec.unpack(codec.loads(json.dumps(value).encode()), FRAME)
    except wire.MalformedMessageError:
        return
    again = codec.unpack(codec.loads(json.dumps(codec.pack(crossed)).encode()), FRAME)
    assert again == crossed or repr(again) == repr(crossed)  # a view of values equals no other one


def pieces(draw: st.DrawFn) -> bytes:
    """Bytes that look like a frame of values: words of the format, one after another."""
    words = [
        "[",
        "]",
        "{",
        "}",
        ":",
        ",",
        '"',
        "0",
        "-1",
        "1e999",
        "NaN",
        "null",
        '"\\ud800"',
        "9" * 50,
        *(f'"{tag}"' for tag in TAGS),
    ]
    return "".join(draw(st.lists(st.sampled_from(words), max_size=30))).encode()


@given(st.binary(max_size=60) | st.composite(pieces)())
@example(b'{"value":1,"value":2}')
@example(b'{"d":[[NaN,1],[NaN,2]]}')
@example(b'{"r":[0,1,0]}')
@example(b'{"c":[1,"x"]}')
@example(b'{"deque":[[1],-1]}')
@example(b'{"deque":[[1]]}')
@example(b'{"defaultdict":["eval",[]]}')
@example(b'{"type":"object"}')
@example(b'{"named":["P",["x"],[]]}')
@example(b'{"timedelta":[99999999999999]}')
@example(b'{"Decimal":"x"}')
@example(b'{"Fraction":[1,0]}')
@example(b'{"UUID":"\\ud800"}')
@example(b'{"datetime":"2020"}')
@example(b'{"s":[[]]}')
@example(b'{"b":"0"}')
@example(b'{"i":"0x"}')
@example(b"NaN")
def test_whatever_bytes_arrive_become_a_value_or_are_malformed(data):
    try:
        crossed = codec.unpack(codec.loads(data), FRAME)
    except wire.MalformedMessageError:
        return
    again = codec.unpack(codec.loads(json.dumps(codec.pack(crossed)).encode()), FRAME)
    assert again == crossed or repr(again) == repr(crossed)  # NaN is no equal of itself


@given(st.binary(max_size=100) | st.text(max_size=50).map(lambda text: f"passed\0{text}".encode()))
def test_whatever_a_judge_says_is_a_verdict_or_malformed(data):
    try:
        name, message = wire.decode_verdict(data)
    except wire.MalformedMessageError:
        return
    assert name.encode() == data.partition(b"\0")[0]
    assert len(message) <= wire.MAX_MESSAGE_LENGTH


@given(st.text(st.characters(codec=None), max_size=40), st.integers(0, 50))
def test_texts_are_cut_by_their_bytes_between_characters(text, max_bytes):
    short = wire.truncate_to_bytes(text, max_bytes)
    assert len(short.encode()) <= max_bytes
    assert text.encode("utf-8", "backslashreplace").startswith(short.encode())
    assert len(wire.truncate_to_bytes("\U0001f600" * 2000, max_bytes).encode()) > max_bytes - 4


@given(st.binary(max_size=40))
def test_whatever_the_official_pipe_holds_is_a_text(data):
    assert len(data) >= 8 or first_result(data) == "timed out"
    assert first_result(len(data).to_bytes(8, "little") + data) == data.decode("utf-8", "backslashreplace")


def test_changes_happen_in_place_and_keep_what_is_nested():
    inner = [1]
    outer = [inner, {"a": inner}]
    codec.replace_content(outer, [[1, 2], {"b": 3}, 4])
    assert outer == [[1, 2], {"b": 3}, 4]
    assert outer[0] is inner
    seen = {1, 2}
    codec.replace_content(seen, {3})
    assert seen == {3}


def test_limits_reach_the_server_as_they_are():
    limits = Limits(wall_s=1.5, cpu_s=0.5, memory_bytes=5, file_bytes=6, open_files=7, stack_bytes=8, frame_bytes=9)
    assert Limits.unpack(limits.pack()) == limits
    assert Limits.unpack(Limits(cpu_s=2).pack()) == Limits(cpu_s=2, wall_s=2 * WALL_FACTOR)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"cpu_s": math.inf}, "cpu_s=inf, expected seconds, more than 0 and at most 2,097,152"),
        ({"cpu_s": math.nan}, "cpu_s=nan, expected seconds, more than 0 and at most 2,097,152"),
        ({"cpu_s": 0}, "cpu_s=0, expected seconds, more than 0 and at most 2,097,152"),
        ({"cpu_s": 1e6}, "wall_s=4000000.0, expected seconds, more than 0 and at most 2,097,152"),
        ({"wall_s": 1e12}, "wall_s=1000000000000.0, expected seconds, more than 0 and at most 2,097,152"),
        ({"memory_bytes": 1 << 70}, f"memory_bytes={1 << 70}, expected a whole number from 0 to {1 << 62:,}"),
        ({"memory_bytes": 1e9}, f"memory_bytes=1000000000.0, expected a whole number from 0 to {1 << 62:,}"),
        ({"output_bytes": -1}, f"output_bytes=-1, expected a whole number from 0 to {1 << 62:,}"),
        ({"file_bytes": -1}, f"file_bytes=-1, expected a whole number from 0 to {1 << 62:,}"),
        ({"open_files": 6.5}, f"open_files=6.5, expected a whole number from 0 to {1 << 62:,}"),
        ({"stack_bytes": 1 << 63}, f"stack_bytes={1 << 63}, expected a whole number from 0 to {1 << 62:,}"),
        ({"frame_bytes": "1"}, f"frame_bytes='1', expected a whole number from 0 to {1 << 62:,}"),
    ],
)
def test_limits_that_no_run_can_have_are_refused_by_name(limits, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Limits(**limits)


def test_the_largest_limits_reach_the_server_too():
    sizes = dict.fromkeys(("memory_bytes", "file_bytes", "open_files", "stack_bytes", "frame_bytes"), MAX_SIZE)
    largest = Limits(cpu_s=MAX_RUN_S, wall_s=MAX_RUN_S, **sizes)
    assert Limits.unpack(largest.pack()) == largest


@pytest.mark.parametrize("value", [MIN_MEMORY_BYTES, 1 << 30, MAX_MEMORY_BYTES])
def test_the_memory_that_a_user_may_set(value):
    check_memory("memory_bytes", value)


@pytest.mark.parametrize(
    "value", [0, MIN_MEMORY_BYTES - 1, MAX_MEMORY_BYTES + 1, 1 << 70, 2.5e9, math.inf, math.nan, True, "1073741824"]
)
def test_other_memory_is_refused_by_name(value):
    message = (
        f"memory_bytes={value!r}, expected a whole number of bytes, at least 64 MiB (67,108,864) and at most 256 TiB "
        "(281,474,976,710,656)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_memory("memory_bytes", value)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_payloads_come_back(blobs):
    fd = wire.create_payload(*blobs)
    try:
        assert wire.read_payload(fd) == blobs
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
    finally:
        os.close(fd)


def test_silence_of_the_official_harness_is_a_timeout():
    assert first_result(b"") == first_result(b"\1\0") == "timed out"
    assert first_result(b"\6\0\0\0\0\0\0\0passed\1") == "passed"


@pytest.mark.parametrize("machine", ARCHES)
@pytest.mark.parametrize("owners", [False, True])
def test_filters_assemble_for_both_architectures(machine, owners):
    assert 100 < len(Filter.of_server(machine, owners)) < 500
    assert 20 < len(Filter.of_run(machine, owners, owners)) < 120  # every run installs it


def test_what_cannot_be_removed_in_time_is_replaced_or_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "REMOVE_S", -1.0)
    mounted, replaced = tmp_path / "mounted", []
    mounted.mkdir(0o700)
    folder = run_folder.MountedFolder(str(mounted), lambda: replaced.append(True))
    assert not folder.renew() and not replaced
    (mounted / "left").mkdir()
    assert folder.renew() and replaced
    numbered = run_folder.NumberedFolders(str(tmp_path), None)
    first = Path(numbered.path)
    assert not numbered.renew() and numbered.path == str(first)
    (first / "left").mkdir()
    first.chmod(0)
    assert not numbered.renew()  # rules about the parent hold for the next folder too
    assert numbered.path != str(first) and not first.exists() and os.listdir(numbered.path) == []
    assert os.stat(numbered.parent).st_mode & 0o777 == 0o100
    monkeypatch.setattr(run_folder, "REMOVE_S", 2.0)
    second = numbered.path
    Path(second, "left").touch()
    assert not numbered.renew() and numbered.path != second
    assert os.listdir(tmp_path / "aside") == []


def test_a_folder_is_emptied_however_it_was_left(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    work = tmp_path / "work"
    (work / "a/b/c").mkdir(parents=True)
    (work / "a/b/file").write_text("x")
    (work / "link").symlink_to(outside)
    (work / "a/up").symlink_to(tmp_path)
    (work / "0.moved").mkdir()
    os.mkfifo(work / "a/pipe")
    current = os.open(".", os.O_RDONLY)
    try:
        os.chdir(work)
        for _ in range(1500):  # deeper than recursion and longer than a path may be
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.fchdir(current)
        os.close(current)
    (work / "a/b").chmod(0)
    assert run_folder.is_full(str(work), 1 << 30, 100)
    run_folder.empty(str(work))
    assert list(work.iterdir()) == []
    assert outside.read_text() == "kept"
    assert not run_folder.is_full(str(work), 1, 1)
