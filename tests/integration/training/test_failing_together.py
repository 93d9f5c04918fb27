"""All workers raise the error of one that cannot read or write a file, within seconds, in a line that names both."""

import shutil
from pathlib import Path

import pytest
from processes.two_workers import two_workers, workers
from safetensors.torch import load_file, save_file
from toy_models.small_llama import saved_llama
from toy_runs import failing
from toy_serving.logged_acts import log_countdown


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """A model's folder for each of four workers."""
    saved_llama(tmp_path / "0")
    return [str(tmp_path / "0"), *(str(shutil.copytree(tmp_path / "0", tmp_path / str(n))) for n in range(1, 4))]


def test_an_error_of_the_first_worker_reaches_those_that_wait_for_its_value():
    line = two_workers(failing.of_first)
    assert line == "worker 0: FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/to/be/found'"


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"context": 2}])
def test_a_file_that_ends_early_and_a_device_that_is_full_while_shards_are_read(folders, parallel):
    lines = two_workers(failing.loads, folders[:2], parallel)
    assert lines[0].startswith(f"worker 1: {folders[1]}/model.safetensors: the file ends within weight model.")
    assert lines[1] == (
        f"worker 1: model.path '{folders[0]}': out of memory while its weights were read; expected more workers or "
        "model.cpu_offload (CUDA out of memory. Tried to allocate 2.00 GiB.)"
    )


@pytest.mark.parametrize("failed", [0, 1])
def test_a_worker_that_fails_in_the_middle_of_a_bundle(folders, tmp_path, failed):
    model = f"team.speaker.model={{path: '{folders[0]}', context: 32}}"
    line = two_workers(failing.exports, str(tmp_path), model, failed)
    written = f"{tmp_path}/broken/bundle cannot be written: " if failed == 0 else ""  # the first worker writes the file
    assert line == f"worker {failed}: {written}OSError: the disk does not answer"
    assert not (tmp_path / "broken" / "manifest.json").exists()
    assert (tmp_path / "whole" / "manifest.json").exists()


@pytest.mark.long
def test_one_of_four_workers_that_fails_in_the_middle_of_a_bundle(folders, tmp_path):
    model = f"team.speaker.model={{path: '{folders[0]}', context: 32}}"
    line = workers(4, failing.exports, str(tmp_path), model, 2)
    assert line == "worker 2: OSError: the disk does not answer"


def test_a_file_below_adapters_that_ends_early_while_a_bundle_is_written(folders, tmp_path):
    line = two_workers(failing.exports_frozen, folders[:2], str(tmp_path / "run"))
    assert line.startswith(f"worker 0: {folders[0]}/model.safetensors: the file ends within weight model.")


LOGGED = "env={id: 'toys.envs:countdown', kwargs: {agents: [x, y], length: 6}}"


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("runs", [LOGGED, "warm_start.data=DATA/part.parquet", "warm_start.epochs=1"]),
        ("texts", ["data=DATA/pairs.jsonl", "algorithm=dpo", "train.group_size=1"]),
    ],
)
def test_data_that_one_worker_cannot_read(tmp_path, family, overrides):
    (tmp_path / "there").mkdir()
    log_countdown(tmp_path / "there" / "part.parquet", 0.9, 20)
    (tmp_path / "there" / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "a", "rejected": "b"}\n' * 8)
    of_workers = [[text.replace("DATA", str(tmp_path / name)) for text in overrides] for name in ("there", "gone")]
    line = two_workers(failing.trains, family, of_workers)
    assert line.startswith("worker 1: ") and str(tmp_path / "gone") in line


def test_a_model_of_which_one_worker_has_other_files_or_cannot_open_them_for_its_shards(folders):
    weights = load_file(f"{folders[1]}/model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, f"{folders[1]}/model.safetensors", {"format": "pt"})
    lines = two_workers(failing.opens, folders)
    where = "team.speaker.model.path: "
    assert lines[0] == (
        f"{where}the files of workers 0 and 1 differ, such as in model.norm.weight; expected the same on every worker"
    )
    assert lines[1].startswith(f"{where}worker 0 reads its shards from the files, and worker 1 could not")


def test_an_engine_that_refuses_the_weights_of_one_worker(folders):
    assert two_workers(failing.refuses, folders[0]) == "worker 1: vLLM: no room"


@pytest.mark.parametrize(
    ("free", "rows", "once"), [([100.0, 60.0], 13, True), ([100.0, 45.0], 9, False), ([13.0, 100.0], 1, False)]
)
def test_workers_with_unequal_memory_make_passes_that_fit_on_each(free, rows, once):
    assert two_workers(failing.limits, free) == [({"speaker": rows}, once)] * 2


def without_room(folder: Path) -> dict[str, str]:
    """The lines of `failing.gathers`."""
    gathered = (
        "out of memory while weights were gathered to sample with; expected more workers, model.cpu_offload or "
        "resources.engines, whose GPUs are their own (CUDA out of memory. Tried to allocate 2.00 GiB.)"
    )
    return {
        "bundle": f"worker 0: {folder}/broken/bundle cannot be written: MemoryError: no room",
        "engine": f"worker 1: policy 'speaker': {gathered}",
        "between two": "worker 1: RuntimeError: the engine is gone",
        "update": f"worker 1: policy 'speaker', iteration 2, step 8: {gathered}",
        "checkpoint": f"worker 1: policy 'speaker', after reading {folder}/whole: {gathered}",
    }


@pytest.mark.long
def test_a_worker_without_room_for_weights_that_come_from_others(tmp_path):
    assert two_workers(failing.gathers, str(tmp_path), saved_llama(tmp_path / "model")) == without_room(tmp_path)


@pytest.mark.long
def test_one_of_four_workers_that_divide_layers_without_room_for_the_weights_of_others(tmp_path):
    mesh = "resources.parallel={shard: 2, tensor: 2}"
    assert workers(4, failing.gathers, str(tmp_path), saved_llama(tmp_path / "model"), mesh) == without_room(tmp_path)
