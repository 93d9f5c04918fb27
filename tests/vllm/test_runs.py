"""Runs whose responses vLLM writes, in a process beside the worker or in actors of Ray."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from toys.texts import TWO_AGENTS, config, train_rows
from waiting import until

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.language.tiny_models import byte_tokenizer, tiny_model
from marl_ray.training.driver import train
from marl_ray.training.loop.callbacks import Metrics
from marl_ray.training.run_checks import check_run
from marl_ray.training.run_result import RunResult
from marl_ray.training.single_process import train_alone
from marl_ray.training.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.shared_ray("two")

ENGINE = "team.speaker.generation.engine=vllm"
EXACT = 1e-5
"""Greatest difference of log-probabilities in float32."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of `beside`, by iteration."""
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def beside(checkpoints: Path) -> list[Metrics]:
    """The rows of a run whose engine is beside its only worker."""
    return train_rows(str(checkpoints), ENGINE)


def run(storage: Path, *overrides: str) -> tuple[RunConfig, RunResult]:
    run_config = config(f"storage={storage}", "tracking.progress=false", *overrides)
    check_run(run_config)
    return run_config, train(run_config)


def processes_of_vllm() -> list[int]:
    """Those of actors of this test's Ray."""
    raylets = {str(process.pid) for process in psutil.Process().children(recursive=True) if process.name() == "raylet"}
    assert raylets
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if "vllm.process.server" in " ".join(process.info["cmdline"] or [])
        and (process.info["environ"] or {}).get("RAY_RAYLET_PID") in raylets
    ]


