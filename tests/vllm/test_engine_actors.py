"""Runs on Ray whose responses actors of vLLM write."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from toys.texts import TWO_AGENTS, config, trained

from marl_ray.cluster.local_ray import LocalRay
from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.training.driver import RunResult, train
from marl_ray.training.run_checks import check_run
from marl_ray.training.tracking.mlflow_run import Tracker

ENGINE = "team.speaker.generation.engine=vllm"
EXACT = 1e-5
"""Greatest difference of log-probabilities in float32."""


def run(storage: Path, *overrides: str) -> tuple[RunConfig, RunResult]:
    whole = config(f"storage={storage}", "tracking.progress=false", *overrides)
    check_run(whole)
    return whole, train(whole)


def processes_of_vllm() -> list[int]:
    """Those of actors of this test's Ray."""
    raylets = {str(own.pid) for own in psutil.Process().children(recursive=True) if own.name() == "raylet"}
    assert raylets
    return [
        own.pid
        for own in psutil.process_iter(["cmdline", "environ"])
        if "vllm_process.server" in " ".join(own.info["cmdline"] or [])
        and (own.info["environ"] or {}).get("RAY_RAYLET_PID") in raylets
    ]


def test_two_engines_that_two_workers_share_train_as_one_engine_beside_a_worker(ray_cluster: LocalRay, tmp_path: Path):
    two = ("resources.workers=2", "resources.cpus_per_worker=0.5", "resources.engines=2")
    whole, apart = run(tmp_path / "apart", ENGINE, *two)
    tracker = Tracker(whole, apart.run_id)
    gaps = [value for _, value in tracker.history("engine/log_prob_gap")]
    assert len(gaps) == 3 and max(gaps) < EXACT
    assert processes_of_vllm() == []
    beside = trained(str(tmp_path / "beside"), ENGINE)
    for key in ("return", "policy_loss", "entropy", "response_tokens"):
        expected = {row["steps"]: row[key] for row in beside if key in row}
        assert dict(tracker.history(key)) == pytest.approx(expected, abs=1e-4), key


def test_an_engine_of_two_processes_samples_with_adapters(ray_cluster: LocalRay, tmp_path: Path):
    model = "{preset: tiny-1m, context: 32, lora: {rank: 4}}"
    team = (
        f"team={{first: {{agents: [a], model: {model}, generation: {{max_tokens: 4, engine: vllm}}}}, "
        "second: {agents: [b], model: {preset: tiny-0.2m, context: 32}}}"
    )
    more = ("resources.engines=1", "resources.tensor_parallel=2", "resources.cpus_per_worker=0.5")
    whole, outcome = run(tmp_path, TWO_AGENTS, team, *more)
    gaps = [value for _, value in Tracker(whole, outcome.run_id).history("first/engine/log_prob_gap")]
    assert len(gaps) == 3 and max(gaps) < EXACT


def test_an_engine_that_dies_costs_a_restart_of_the_workers_from_their_checkpoint(
    ray_cluster: LocalRay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole = config(
        f"storage={tmp_path}", "tracking.progress=false", ENGINE, "resources.engines=1", "train.total_steps=80"
    )
    with ThreadPoolExecutor() as beside:
        running = beside.submit(train, whole)
        deadline = time.monotonic() + 240
        while not (
            names := [own["name"] for own in ray.util.list_named_actors(True) if " engine " in own["name"]]
        ) or not [*(tmp_path / whole.name).glob("checkpoint_*")]:
            assert time.monotonic() < deadline and not running.done()
            time.sleep(0.2)
        [namespace] = [own["namespace"] for own in ray.util.list_named_actors(True) if own["name"] == names[0]]
        ray.kill(ray.get_actor(names[0], namespace))
        outcome = running.result(timeout=240)
    said = [line for line in capsys.readouterr().err.splitlines() if "its workers start again from" in line]
    assert len(said) == 1
    assert (
        "the checkpoint of iteration" in said[0] and "worker 0: resources.engines: engine of policy speaker" in said[0]
    )
    steps = [step for step, _ in Tracker(whole, outcome.run_id).history("return")]
    assert steps == sorted({*steps}) and steps[-1] == 80
    assert processes_of_vllm() == []


def test_an_engine_that_refuses_to_start_ends_the_run_with_one_line(ray_cluster: LocalRay, tmp_path: Path):
    odd = config(f"storage={tmp_path}", ENGINE, "resources.engines=1", "resources.tensor_parallel=2")
    with pytest.raises(MarlRayError, match=r"expected a divisor of the 3 attention heads of team.speaker.model"):
        check_run(odd)
    with pytest.raises(MarlRayError, match=r"failed: resources.engines: engine of policy speaker: .* attention heads"):
        train(odd)


def test_a_cluster_without_room_for_the_engines_is_refused_at_once(ray_cluster: LocalRay, tmp_path: Path):
    with pytest.raises(
        MarlRayError, match=r"resources.workers=1 and 9 for engines with cpus_per_worker=1 needs 10 CPUs"
    ):
        run(tmp_path, ENGINE, "resources.engines=9")
