"""Benchmarks that are measured while language models train: they change nothing, and are measured once."""

import json
from pathlib import Path

import pytest
import torch
from processes.two_workers import two_workers
from toys.texts import config, train_rows

from marl_ray.errors import MarlRayError
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.driver import train
from marl_ray.training.evaluation import benchmarks
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.callbacks import Metrics
from marl_ray.training.loop.start import RunStart
from marl_ray.training.run_checks import check_run
from marl_ray.training.run_folder.run_log import LOG_FILE
from marl_ray.training.single_process import train_alone
from marl_ray.training.tracking.mlflow_run import MlflowRun

pytestmark = [pytest.mark.shared_ray("two"), pytest.mark.usefixtures("alone")]

FIXTURES = Path(__file__).parents[3] / "fixtures"
WARM = "warm_start={data: environment, count: 64, batch: 8, epochs: 4, lr: 0.003}"
MODEL = "team={speaker: {model: {preset: tiny-0.2m, context: 128}, generation: {max_tokens: 4}}}"


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """Problems that the toy environment's demonstrations teach in part: say the letter."""
    path = tmp_path / "letters.jsonl"
    lines = [{"prompt": letter, "answer": letter, "task_id": f"{letter}{n}"} for n in range(3) for letter in "abc"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def measure_override(letters: Path, *more: str) -> str:
    parts = [f"name: math, data: '{letters}', samples: 2", *more]
    return f"evaluation.benchmarks=[{{{', '.join(parts)}}}]"


def drop_times(rows: list[Metrics], *left_out: str) -> list[Metrics]:
    prefixes = ("time/", "steps_per", "tokens_per", "benchmark/hours", "benchmark/price", *left_out)
    return [{key: value for key, value in row.items() if not key.startswith(prefixes)} for row in rows]


def weights(checkpoint: Path, *overrides: str) -> dict[str, torch.Tensor]:
    run = build_run(config(*overrides), torch.device("cpu"), RunStart([local_stored_folder(checkpoint)]))
    (model,) = run.team.models.values()
    run.close()
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_a_measured_run_trains_bit_for_bit_as_one_that_is_not(tmp_path, letters):
    every = measure_override(letters, "every: 1", "temperature: 0.7")
    often = train_rows(str(tmp_path / "often"), MODEL, WARM, every, "resources.hourly_price=3.6")
    never = train_rows(str(tmp_path / "never"), MODEL, WARM)
    assert drop_times([row for row in often if row.get("iteration")], "benchmark/") == drop_times(
        [row for row in never if "iteration" in row]
    )
    with_benchmarks, without = (weights(tmp_path / name / "3", MODEL) for name in ("often", "never"))
    assert with_benchmarks.keys() == without.keys()
    assert all(torch.equal(with_benchmarks[key], without[key]) for key in without)

    curve = [row for row in often if "benchmark/math/pass_at_1" in row]
    assert [row["iteration"] for row in curve] == [0, 1, 2, 3]
    for row in curve:
        assert 0 <= row["benchmark/math/pass_at_1_low"] <= row["benchmark/math/pass_at_1"] <= 1
        assert row["benchmark/math/pass_at_1"] <= row["benchmark/math/pass_at_2"]
        assert row["benchmark/price"] == pytest.approx(3.6 * row["benchmark/hours"])
    assert curve[0]["benchmark/math/pass_at_1"] > 0.2  # the demonstrations have taught two of three letters
    tokens = [row["tokens"] for row in often if row.get("iteration")]
    assert [row["benchmark/tokens"] for row in curve] == [0, *(sum(tokens[: k + 1]) for k in range(3))]
    assert curve[0]["benchmark/hours"] == 0 < curve[1]["benchmark/hours"] < curve[2]["benchmark/hours"]


def test_weights_that_were_measured_are_saved_so_that_a_resumed_run_measures_none_twice(tmp_path, letters):
    options = (MODEL, WARM, "checkpoint.every=100", measure_override(letters, "every: 2"))
    rows = train_rows(str(tmp_path / "run"), *options)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["0", "2", "3"]
    assert [row["iteration"] for row in rows if "benchmark/math/pass_at_1" in row] == [0, 2, 3]
    for begun in (0, 2):
        resumed = train_alone(config(*options), resume=tmp_path / "run" / str(begun))
        assert drop_times(resumed) == drop_times([row for row in rows if row.get("iteration", 0) > begun])


@pytest.mark.slow
def test_workers_share_the_problems_and_measure_what_one_does(tmp_path, letters):
    options = (MODEL, WARM, measure_override(letters, "every: 2"))
    single = [row for row in train_rows(str(tmp_path / "one"), *options) if "benchmark/tokens" in row]
    two = two_workers(train_rows, str(tmp_path / "two"), *options, "resources.workers=2", "resources.hourly_price=7")
    two = [row for row in two if "benchmark/tokens" in row]
    assert all(row["benchmark/price"] == pytest.approx(14 * row["benchmark/hours"]) for row in two)
    for row in (*single, *two):
        row["here"] = json.dumps({key: row[key] for key in sorted(row) if key.startswith("benchmark/math")})
    assert [row["here"] for row in two][:1] == [row["here"] for row in single][:1]  # then gradients differ by rounding
    assert [row["iteration"] for row in two] == [row["iteration"] for row in single] == [0, 2, 3]


@pytest.mark.long
def test_a_policy_that_samples_by_transformers_is_measured_by_it(letters):
    model = MODEL.replace("max_tokens: 4", "max_tokens: 4, engine: transformers")
    rows = train_alone(config(model, WARM, "train.total_steps=8", measure_override(letters)))
    assert [row["iteration"] for row in rows if row.get("benchmark/math/pass_at_1", 0) > 0.2] == [0, 1]


def test_a_judge_that_fails_is_a_line_and_a_metric_and_training_goes_on(letters, monkeypatch, capfd):
    make_pool, calls = benchmarks.make_pool, iter([True, False, True, True])  # type: ignore[attr-defined]  # the test replaces it

    def sometimes(*arguments: object) -> object:
        if next(calls):
            return make_pool(*arguments)
        raise MarlRayError("the sandbox cannot start: no room")

    monkeypatch.setattr(benchmarks, "make_pool", sometimes)
    rows = train_alone(config(MODEL, measure_override(letters, "every: 1")))
    failed = {row["iteration"]: row.get("benchmark/math/failed") for row in rows}
    assert failed == {0: None, 1: 1.0, 2: None, 3: None} and "benchmark/math/pass_at_1" not in rows[1]
    assert capfd.readouterr().err.splitlines() == [
        "toy-text, iteration 1: evaluation.benchmarks.math was not measured: worker 0: the sandbox cannot start: no room; "
        "training continues"
    ]
    calls = iter([False])
    with pytest.raises(
        MarlRayError, match=r"^evaluation\.benchmarks\.math was not measured: worker 0: the sandbox cannot"
    ):
        train_alone(config(MODEL, measure_override(letters)))


@pytest.mark.long
def test_a_curve_is_of_one_file(tmp_path, letters):
    options = (MODEL, "checkpoint.every=1", measure_override(letters))
    train_rows(str(tmp_path / "run"), *options)
    letters.write_text(letters.read_text().splitlines()[0] + "\n")
    with pytest.raises(MarlRayError, match=r"evaluation\.benchmarks\.math\.data: sha256 is [0-9a-f]{64}, expected "):
        train_alone(config(*options), resume=tmp_path / "run" / "1")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("name: jsonl, data: nowhere.jsonl", "nowhere.jsonl: cannot be read"),
        ("name: jsonl, data: 'LETTERS'", "letters.jsonl:1: unknown key 'answer'"),
        ("name: humaneval, data: 'LETTERS'", "evaluation.benchmarks.humaneval.sha256: .* takes this file as it is"),
        ("name: math, data: 'LETTERS', split: test", "evaluation.benchmarks.math.split: math has all, not 'test'"),
        ("name: math, data: 'LETTERS', problems: 10", "evaluation.benchmarks.math.problems: .* has 9, not 10"),
        ("name: math, data: 'LETTERS', agent: b", "evaluation.benchmarks.math.agent: expected one of a, got 'b'"),
        (
            "name: math, data: 'LETTERS', prompt: Answer!",
            "evaluation.benchmarks.math.prompt: expected {prompt}",
        ),
        (
            f"name: math, data: 'LETTERS', prompt: '{'x' * 130}{{prompt}}'",
            "evaluation.benchmarks.math: a0: prompt: 132 tokens and generation.max_tokens=4 exceed model.context=128",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line_before_a_cluster_starts(entry, message, tmp_path, letters):
    override = f"evaluation.benchmarks=[{{{entry.replace('LETTERS', str(letters))}}}]"
    with pytest.raises(MarlRayError, match=message) as caught:
        check_run(config(MODEL, override, f"storage={tmp_path}"))
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_code_team_writes_together_and_its_programs_are_tested(tmp_path):
    team = "{model: {preset: tiny-0.2m, context: 512}, generation: {max_tokens: 6}}"
    run = config(
        "env={id: code_team, kwargs: {count: 8, turns: 2}}",
        f"team={{both: {team}}}",
        f"evaluation.benchmarks=[{{name: jsonl, data: '{FIXTURES / 'own.jsonl'}'}}, "
        f"{{name: humaneval_plus, data: '{FIXTURES / 'humaneval_plus.jsonl'}', sha256: any, problems: 1}}]",
        f"storage={tmp_path}",
        "train.total_steps=8",
    )
    check_run(run)
    first, *_, last = train_alone(run)
    for row in (first, last):
        assert row["benchmark/jsonl/pass_at_1"] == row["benchmark/humaneval_plus/pass_at_1"] == 0
        assert row["benchmark/humaneval_plus/base_pass_at_1"] == 0


@pytest.mark.slow
def test_a_run_on_ray_whose_worker_dies_logs_and_draws_the_curve(ray_cluster, tmp_path, letters, capsys):
    marker = tmp_path / "died"
    env = {"id": "toys.texts:echo", "kwargs": {"marker": str(marker), "at": 39}}
    quiet = (f"storage={tmp_path}", "checkpoint.every=100", "tracking.progress=false", "train.total_steps=480")
    more = (f"env={json.dumps(env)}", measure_override(letters, "every: 20"), "resources.hourly_price=2")
    run = config(MODEL, WARM, *quiet, *more)
    check_run(run)
    outcome = train(run)
    assert marker.exists()
    why = "its workers start again from the checkpoint of iteration 20: worker 0: "
    (line,) = [line for line in capsys.readouterr().err.splitlines() if why in line]
    assert line.startswith(f"{run.name}: {why}ActorDiedError: ")
    assert line.removeprefix(f"{run.name}: ") in (tmp_path / run.name / LOG_FILE).read_text()
    tracker = MlflowRun(run, outcome.run_id)
    logged = tracker.client.get_metric_history(outcome.run_id, "benchmark/math/pass_at_1")
    assert sorted(metric.step for metric in logged) == [0, 160, 320, 480]  # the death in iteration 39 repeats none
    assert [step for step, _ in tracker.history("benchmark/price")] == [0, 160, 320, 480]
    last = tracker.history("benchmark/math/pass_at_1")[-1][1]
    (line,) = [line for line in outcome.summary if line.startswith("math    ")]
    assert line.startswith(f"math    pass@1 {last:.3f} (") and f"{logged[0].value:.3f} at first" in line
    assert (tmp_path / run.name / "benchmarks.png").read_bytes().startswith(b"\x89PNG")
    assert "benchmarks.png" in [artifact.path for artifact in tracker.client.list_artifacts(outcome.run_id)]
