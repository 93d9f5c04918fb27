"""What may cross between candidate and judge, and the folder of the runs."""
# ruff: noqa: E501  rows of tables

import json
import math
import os
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.sandbox import codec, folder, wire
from marl_ray.sandbox.limits import Limits
from marl_ray.sandbox.official import first_result
from marl_ray.sandbox.seccomp import ARCHES, Filter

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
values = st.recursive(
    hashable | st.sets(hashable, max_size=3) | st.binary().map(bytearray) | st.builds(range, st.integers(-99, 99), st.integers()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(hashable, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("idtsfcrbaxy"), inner, max_size=2),
    max_leaves=12,
)


def types(value: object) -> object:
    if isinstance(value, dict):
        return dict, [(types(key), types(item)) for key, item in value.items()]
    return (type(value), list(map(types, value))) if isinstance(value, (list, tuple)) else type(value)


@given(values)
def test_builtin_values_cross_unchanged(value: object) -> None:
    crossed = codec.unpack(codec.loads(codec.dumps(codec.pack(value))))
    assert crossed == value
    assert types(crossed) == types(value)


def test_what_equality_hides_crosses_too() -> None:
    for value in (-0.0, math.inf, 1 << 20_000, True, "\ud800", 2**63):
        crossed = codec.unpack(codec.loads(codec.dumps(codec.pack(value))))
        assert repr(crossed)[:50] == repr(value)[:50] if isinstance(value, float) else crossed == value
    assert math.isnan(codec.unpack(codec.loads(codec.dumps(codec.pack(math.nan)))))


class Number(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    "value", [Number(1), [Number(1)], {Number(1): 0}, iter([]), len, int, object(), {1: (Number(0),)}]
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(codec.Foreign):
        codec.pack(value)


def test_dictionaries_of_collections_cross_as_plain_ones() -> None:
    for value in (Counter("aab"), defaultdict(int, a=1), OrderedDict(a=1)):
        assert type(codec.unpack(codec.pack(value))) is dict
        assert codec.unpack(codec.pack(value)) == value


def test_depth_and_size_are_bounded() -> None:
    cyclic: list = []
    cyclic.append(cyclic)
    with pytest.raises(wire.Malformed):
        codec.pack(cyclic)
    with pytest.raises(wire.Malformed):
        codec.dumps("x" * (wire.LARGEST_FRAME + 1))
    with pytest.raises(wire.Malformed):
        codec.loads(b"[" * 1_000_000)
    with pytest.raises(wire.Malformed):
        codec.loads(b"9" * 100_000)
    with pytest.raises(wire.Malformed):
        codec.unpack(json.loads("[" * 300 + "]" * 300))


@given(json_values)
def test_decoding_makes_builtin_values_or_says_malformed(value: object) -> None:
    try:
        crossed = codec.unpack(codec.loads(json.dumps(value).encode()))
    except wire.Malformed:
        return
    codec.pack(crossed)


def test_changes_happen_in_place_and_keep_what_is_nested() -> None:
    inner = [1]
    outer = [inner, {"a": inner}]
    codec.restore(outer, [[1, 2], {"b": 3}, 4])
    assert outer == [[1, 2], {"b": 3}, 4]
    assert outer[0] is inner
    seen = {1, 2}
    codec.restore(seen, {3})
    assert seen == {3}


def test_limits_reach_the_server_as_they_are() -> None:
    limits = Limits(wall_s=1.5, cpu_s=0.5, memory_bytes=5, file_bytes=6, open_files=7, stack_bytes=8)
    assert Limits.unpack(limits.pack()) == limits
    assert Limits.unpack(Limits().pack()) == Limits(cpu_s=3.0)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_payloads_come_back(blobs: list[bytes]) -> None:
    fd = wire.payload(*blobs)
    try:
        assert wire.read_payload(fd) == blobs
        with pytest.raises(OSError):
            os.write(fd, b"x")
    finally:
        os.close(fd)


def test_silence_of_the_official_harness_is_a_timeout() -> None:
    assert first_result(b"") == first_result(b"\1\0") == "timed out"
    assert first_result(b"\6\0\0\0\0\0\0\0passed\1") == "passed"


@pytest.mark.parametrize("machine", ARCHES)
@pytest.mark.parametrize("owners", [False, True])
def test_filters_assemble_for_both_architectures(machine: str, owners: bool) -> None:
    assert 100 < len(Filter.of_server(machine)._code) // 8 < 500
    assert 20 < len(Filter.of_run(machine, owners)._code) // 8 < 120  # every run installs it


def test_a_folder_is_emptied_however_it_was_left(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    work = tmp_path / "work"
    (work / "a/b/c").mkdir(parents=True)
    (work / "a/b/file").write_text("x")
    (work / "link").symlink_to(outside)
    (work / "a/up").symlink_to(tmp_path)
    (work / "0.moved").mkdir()
    os.mkfifo(work / "a/pipe")
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(work)
        for _ in range(1500):  # deeper than recursion and longer than a path may be
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.fchdir(here)
        os.close(here)
    (work / "a/b").chmod(0)
    assert folder.is_full(str(work), 1 << 30, 100)
    folder.empty(str(work))
    assert list(work.iterdir()) == []
    assert outside.read_text() == "kept"
    assert not folder.is_full(str(work), 1, 1)
