"""Trackers that fail as trackers do."""

import json
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from marl_ray.config import RunConfig


class Lines:
    """A tracker that appends rows to `NAME.jsonl` beside the run's folder.

    Classes that are derived from it fail in some way.
    """

    def __init__(self, config: RunConfig, run_id: str):
        self.path = Path(config.storage, f"{type(self).__name__}.jsonl")

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        with self.path.open("a") as file:
            for row in rows:
                file.write(json.dumps({key: value for key, value in row.items() if math.isfinite(value)}) + "\n")

    def end(self, status: str) -> None:
        self.path.with_suffix(".ended").write_text(status)


class Slow(Lines):
    """Takes a second for each call."""

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        time.sleep(1)
        super().log(rows)


class Dead(Lines):
    """Takes nothing."""

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        raise ConnectionError("nobody answers")


class Hanging(Lines):
    """Never returns."""

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        time.sleep(60)


class Full(Lines):
    """Takes nothing until the file `room` lies beside the run's folder."""

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        if not self.path.with_name("room").exists():
            raise OSError(28, "No space left on device")
        super().log(rows)


class Shut(Lines):
    """Cannot be opened."""

    def __init__(self, config: RunConfig, run_id: str):
        raise ConnectionError("nobody answers")


class Stuck(Lines):
    """Never opens."""

    def __init__(self, config: RunConfig, run_id: str):
        time.sleep(60)


class Database(Lines):
    """Keeps the iterations in a SQLite database, whose connection belongs to the thread that opened it."""

    def __init__(self, config: RunConfig, run_id: str):
        super().__init__(config, run_id)
        self.connection = sqlite3.connect(self.path.with_suffix(".db"))
        self.connection.execute("create table rows (iteration)")

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        with self.connection:
            self.connection.executemany("insert into rows values (?)", [(row["iteration"],) for row in rows])
        super().log(rows)


class Moody(Lines):
    """Appends rows to `NAME.jsonl` in the folder that TRACKED names, and says what it has.

    `NAME.mood` there holds how many calls it fails before it takes rows, and how many seconds each call takes.
    """

    def __init__(self, config: RunConfig, run_id: str):
        self.path = Path(os.environ["TRACKED"], f"{config.name}.jsonl")
        self.mood = self.path.with_suffix(".mood")

    def log(self, rows: Iterable[Mapping[str, float]]) -> None:
        mood = json.loads(self.mood.read_text()) if self.mood.exists() else {"fails": 0, "takes_s": 0.0}
        time.sleep(mood["takes_s"])
        if mood["fails"]:
            self.mood.write_text(json.dumps(mood | {"fails": mood["fails"] - 1}))
            raise ConnectionError("nobody answers")
        super().log(rows)

    def last_iteration(self) -> int | None:
        """The last iteration that it has."""
        iterations = read_iterations(self.path.parent, self.path.stem)
        return iterations[-1] if iterations else None


def read_iterations(storage: Path, tracker: str) -> list[int]:
    """The iterations that a tracker of a run in `storage` got, in order."""
    path = storage / f"{tracker}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(json.loads(line)["iteration"]) for line in lines]
