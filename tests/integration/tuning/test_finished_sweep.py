"""A sweep over a grid that has ended, on a real Ray: its records, rows, runs in MLflow, winner, and its second run."""

import json
from pathlib import Path

import pytest
from toy_runs.trained_sweeps import FinishedSweep, rows_of, sweep_config, train_sweep

from marl_ray.config import RunConfig, load_config, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.training.single_process import train_alone
from marl_ray.tuning.lookup import winner_of
from marl_ray.tuning.running.driver import check_sweep, run_sweep

pytestmark = pytest.mark.shared_ray("one")

GRID = {
    "algorithm": {"grid": ["ippo", "grpo"]},
    "train.group_size": {"grid": [2], "when": {"algorithm": ["grpo"]}},
}


@pytest.fixture(scope="module")
def grid(ray_cluster, tmp_path_factory) -> FinishedSweep:
    """Two algorithms, each with two seeds."""
    storage = tmp_path_factory.mktemp("grid")
    return FinishedSweep(storage, train_sweep(storage, space=GRID))


def test_a_grid_trains_every_combination_to_its_end(grid):
    assert [(trial.status, trial.error) for trial in grid.trials] == 2 * [("finished", "")]
    combinations = [{"algorithm": "ippo"}, {"algorithm": "grpo", "train.group_size": 2}]
    assert [trial.values for trial in grid.trials] == combinations


def test_the_record_of_a_trial_says_what_its_last_row_says(grid):
    for record in grid.trials:
        last = rows_of(grid.result, record.number)[-1]
        assert last["steps"] >= 192
        assert last["objective/eval/return"] == record.objectives[0]
        assert record.played == last["played"] >= 2 * 192
        assert record.seconds > 0


def test_a_row_has_the_mean_of_all_seeds_and_the_metric_of_each(grid):
    for record in grid.trials:
        assert {"seed-0/eval/return", "seed-1/eval/return", "policy_loss"} <= set(
            rows_of(grid.result, record.number)[-1]
        )


def test_the_records_name_a_bundle_and_a_run_config_of_each_seed(grid):
    for trial in json.loads(Path(grid.result.folder, "sweep.json").read_text())["trials"]:
        manifests = [load_bundle(Path(grid.result.folder, path)).manifest for path in trial["bundles"].values()]
        assert [manifest.lineage.seed for manifest in manifests] == [0, 1]
        assert [parse_config(RunConfig, config).seed for config in trial["configs"]] == [0, 1]


def test_a_sweep_is_a_run_in_mlflow_and_its_trials_are_child_runs(grid):
    runs = grid.trial_runs()
    assert {run.data.tags["trial"] for run in runs} == {"0000", "0001"}
    assert all("objective/eval/return" in run.data.metrics for run in runs)
    parent = grid.client.get_run(grid.result.records.mlflow_run_id)
    assert {run.info.status for run in [parent, *runs]} == {"FINISHED"}
    assert "report.html" in [file.path for file in grid.client.list_artifacts(parent.info.run_id)]


def test_the_winner_has_the_best_objective_and_its_bundle_is_registered(grid):
    records = grid.result.records
    assert records.winner == max(records.trials, key=lambda trial: trial.objectives[0]).number
    assert records.winner_model == winner_of(grid.result.folder)[0] == "models:/toy-sweep/1"
    served = load_bundle(records.winner_model, f"sqlite:///{grid.storage}/mlflow.db")
    assert served.manifest.lineage.run == f"toy-sweep-{records.winner:04d}-seed-{records.winner_seed}"


def test_the_winners_config_alone_trains_to_the_same_score(grid):
    records = grid.result.records
    config = load_config(RunConfig, Path(grid.result.folder, "winner.yaml"))
    last = rows_of(grid.result, records.winner)[-1]
    assert train_alone(config)[-1]["eval/return"] == last[f"seed-{records.winner_seed}/eval/return"]


def test_a_sweep_that_has_ended_trains_nothing_when_it_is_run_again(grid):
    config = sweep_config(grid.storage, space=GRID)
    again = run_sweep(config, cluster=lambda: pytest.fail("nothing is left that needs Ray")).records
    assert [trial.legs for trial in again.trials] == [1, 1]
    assert again.winner_model == grid.result.records.winner_model
    assert again.seconds == grid.result.records.seconds  # what trains nothing takes nothing of `budget.hours`


def test_the_name_of_another_sweep_is_refused(grid):
    with pytest.raises(MarlRayError, match=r"name: sweep 'toy-sweep' exists under .* with another seeds; choose"):
        check_sweep(sweep_config(grid.storage, space=GRID, seeds=3))
