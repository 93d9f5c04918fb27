"""Trackers that fail as trackers do."""

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from marl_ray.config import RunConfig


class Lines:
    """Appends rows to `NAME.jsonl` beside the run's folder; those of a class that is derived fail in some way."""

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


def taken(storage: Path, tracker: str) -> list[int]:
    """The iterations that a tracker of a run in `storage` got, in order."""
    path = storage / f"{tracker}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(json.loads(line)["iteration"]) for line in lines]
