"""All workers raise the error of one that cannot read or write a file, within seconds, in a line that names both."""

import shutil

import pytest
from processes.two_workers import two_workers, workers
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
def test_a_file_that_ends_early_while_shards_are_read(folders, parallel):
    line = two_workers(failing.loads, folders[:2], parallel)
    assert line.startswith(f"worker 1: {folders[1]}/model.safetensors: the file ends within weight model.")


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
    own = [[text.replace("DATA", str(tmp_path / name)) for text in overrides] for name in ("there", "gone")]
    line = two_workers(failing.trains, family, own)
    assert line.startswith("worker 1: ") and str(tmp_path / "gone") in line


def test_a_model_whose_files_one_worker_cannot_open_for_its_shards(folders):
    line = two_workers(failing.opens, folders[0])
    assert line.startswith("team.speaker.model.path: worker 0 reads its shards from the files, and worker 1 could not")


def test_an_engine_that_refuses_the_weights_of_one_worker(folders):
    assert two_workers(failing.refuses, folders[0]) == "worker 1: vLLM: no room"


@pytest.mark.parametrize(
    ("free", "rows", "once"), [([100.0, 60.0], 13, True), ([100.0, 45.0], 9, False), ([13.0, 100.0], 1, False)]
)
def test_workers_with_unequal_memory_make_passes_that_fit_on_each(free, rows, once):
    assert two_workers(failing.limits, free) == [({"speaker": rows}, once)] * 2
