"""A team of language models on a real Ray: tracked, with transcripts, served from a bundle, and unharmed by a death."""

import json
from pathlib import Path

import mlflow
import pytest
from processes.two_workers import two_workers
from toys.texts import TWO_AGENTS, config, train_rows

from marl_ray.config import RunConfig
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.training.driver import train
from marl_ray.training.run_checks import check_run
from marl_ray.training.run_result import RunResult
from marl_ray.training.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.shared_ray("one")

TWO = "resources.workers=2"
WARM = "warm_start={data: environment, count: 16, batch: 8, epochs: 2, lr: 0.003}"


def run(storage: Path, *overrides: str) -> tuple[RunConfig, RunResult]:
    run_config = config(f"storage={storage}", "tracking.progress=false", WARM, *overrides)
    check_run(run_config)
    return run_config, train(run_config)


@pytest.mark.slow
def test_a_run_whose_worker_dies_equals_one_that_never_died(ray_cluster, tmp_path):
    marker = tmp_path / "died"
    env = {"id": "toys.texts:echo", "kwargs": {"agents": ["a", "b"], "marker": str(marker), "at": 10}}
    more = [f"env={json.dumps(env)}", "evaluation.every=3", "evaluation.samples=2"]
    unbroken, died = run(tmp_path / "died-run", TWO, *more)
    assert marker.exists()
    calm = two_workers(train_rows, str(tmp_path / "calm"), TWO, WARM, *more)
    for key in ("return", "policy_loss", "a/response_tokens", "eval/return", "eval/pass_at_2"):
        expected = {row["steps"]: row[key] for row in calm if key in row}
        assert MlflowRun(unbroken, died.run_id).history(key) == [*expected.items()] and expected, key
    best = load_bundle(died.bundle).manifest
    (same,) = (str(row["iteration"]) for row in calm if row["steps"] == best.lineage.steps and "iteration" in row)
    assert load_bundle(tmp_path / "calm" / same / "bundle").manifest.policies == best.policies

    client = mlflow.MlflowClient(tracking_uri=died.tracking_uri)
    assert client.get_run(died.run_id).info.status == "FINISHED"
    assert {"tokens", "tokens_per_second", "eval/greedy", "warm_start/log_likelihood"} <= set(
        client.get_run(died.run_id).data.metrics
    )
    folder = Path(
        mlflow.artifacts.download_artifacts(
            run_id=died.run_id, artifact_path="transcripts", dst_path=str(tmp_path), tracking_uri=died.tracking_uri
        )
    )
    (transcript, *_) = [json.loads(line) for line in (folder / "1.jsonl").read_text().splitlines()]
    assert [line["agent"] for line in transcript["lines"]] == ["a", "b"]


@pytest.mark.long
def test_a_warm_start_alone_is_a_run(ray_cluster, tmp_path):
    _, outcome = run(tmp_path, "train.total_steps=0", TWO_AGENTS)
    assert outcome.best_return is None
    assert load_bundle(outcome.model, outcome.tracking_uri).digest == load_bundle(outcome.bundle).digest


def test_a_run_learns_from_pairs_of_a_relative_path_and_its_last_weights_count(ray_cluster, tmp_path):
    run_config = config(
        *("algorithm=dpo", "data=jobs/data/preferences.jsonl", "train.group_size=1", "train.env_copies=40"),
        *("train.total_steps=200", f"storage={tmp_path}", "tracking.progress=false", "checkpoint.every=2"),
    )
    check_run(run_config)
    outcome = train(run_config)
    assert load_bundle(outcome.bundle).manifest.lineage.steps == 200
    losses = [loss for _, loss in MlflowRun(run_config, outcome.run_id).history("policy_loss")]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.mark.long
def test_an_engine_of_ones_own_in_actors_writes_what_it_writes_in_the_worker(ray_cluster, tmp_path):
    engine = "team.speaker.generation.engine=toys.engines:Plain"
    beside = train_rows(str(tmp_path / "beside"), engine)
    run_config = config(f"storage={tmp_path}", "tracking.progress=false", engine, "resources.engines=2")
    check_run(run_config)
    outcome = train(run_config)
    for key in ("return", "policy_loss", "tokens"):
        expected = [(row["steps"], row[key]) for row in beside if key in row]
        assert MlflowRun(run_config, outcome.run_id).history(key) == expected and expected, key
