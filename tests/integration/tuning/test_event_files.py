"""TensorBoard's files of a sweep, which can be read while its trials run."""

from pathlib import Path

import pytest
from pyarrow import fs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waiting import until

from marl_ray.tuning.folder import Folder
from marl_ray.tuning.reporting import event_files
from marl_ray.tuning.reporting.event_files import EventFiles


def points_of(folder: Path, key: str) -> set[tuple[int, float]]:
    """The points that TensorBoard finds: (step, value)."""
    if not folder.exists():
        return set()
    events = EventAccumulator(str(folder)).Reload()
    points = events.Scalars(key) if key in events.Tags()["scalars"] else []
    return {(event.step, round(event.value, 6)) for event in points}


def wait_for_points(folder: Path, key: str, expected: set[tuple[int, float]]) -> None:
    until(lambda: points_of(folder, key) >= expected, f"{folder.name} to have {expected}")


@pytest.mark.parametrize("remote", [False, True])
def test_rows_can_be_read_before_the_sweep_has_ended(tmp_path, monkeypatch, remote):
    monkeypatch.setattr(event_files, "MIN_UPLOAD_INTERVAL_S", 0.0)
    folder, lines = Folder(str(tmp_path), "s"), list[str]()
    if remote:
        folder.filesystem = fs.SubTreeFileSystem("/", fs.LocalFileSystem())
    events = EventFiles(folder, lines.append)
    events.log("0000-1", [{"steps": 8, "return": 0.5}, {"steps": 16, "return": 0.75}])
    events.log("0001-1", [{"steps": 8, "return": 0.25, "loss": float("nan")}])
    home = tmp_path / "s" / "tensorboard"
    if remote:

        def uploaded() -> bool:
            """Log one more row, with which the rows that the writer has flushed until then are uploaded."""
            events.log("0000-1", [{"steps": 20, "return": 0.8}])
            return points_of(home / "0000-1", "return") >= {(8, 0.5), (16, 0.75)}

        until(uploaded, "the first rows to be uploaded")
    else:
        wait_for_points(home / "0000-1", "return", {(8, 0.5), (16, 0.75)})
        wait_for_points(home / "0001-1", "return", {(8, 0.25)})
    events.end("0000-1")
    events.log("0000-1", [{"steps": 24, "return": 1.0}])  # a leg whose process was lost is taken up again
    events.close()
    wait_for_points(home / "0000-1", "return", {(24, 1.0)})
    wait_for_points(home / "0001-1", "return", {(8, 0.25)})
    assert lines == []


def test_a_disk_that_takes_nothing_is_said_once(tmp_path):
    (tmp_path / "s").write_text("in the way")
    lines: list[str] = []
    events = EventFiles(Folder(str(tmp_path), "s"), lines.append)
    for _ in range(3):
        events.log("0000-1", [{"steps": 8, "return": 0.5}])
    events.close()
    assert len(lines) == 1
    assert lines[0].startswith("TensorBoard's files are not complete: ")