def test_the_learner_computes_the_engines_log_probs_in_every_iteration_of_a_team():
    team = (
        "team={first: {agents: [a], model: {preset: tiny-0.2m, context: 32}, generation: {max_tokens: 4, engine: vllm}}, "
        "second: {agents: [b], model: {preset: tiny-0.2m, context: 32, lora: {rank: 4}}, generation: {max_tokens: 3, "
        "engine: vllm}}}"
    )
    rows = train_alone(config(TWO_AGENTS, team, "train.total_steps=48", "hyper.lr=0.01"))
    gaps = [row[f"{name}/engine/log_prob_gap"] for row in rows for name in ("first", "second") if row["iteration"]]
    assert len(gaps) == 6 and max(gaps) < EXACT


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An override by which the speaker's model is read from a folder, so that no worker keeps a copy for vLLM."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(32)
    tiny_model("tiny-0.2m", tokenizer, 32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"team.speaker.model={{path: '{folder}', context: 32}}"


@pytest.mark.parametrize("more", [(), ("team.speaker.model.lora.rank=4",), ("algorithm=ppo",)])
def test_weights_that_no_worker_holds_reach_vllm_after_every_update(stored, more):
    rows = train_alone(config(ENGINE, stored, "hyper.lr=0.01", *more))
    gaps = [row["engine/log_prob_gap"] for row in rows if row["iteration"]]
    assert len(gaps) == 3 and max(gaps) < EXACT


def test_weights_that_no_worker_holds_reach_engines_of_their_own(ray_cluster, stored, tmp_path):
    two = ("resources.workers=2", "resources.cpus_per_worker=0.5", "resources.engines=1", "hyper.lr=0.01")
    run_config, apart = run(tmp_path, ENGINE, stored, *two)
    gaps = [value for _, value in MlflowRun(run_config, apart.run_id).history("engine/log_prob_gap")]
    assert len(gaps) == 3 and max(gaps) < EXACT


def test_a_run_goes_on_from_its_checkpoint_with_the_weights_of_the_checkpoint(beside, checkpoints):
    rest = train_alone(config(ENGINE), resume=checkpoints / "2")
    assert [row["iteration"] for row in rest] == [3]
    for name in ("return", "policy_loss", "entropy", "tokens"):
        assert abs(rest[-1][name] - beside[-1][name]) < 1e-4, name


def test_bfloat16_is_weighed_by_truncated_importance():
    rows = train_alone(config(ENGINE, "team.speaker.model.dtype=bf16"))
    assert all(0 < row["engine/log_prob_gap"] < 0.1 for row in rows)


def test_benchmarks_are_measured_by_vllm_and_leave_training_as_it_is(beside, tmp_path):
    (tmp_path / "m.jsonl").write_text('{"prompt": "a", "answer": "a"}\n{"prompt": "b", "answer": "b"}\n')
    entry = f"{{name: math, data: '{tmp_path / 'm.jsonl'}', samples: 2, temperature: 0.7, every: 1}}"
    measured = train_alone(config(ENGINE, f"evaluation.benchmarks=[{entry}]"))
    assert [row["iteration"] for row in measured if "benchmark/math/pass_at_2" in row] == [0, 1, 2, 3]
    for name in ("return", "policy_loss", "entropy", "tokens"):
        assert abs(measured[-1][name] - beside[-1][name]) < 1e-4, name


def test_two_engines_that_two_workers_share_train_as_one_engine_beside_a_worker(ray_cluster, beside, tmp_path):
    two = ("resources.workers=2", "resources.cpus_per_worker=0.5", "resources.engines=2")
    run_config, apart = run(tmp_path / "apart", ENGINE, *two)
    tracker = MlflowRun(run_config, apart.run_id)
    gaps = [value for _, value in tracker.history("engine/log_prob_gap")]
    assert len(gaps) == 3 and max(gaps) < EXACT
    assert processes_of_vllm() == []
    for key in ("return", "policy_loss", "entropy", "response_tokens"):
        expected = {row["steps"]: row[key] for row in beside if key in row}
        assert dict(tracker.history(key)) == pytest.approx(expected, abs=1e-4), key


def test_an_engine_of_two_processes_samples_with_adapters(ray_cluster, tmp_path):
    model = "{preset: tiny-1m, context: 32, lora: {rank: 4}}"
    team = (
        f"team={{first: {{agents: [a], model: {model}, generation: {{max_tokens: 4, engine: vllm}}}}, "
        "second: {agents: [b], model: {preset: tiny-0.2m, context: 32}}}"
    )
    more = ("resources.engines=1", "resources.tensor_parallel=2", "resources.cpus_per_worker=0.5")
    run_config, outcome = run(tmp_path, TWO_AGENTS, team, *more)
    gaps = [value for _, value in MlflowRun(run_config, outcome.run_id).history("first/engine/log_prob_gap")]
    assert len(gaps) == 3 and max(gaps) < EXACT


@pytest.mark.timeout(600)  # the run begins twice; each half waits 240 s at most
def test_an_engine_that_dies_costs_a_restart_of_the_workers_from_their_checkpoint(ray_cluster, tmp_path, capsys):
    run_config = config(
        f"storage={tmp_path}", "tracking.progress=false", ENGINE, "resources.engines=1", "train.total_steps=80"
    )
    with ThreadPoolExecutor() as threads:
        running = threads.submit(train, run_config)

        def engines() -> list[dict[str, str]]:
            return [actor for actor in ray.util.list_named_actors(True) if " engine " in actor["name"]]

        checkpoints = tmp_path / run_config.name
        until(
            lambda: running.done() or (engines() and [*checkpoints.glob("checkpoint_*/manifest.json")]),
            "an engine and a checkpoint",
            240,
        )
        assert not running.done(), "the run ended before its engine was killed"
        [engine] = engines()
        ray.kill(ray.get_actor(engine["name"], engine["namespace"]))
        outcome = running.result(timeout=240)
    restarts = [line for line in capsys.readouterr().err.splitlines() if "its workers start again from" in line]
    assert len(restarts) == 1
    assert (
        "the checkpoint of iteration" in restarts[0]
        and "worker 0: resources.engines: engine of policy speaker" in restarts[0]
    )
    steps = [step for step, _ in MlflowRun(run_config, outcome.run_id).history("return")]
    assert steps == sorted({*steps}) and steps[-1] == 80
    assert processes_of_vllm() == []


def test_an_engine_that_refuses_to_start_ends_the_run_with_one_line(ray_cluster, tmp_path):
    odd = config(f"storage={tmp_path}", ENGINE, "resources.engines=1", "resources.tensor_parallel=2")
    with pytest.raises(MarlRayError, match=r"expected a divisor of the 3 attention heads of team.speaker.model"):
        check_run(odd)
    with pytest.raises(MarlRayError, match=r"failed: worker 0: resources\.engines: engine of policy speaker: .* heads"):
        train(odd)


def test_a_cluster_without_room_for_the_engines_is_refused_at_once(ray_cluster, tmp_path):
    with pytest.raises(
        MarlRayError, match=r"resources.workers=1 and 9 for engines with cpus_per_worker=1 needs 10 CPUs"
    ):
        run(tmp_path, ENGINE, "resources.engines=9")
