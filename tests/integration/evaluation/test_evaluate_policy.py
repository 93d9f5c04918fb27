"""`marl-ray evaluate --policy`: language models write the samples, alone and on Ray, and are scored."""

import json
from pathlib import Path

import pytest
from toy_models.tokens import add_noise

from marl_ray.cli import main
from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import benchmark
from marl_ray.evaluation.data_files import load_problems
from marl_ray.evaluation.options import WritingRequest
from marl_ray.evaluation.writing.ray_writing import WriterNode, ray_writers
from marl_ray.evaluation.writing.writer import Writer
from marl_ray.policies.bundles.language import save_token_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.policies.language.token_policy import build_token_policy

pytestmark = pytest.mark.shared_ray("two")

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests/fixtures/own.jsonl"
ARGUMENTS = ["evaluate", "--benchmark", f"jsonl:{DATA}", "--local"]


def command(*arguments: str | Path) -> int:
    """Run it in this process, which has loaded torch before; its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([*ARGUMENTS, *map(str, arguments)])
    status = ended.value.code or 0
    assert isinstance(status, int), status
    return status


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained code team."""
    config = ModelConfig(preset="tiny-0.2m", context=512)
    policy = plain_copy(add_noise(build_token_policy(config, GenerationConfig(max_tokens=8), 0)))
    env = {"id": "code_team", "kwargs": {"turns": 2}, "cost": {}}
    lineage = Lineage(run="r", algorithm={}, config_hash="c", code_version="0", seed=0, env=env, steps=1, metrics={})
    agents = {"generator": "shared", "reviewer": "shared"}
    return str(save_token_bundle(tmp_path_factory.mktemp("team"), agents, {"shared": policy}, lineage))


def test_a_bundle_is_measured_and_a_second_call_writes_nothing_anew(team, tmp_path, capsys):
    arguments = ["--policy", team, "--num-samples", "2", "--max-tokens", "6", "--out", tmp_path / "out"]
    assert command(*arguments) == 0
    printed = capsys.readouterr().out
    assert "; solutions of team of bundle " in printed and "hardened  pass@1    0.0 " in printed
    report = json.loads((tmp_path / "out/report.json").read_bytes())
    assert report["samples"] == 4 and "max_tokens 6" in report["evaluation"]["variant"]
    samples = (tmp_path / "out/samples.jsonl").read_bytes()
    rows = [json.loads(line) for line in samples.splitlines()]
    assert [(row["task_id"], row["sample"]) for row in rows] == [("add", 0), ("add", 1), ("double", 0), ("double", 1)]
    assert all(row["turns"][-1][1] == row["solution"] for row in rows)
    results = (tmp_path / "out/results.jsonl").read_bytes()
    (tmp_path / "out/samples.jsonl").unlink()
    assert command(*arguments) == 0
    assert (tmp_path / "out/samples.jsonl").read_bytes() == samples
    assert (tmp_path / "out/results.jsonl").read_bytes() == results


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--policy: expected a bundle, which writes samples, or `samples`, ready ones"),
        (["--samples", DATA, "--num-samples", "2"], "--num-samples: expected with a policy, not with ready samples"),
        (["--samples", DATA, "--tracking-uri", "x"], "--tracking-uri: expected with a policy, not with ready samples"),
        (["--policy", "TEAM", "--k", "2"], "--k: problem 'add' has only 1 sample, not 2"),
        (["--policy", "TEAM", "--data", DATA], "--benchmark: expected jsonl and data, or jsonl:FILE, got jsonl:"),
        (["--policy", "nowhere"], "bundle 'nowhere' has no readable bundle.json"),
        (["--policy", "TEAM", "--max-tokens", "0"], "--max-tokens: expected a whole number of 1 or more, got 0"),
        (
            ["--policy", "TEAM", "--max-tokens", "500"],
            "double: prompt: 34 tokens and generation.max_tokens=500 exceed model.context=512",
        ),
    ],
)
def test_mistakes_are_one_line_and_status_2(team, arguments, message, tmp_path, capsys):
    filled = [team if argument == "TEAM" else argument for argument in arguments]
    assert command(*filled, "--out", tmp_path / "out") == 2
    output = capsys.readouterr().err
    assert message in output and len(output.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_the_environments_tracking_server_is_nothing_to_ready_samples(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"task_id": name, "solution": "1"}) + "\n" for name in ("add", "double")))
    assert command("--samples", samples, "--out", tmp_path / "out") == 0


@pytest.mark.long
def test_on_ray_the_samples_are_those_of_one_process(ray_cluster, team):
    problems = load_problems(benchmark("jsonl"), str(DATA)).problems
    request, jobs = (
        WritingRequest(policy=team, num_samples=2),
        [(problem, sample) for problem in problems for sample in range(2)],
    )
    writer = Writer(request, benchmark("jsonl"))
    with ray_writers(request, "jsonl") as source:
        assert source.manifest(problems) == writer.manifest(problems)
        rows = [row for batch in source.write(jobs) for row in batch]
    assert sorted(rows, key=lambda row: (row["task_id"], row["sample"])) == writer.rows(jobs)
    with (
        ray_writers(WritingRequest(policy=team, agent="x"), "jsonl") as source,
        pytest.raises(MarlRayError, match=r"^agent: expected one of generator, reviewer, got 'x'$"),
    ):
        source.manifest(problems)


@pytest.mark.long
def test_an_actor_that_dies_before_it_has_read_the_bundle_is_left_out(ray_cluster, team):
    import ray

    request = WritingRequest(policy=team, max_tokens=8)
    problems = load_problems(benchmark("jsonl"), str(DATA)).problems
    with ray_writers(request, "jsonl") as source:
        actors = vars(source)["actors"]
        ray.kill(actors[0])
        with pytest.raises(MarlRayError, match=r"^evaluate: every actor died while it read the bundle: "):
            source.manifest(problems)
        actors.append(ray.remote(WriterNode).remote(request, "jsonl"))
        assert source.manifest(problems) == Writer(request, benchmark("jsonl")).manifest(problems)
        assert [row["task_id"] for rows in source.write([(problem, 0) for problem in problems]) for row in rows] == [
            "add",
            "double",
        ]
