"""Lines of a log that is read over several connections: each comes once, in order."""

from hypothesis import given
from hypothesis import strategies as st

from marl_ray.cluster.kuberay.client.logs import SentLines


def second_of(line: str) -> str:
    return line[:19]


def read(log: list[str], cuts: list[int]) -> list[str]:
    """Read a log over connections, of which each but the last is lost after so many lines."""
    sent, texts = SentLines(), list[str]()
    for cut in [*cuts, len(log)]:
        begin = sent.since
        sent.begin_connection()
        again = [line for line in log if not begin or second_of(line) + "Z" >= begin]
        texts += [text for line in again[:cut] if (text := sent.new_text(line)) is not None]
    return texts


def test_lines_of_one_stamp_and_of_an_earlier_one_are_all_shown():
    stamps = ["00.000000002", "00.000000002", "00.000000001", "00.000000003"]
    log = [f"2026-01-01T00:00:{stamp}Z line {number}" for number, stamp in enumerate(stamps)]
    assert read(log, []) == ["line 0", "line 1", "line 2", "line 3"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from("ab")), max_size=12), st.data())
def test_each_line_comes_once_wherever_connections_are_lost(rows, data):
    seconds = sorted(second for second, *_ in rows)
    log = [
        f"2026-01-01T00:00:0{second}.{fraction:09d}Z {text}"
        for second, (_, fraction, text) in zip(seconds, rows, strict=True)
    ]
    cuts = data.draw(st.lists(st.integers(0, len(log)), max_size=4))
    assert read(log, cuts) == [line.partition(" ")[2] for line in log]


@given(st.lists(st.sampled_from(["a", "b b", ""]), max_size=8), st.data())
def test_a_server_without_stamps_sends_everything_again(log, data):
    sent, texts = SentLines(), list[str]()
    for cut in [*data.draw(st.lists(st.integers(0, len(log)), max_size=3)), len(log)]:
        sent.begin_connection()
        texts += [text for line in log[:cut] if (text := sent.new_text(line)) is not None]
    assert texts == log
