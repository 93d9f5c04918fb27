"""Texts by key, in a SQLite file that processes share and that may fail."""

import logging
import sqlite3

import pytest

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.stored_texts import StoredTexts


def test_the_oldest_texts_are_deleted_and_the_others_survive_in_the_file(tmp_path):
    path = str(tmp_path / "texts.db")
    texts = StoredTexts(path, 3)
    for i in range(10):
        texts.put(str(i), f"text {i}")
    texts.put("8", "newer")
    assert (len(texts), texts.get("7"), texts.get("8"), texts.get("6")) == (3, "text 7", "newer", None)
    texts.put("10", "x")
    assert (StoredTexts(path, 3).get("7"), StoredTexts(path, 3).get("8")) == (None, "newer")


def test_all_texts_are_kept_without_a_maximum():
    texts = StoredTexts()
    for i in range(100):
        texts.put(str(i), f"text {i}")
    assert (len(texts), texts.get("0"), texts.get("100")) == (100, "text 0", None)


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "junk").write_bytes(b"this is no database, whatever its name says" * 100)
    with pytest.raises(MarlRayError, match=r"cache: .*junk cannot be opened as SQLite"):
        StoredTexts(str(tmp_path / "junk"))


def test_a_file_that_another_process_locks_is_logged_and_raises_nothing(tmp_path, caplog):
    path = str(tmp_path / "texts.db")
    texts = StoredTexts(path, wait_s=0.01)
    texts.put("a", "kept")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with caplog.at_level(logging.WARNING):
        texts.put("b", "lost")
        assert texts.get("a") is None
    other.execute("ROLLBACK")
    other.close()
    assert [line.split(" (")[0] for line in caplog.messages] == ["cache: cannot be written", "cache: cannot be read"]
    assert (texts.get("a"), texts.get("b")) == ("kept", None)
