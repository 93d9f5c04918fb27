"""The score that `marl-ray runs` shows of a run is that of the bundle that is there."""

import pytest
from toy_runs.runs import config

from marl_ray.runs.comparison import group_by_seed
from marl_ray.runs.stored import find_run
from marl_ray.runs.summary import Score, details_of
from marl_ray.training.checkpoints.index import checkpoint_name
from marl_ray.training.checkpoints.manifest import FORMAT, CheckpointManifest, publish
from marl_ray.training.checkpoints.storage import StoredFile, local_stored_folder
from marl_ray.training.journal.writer import Journal
from marl_ray.training.run_folder.record import filesystem_of, record_of, write_record


@pytest.mark.parametrize(
    ("published", "score"),
    [
        ([0, 1, 2], Score(22.0, 21.0, 23.0, "best bundle")),
        ([0, 1], Score(12.0, 11.0, 13.0, "best bundle")),  # a driver was killed before the last manifest
        ([], Score(20.0, 19.0, 21.0, "last evaluation")),
    ],
)
def test_a_killed_run_has_the_score_of_its_last_complete_bundle(tmp_path, published, score):
    run_config = config("name=killed", f"storage={tmp_path}")
    write_record(run_config, record_of(run_config))
    journal = Journal(*filesystem_of(run_config))
    for n in range(3):
        row: dict[str, float] = {"iteration": n, "steps": 96 * n}
        for metric, mean in {"eval/return": 10.0 * n, "best/return": 10.0 * n + 2}.items():
            row |= {metric: mean, f"{metric}_low": mean - 1, f"{metric}_high": mean + 1}
        journal.write_row(row)
        place = tmp_path / "killed" / checkpoint_name(n, 1)
        (place / "bundle").mkdir(parents=True)
        (place / "bundle" / "bundle.json").write_text("{}")
        if n in published:
            files = {"bundle/bundle.json": StoredFile(2, "0")}
            facts = {"format": FORMAT, "run": "killed", "identity": "1", "iteration": n, "steps": 96 * n, "ranks": 1}
            manifest = CheckpointManifest(**facts, score=10.0 * n, metrics=row, files=files)
            publish(local_stored_folder(place), manifest)
    run = find_run("killed", str(tmp_path))
    assert details_of(run).summary.score == score
    assert group_by_seed([run])[0].score == score
