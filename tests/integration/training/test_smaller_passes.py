"""A worker without room for a pass costs a restart of all workers, with passes of half the size, and nothing else."""

import json

import pytest
from processes.two_workers import two_workers
from toys import texts

from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.driver import train
from marl_ray.training.errors import PassMemoryError
from marl_ray.training.loop.pass_sizes import SIZES_FILE, note_smaller_pass, pass_sizes
from marl_ray.training.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.shared_ray("two")

WORKERS = ("resources.workers=2", "resources.cpus_per_worker=0.5", "train.micro_batch=4", "tracking.progress=false")


@pytest.mark.long
@pytest.mark.parametrize("name", ["CROWDED", "CROWDED_LATER"])
def test_all_workers_halve_their_passes_and_train_as_if_they_had_been_small(ray_cluster, tmp_path, capsys, name):
    run_config = texts.config(*WORKERS, f"storage={tmp_path}", f"algorithm=toy_runs.short_memory:{name}")
    outcome = train(run_config)
    lines = capsys.readouterr().err.splitlines()
    (restart,) = [line for line in lines if "its workers start again from" in line]
    assert "worker 1" in restart and "out of memory in a pass of 4 sequences" in restart
    assert any("policy 'speaker': passes of at most 2, because larger ones ran out of memory" in line for line in lines)
    assert json.loads((tmp_path / run_config.name / SIZES_FILE).read_text()) == {"speaker": 2}
    small = two_workers(texts.train_rows, str(tmp_path / "small"), *WORKERS, "train.micro_batch=2")
    for key in ("return", "policy_loss", "grad_norm", "entropy"):
        expected = {row["steps"]: row[key] for row in small if key in row}
        assert dict(MlflowRun(run_config, outcome.run_id).history(key)) == pytest.approx(expected, abs=1e-5), key


def test_a_pass_of_one_sequence_is_not_halved(tmp_path):
    folder, lines = local_stored_folder(tmp_path), list[str]()
    assert pass_sizes(folder, lines.append) == {}
    for policy, rows in (("first", 7), ("second", 2), ("first", 3), ("second", 1), (None, 8)):
        note_smaller_pass(folder, PassMemoryError("no room", policy, rows))
    assert pass_sizes(folder, lines.append) == {"first": 1, "second": 1}
    assert lines == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"speak', "Unterminated string starting at: line 1 column 2 (char 1)"),
        (b"\xff\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[2]", "expected a JSON object"),
        (b'{"speaker": "two"}', "speaker='two': expected a number of sequences from 1"),
        (b'{"speaker": true}', "speaker=True: expected a number of sequences from 1"),
        (b'{"speaker": 0}', "speaker=0: expected a number of sequences from 1"),
    ],
)
def test_a_damaged_file_of_passes_is_named_and_the_next_worker_without_room_writes_it_anew(tmp_path, content, reason):
    folder, lines = local_stored_folder(tmp_path), list[str]()
    file = tmp_path / SIZES_FILE
    file.write_bytes(content)
    assert pass_sizes(folder, lines.append) == {}
    assert lines == [f"{file} does not hold the sizes of passes: {reason}; they are as large as without it"]
    note_smaller_pass(folder, PassMemoryError("no room", "speaker", 8))
    assert json.loads(file.read_text()) == {"speaker": 4}
