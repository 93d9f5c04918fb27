"""Reading checkpoints: every damage is named, the checkpoint before takes over, and nothing begins anew by itself."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moto.server import ThreadedMotoServer
from processes.two_workers import two_workers
from pyarrow import fs
from toy_runs.runs import config, timeless, train_rows, weights

from marl_ray.training.checkpoints import tensor_files
from marl_ray.training.checkpoints.index import (
    checkpoint_name,
    checkpoints_in,
    find_best,
    published_checkpoints,
    remove_unneeded,
)
from marl_ray.training.checkpoints.loading import UnreadableCheckpointError
from marl_ray.training.checkpoints.storage import StoredFile, StoredFolder, local_stored_folder, read_verified
from marl_ray.training.loop.callbacks import Metrics, RunCallbacks
from marl_ray.training.loop.iterations import CheckpointKeeping, run_worker
from marl_ray.training.loop.start import RunStart
from marl_ray.training.single_process import process_group, train_alone

PART = "weights/__0_0.distcp"


def about_checkpoints(lines: list[str]) -> list[str]:
    """The lines without those about the policies' updates."""
    return [line for line in lines if not line.startswith("policy ")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six iterations with the checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("base")
    train_alone(config("evaluation.every=2"), folder)
    return folder


def go_on(folder: Path, *newest_first: int) -> tuple[list[Metrics], list[int | None], list[str]]:
    """Rows of the run that continues, the iterations that it continues from, and what it says of damage."""
    rows: list[Metrics] = []
    begins: list[int | None] = []
    lines: list[str] = []
    with process_group():
        run_worker(
            config("evaluation.every=2"),
            torch.device("cpu"),
            RunStart([local_stored_folder(folder / str(number)) for number in newest_first]),
            RunCallbacks(rows.append, begin=begins.append, say=lines.append),
            CheckpointKeeping(lambda iteration: local_stored_folder(folder / f"again-{iteration}")),
        )
    return rows, begins, about_checkpoints(lines)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for k in range(8):
        data[len(data) // 2 + k] ^= 0xFF
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "flipped": (PART, flip, "has another content than was written: its sha256 differs"),
    "shortened": (PART, shorten, " bytes, expected "),
    "gone": (PART, Path.unlink, "is missing"),
    "episodes gone": ("envs-0.json", Path.unlink, "is missing"),
    "episodes flipped": ("envs-0.json", flip, "its sha256 differs"),
    "state": ("state.json", shorten, " bytes, expected "),
    "index": ("weights/.metadata", flip, "its sha256 differs"),
    "index shortened": ("weights/.metadata", shorten, " bytes, expected "),
    "index gone": ("weights/.metadata", Path.unlink, "is missing"),
    "bundle": ("bundle/bundle.json", flip, "its sha256 differs"),
    "bundle gone": ("bundle/bundle.json", Path.unlink, "is missing"),
    "manifest": ("manifest.json", shorten, "is no manifest: "),
    "manifest flipped": ("manifest.json", flip, "manifest.json"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_gives_way_to_the_one_before(base, tmp_path, how, recwarn):
    """The run then ends as if it had never stopped; and the damaged one is not tried again."""
    folder = shutil.copytree(base, tmp_path / "run")
    name, damage, message = DAMAGES[how]
    newest = 6 if name.startswith("bundle") else 4  # whose evaluation is no better than that of 2
    damage(folder / str(newest) / name)
    _, begins, lines = go_on(folder, newest, newest - 2)
    assert begins == [newest - 2]
    (line,) = lines
    assert str(folder / str(newest) / name) in line and message in line and "\n" not in line
    assert line.endswith(f"; the run continues from {folder}/{newest - 2}")
    assert not (folder / str(newest) / "manifest.json").exists()
    assert (folder / str(newest) / "damaged" / "manifest.json").exists()
    for key, value in weights(base / "6").items():
        assert torch.equal(value, weights(folder / "again-6")[key])


def test_without_a_good_one_left_the_run_fails_and_names_them_all(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "run")
    flip(folder / "4" / PART)
    (folder / "2" / "envs-0.json").unlink()
    with pytest.raises(UnreadableCheckpointError) as caught:
        go_on(folder, 4, 2)
    text = str(caught.value)
    assert text.startswith(f"no checkpoint can be read: {folder}/4/{PART} has another content")
    assert f"{folder}/2/envs-0.json is missing" in text and "\n" not in text
    assert all((folder / name / "manifest.json").exists() for name in "24")  # so the next start says the same


def test_a_storage_that_cannot_be_read_withdraws_nothing(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "run")
    (folder / "4" / "state.json").unlink()
    (folder / "4" / "state.json").symlink_to("state.json")  # a link to itself
    _, begins, (line,) = go_on(folder, 4, 2)
    assert begins == [2] and f"{folder}/4" in line
    assert (folder / "4" / "manifest.json").exists()


def note_reads(folder: str) -> dict[str, list[str]]:
    """Names of the files that each of two workers reads to continue from a checkpoint of two, and of one."""
    from marl_ray.policies.agreement import all_gather_values

    read: list[str] = []

    def note(place: StoredFolder, expected: StoredFile) -> bytes:
        read.append(place.path.removeprefix(f"{folder}/"))
        return read_verified(place, expected)

    run = config("resources.workers=2")
    train_alone(run, Path(folder))
    tensor_files.read_verified = note  # type: ignore[attr-defined]
    train_alone(run, resume=Path(folder, "4"))
    return {str(rank): names for rank, names in enumerate(all_gather_values(read))}


def test_each_worker_reads_its_part_alone(tmp_path):
    read = two_workers(note_reads, str(tmp_path))
    for rank, names in read.items():
        of_rank = {f"4/envs-{rank}.json", f"4/weights/__{rank}_0.distcp"}
        assert set(names) == {"4/state.json", "4/weights/.metadata", *of_rank} and len(names) == 4
    shares = [sum((tmp_path / name).stat().st_size for name in names if "distcp" in name) for names in read.values()]
    assert max(shares) < 1.3 * min(shares)


def goes_on_with_two(folder: str) -> tuple[list[Metrics], list[str]]:
    """Continue a run as one of two workers; the part of worker 1 is damaged."""
    rows: list[Metrics] = []
    lines: list[str] = []
    places = [local_stored_folder(Path(folder, number)) for number in ("4", "2")]
    run = config("resources.workers=2", "evaluation.every=0")
    run_worker(run, torch.device("cpu"), RunStart(places), RunCallbacks(rows.append, say=lines.append))
    return rows, about_checkpoints(lines)


@pytest.mark.parametrize("name", ["weights/__1_0.distcp", pytest.param("envs-1.json", marks=pytest.mark.long)])
def test_workers_pass_a_checkpoint_together_if_the_part_of_one_is_damaged(tmp_path, name):
    intact = two_workers(train_rows, str(tmp_path), "resources.workers=2", "evaluation.every=0")
    flip(tmp_path / "4" / name)
    rows, (line,) = two_workers(goes_on_with_two, str(tmp_path))
    assert f"{tmp_path}/4/{name} has another content" in line
    assert timeless(rows) == timeless([row for row in intact if row["iteration"] > 2])


def test_another_number_of_workers_reads_all_parts(base, tmp_path):
    run = ("evaluation.every=0", "hyper.lr=1e-12")  # so that rounding, which depends on the workers, decides nothing
    two_workers(train_rows, str(tmp_path), *run, "resources.workers=2")
    full_tensors = train_alone(config(*run))
    again = train_alone(config(*run), resume=tmp_path / "4")
    returns = {row["iteration"]: row.get("return") for row in full_tensors}
    assert [row.get("return") for row in again] == [returns[row["iteration"]] for row in again] != []


@pytest.fixture
def bucket() -> Iterator[StoredFolder]:
    """A folder on an S3 that answers over HTTP."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    storage = fs.S3FileSystem(
        access_key="key",
        secret_key="secret",
        scheme="http",
        endpoint_override=f"{host}:{port}",
        allow_bucket_creation=True,
    )
    storage.create_dir("bucket")
    yield StoredFolder(storage, "bucket/runs/toy")
    server.stop()


def test_checkpoints_on_s3_are_written_checked_withdrawn_and_removed_there(base, bucket):
    rows: list[Metrics] = []
    again: list[Metrics] = []
    lines: list[str] = []
    run = config("evaluation.every=2")
    with process_group():
        keeping = CheckpointKeeping(lambda iteration: bucket / checkpoint_name(iteration, 1))
        run_worker(run, torch.device("cpu"), callbacks=RunCallbacks(rows.append), keeping=keeping)
        places = checkpoints_in(bucket)
        iterations = [each.manifest.iteration for each in published_checkpoints(bucket)]
        assert iterations[-1] == 6 and len(iterations) == len(places) > 2
        manifest, local = (
            published_checkpoints(bucket)[-1].manifest,
            json.loads((base / "6" / "manifest.json").read_text())["files"],
        )
        assert set(manifest.files) == set(local)
        assert all(list(manifest.files[name]) == local[name] for name in (PART, "envs-0.json"))
        with bucket.filesystem.open_output_stream((places[-1] / PART).path) as stream:
            stream.write(b"nonsense")
        run_worker(run, torch.device("cpu"), RunStart(places[::-1]), RunCallbacks(again.append, say=lines.append))
    assert timeless(again) == timeless([row for row in rows if row["iteration"] > iterations[-2]])
    assert f"{places[-1]}/{PART} has 8 bytes, expected " in about_checkpoints(lines)[0]
    assert [place.path for place in checkpoints_in(bucket)] == [place.path for place in places[:-1]]
    chosen = find_best(published_checkpoints(bucket))
    remove_unneeded(bucket, 1, None, 1)
    assert chosen is not None and {place.path for place in checkpoints_in(bucket)} == {
        places[-2].path,
        chosen.place.path,
    }
