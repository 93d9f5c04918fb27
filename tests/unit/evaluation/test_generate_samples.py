"""Samples that a bundle's language models write: the same however they are divided, resumed, and what is refused."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_models.tokens import add_noise
from toy_serving.gateways import make_bundle

from marl_ray.cli.evaluation import tasks
from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.envs.text.code_team import CodeTeam
from marl_ray.envs.text.tasks import CodeRecord, read_code, read_math
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import Problem, benchmark
from marl_ray.evaluation.data_files import ANY_DIGEST, load_problems
from marl_ray.evaluation.options import WritingRequest
from marl_ray.evaluation.writing.requests import SAMPLES_FILE, WRITING_FOLDER, write_samples
from marl_ray.evaluation.writing.writer import Writer
from marl_ray.policies.bundles.language import save_token_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.policies.language.token_policy import build_token_policy

FIXTURES = Path(__file__).parents[2] / "fixtures"
OWN = benchmark("jsonl")
TEAM = {"id": "code_team", "kwargs": {"turns": 2, "prompt": "{task}\n{tests}\n", "levels": [1]}, "cost": {}}


def problems(name: str = "jsonl", file: str = "own.jsonl") -> tuple[Problem, ...]:
    return load_problems(benchmark(name), str(FIXTURES / file), sha256=ANY_DIGEST).problems


def save(folder: Path, agents: dict[str, str], env: dict[str, Any], context: int = 512, **model: Any) -> str:
    """A bundle of untrained models that say a lot."""
    config = ModelConfig(preset="tiny-0.2m", context=context, **model)
    made = {}
    for seed, name in enumerate(sorted(set(agents.values()))):
        policy = build_token_policy(config, GenerationConfig(max_tokens=8, temperature=1.2), seed)
        made[name] = plain_copy(add_noise(policy))
    lineage = Lineage(run="r", algorithm={}, config_hash="c", code_version="0", seed=0, env=env, steps=1, metrics={})
    return str(save_token_bundle(folder, agents, made, lineage))


@pytest.fixture(scope="module")
def single_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("one"), {"solver": "only"}, {"id": "math"})


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("team"), {"generator": "writes", "reviewer": "reads"}, TEAM)


@pytest.mark.parametrize("name", ["single_policy", "team"])
def test_a_sample_depends_on_nothing_but_weights_seed_task_and_number(name, request):
    bundle = request.getfixturevalue(name)
    writer = Writer(WritingRequest(policy=bundle), OWN)
    jobs = [(problem, sample) for problem in problems() for sample in range(2 if name == "single_policy" else 1)]
    rows = writer.rows(jobs)
    assert [(row["task_id"], row["sample"]) for row in rows] == [(p.task_id, n) for p, n in jobs]
    assert [writer.rows([job])[0] for job in reversed(jobs)] == rows[::-1]
    assert len({json.dumps(row.get("turns", row.get("output"))) for row in rows}) == len(rows)
    assert Writer(WritingRequest(policy=bundle, seed=1), OWN).rows(jobs[:1])[0] != rows[0]


def test_a_code_team_plays_its_environment_and_its_last_program_is_the_sample(team):
    writer = Writer(WritingRequest(policy=team), OWN)
    row = writer.rows([(problems()[0], 0)])[0]
    assert [agent for agent, _ in row["turns"]] == ["generator", "reviewer", "generator"]
    assert row["solution"] == row["turns"][-1][1] and not row["truncated"]
    alone = Writer(WritingRequest(policy=team, agent="generator"), OWN)
    first = alone.rows([(problems()[0], 0)])[0]
    assert first["solution"] == row["turns"][0][1] and "turns" not in first
    assert alone.manifest(problems())["writer"] == "generator" and writer.manifest(problems())["writer"] == "team"


def test_a_team_goes_on_until_the_public_tests_pass_and_sees_no_others(team):
    problem, writer = problems()[0], Writer(WritingRequest(policy=team), OWN)
    turns = writer.turns(problem)
    assert next(turns) == ("generator", "Write add(a, b).\nassert add(1, 1) == 2\n")
    agent, seen = turns.send("def add(a, b): return a - b")
    assert agent == "reviewer" and "add(1, 1)=0 not 2" in seen and "add(1, 2)" not in seen
    agent, seen = turns.send("it should add")
    assert agent == "generator" and seen.endswith("it should add\n!")
    with pytest.raises(StopIteration):
        turns.send("def add(a, b): return a * b")
    turns = writer.turns(problem)
    next(turns)
    with pytest.raises(StopIteration):
        turns.send("def add(a, b): return 2 * b")  # only hidden tests would tell


def test_a_team_whose_next_prompt_is_too_long_hands_in_what_it_has(tmp_path):
    problem = problems()[0]
    length = len(
        next(Writer(WritingRequest(policy=save(tmp_path / "a", {"generator": "g"}, TEAM)), OWN).turns(problem))[1]
    )
    bundle = save(tmp_path / "b", {"generator": "g", "reviewer": "g"}, TEAM, context=length + 1 + 8)
    row = Writer(WritingRequest(policy=bundle), OWN).rows([(problem, 0)])[0]
    assert row["truncated"] and "turns" not in row and row["solution"]


def test_policies_are_shown_no_test_that_counts_unless_the_prompt_shows_it():
    problem = problems()[0]
    assert [test.source for test in problem.visible_task.public] == CodeRecord.model_validate_json(
        (FIXTURES / "own.jsonl").read_text().splitlines()[0]
    ).public_tests
    for problem in (*problems(), *problems("humaneval", "humaneval.jsonl"), *problems("mbpp", "mbpp.jsonl")):
        shown = problem.visible_task
        assert [test.source for test in shown.hidden] == (["pass"] if problem.entry_point else [])
        assert not shown.reference
        if problem.task_id.startswith("Mbpp"):
            assert shown.public and all(test.source in problem.prompt for test in shown.public)
    assert problems("humaneval", "humaneval.jsonl")[0].visible_task.public == ()


def test_what_an_answer_is_without_being_asked(single_policy, team, tmp_path):
    plain = save(tmp_path, {"a": "p"}, {"id": "math"}, chat=False)
    blocks = save(tmp_path, {"generator": "g"}, TEAM | {"kwargs": {"answer": "block", "reviewer": False}})
    for bundle, name, kind in [
        (single_policy, "humaneval", "output"),
        (plain, "humaneval", "completion"),
        (plain, "jsonl", "solution"),
        (team, "humaneval", "solution"),
        (blocks, "humaneval", "output"),
    ]:
        assert Writer(WritingRequest(policy=bundle), benchmark(name)).kind == kind
    assert Writer(WritingRequest(policy=single_policy, answer="solution"), OWN).kind == "solution"


def test_a_completion_ends_where_the_benchmark_says(tmp_path):
    writer = Writer(
        WritingRequest(policy=save(tmp_path, {"a": "p"}, {}, chat=False), max_tokens=30), benchmark("humaneval")
    )
    writer.benchmark = replace(writer.benchmark, stop=("e", "a", " "))
    rows = writer.rows([(problems("humaneval", "humaneval.jsonl")[0], n) for n in range(8)])
    assert not any(set("ea ") & set(row["completion"]) for row in rows)
    truncated = [row for row in rows if "turns" in row]
    assert truncated and all(row["turns"][0][1].startswith(row["completion"]) for row in truncated)
    stops = Writer(WritingRequest(policy=writer.request.policy), benchmark("mbpp")).generations["p"].stop
    assert stops == ("[DONE]",)


class Dies:
    """A source that ends after one batch."""

    def __init__(self, writer: Writer):
        self.writer, self.samples = writer, list[tuple[str, int]]()

    def manifest(self, problems: Sequence[Problem]) -> dict[str, Any]:
        return self.writer.manifest(problems)

    def write(self, jobs: Sequence[tuple[Problem, int]]) -> Iterator[list[dict[str, Any]]]:
        self.samples += [(problem.task_id, number) for problem, number in jobs]
        yield self.writer.rows(jobs[1:2])  # in any order
        raise KeyboardInterrupt


def test_what_was_written_before_a_kill_is_not_written_again(single_policy, tmp_path):
    request, header = WritingRequest(policy=single_policy, num_samples=2), {"benchmark": "jsonl", "data_sha256": "x"}
    writer = Writer(request, OWN)
    dies = Dies(writer)
    with pytest.raises(KeyboardInterrupt):
        write_samples(dies, request, problems(), header, tmp_path / "out")
    with open(tmp_path / "out" / WRITING_FOLDER / "results.jsonl", "ab") as file:
        file.write(b'{"what": "sample", "ta')
    assert not (tmp_path / "out" / SAMPLES_FILE).exists()
    with pytest.raises(KeyboardInterrupt):
        write_samples(dies, request, problems(), header, tmp_path / "out")
    assert dies.samples == [
        ("add", 0),
        ("add", 1),
        ("double", 0),
        ("double", 1),
        ("add", 0),
        ("double", 0),
        ("double", 1),
    ]
    folder, made = write_samples(writer, request, problems(), header, tmp_path / "out")
    complete, _ = write_samples(writer, request, problems(), header, tmp_path / "whole")
    assert (folder / SAMPLES_FILE).read_bytes() == (complete / SAMPLES_FILE).read_bytes()
    assert made.startswith("outputs of solver of bundle ") and made.endswith(
        "2 a problem (only: temperature 1.2, max_tokens 8)"
    )
    other = replace(request, seed=3)
    other_writer = Writer(other, OWN)
    with pytest.raises(MarlRayError, match="holds an evaluation with seed 0, not 3"):
        write_samples(other_writer, other, problems(), header, tmp_path / "out")


@pytest.mark.parametrize(
    ("bundle", "options", "message"),
    [
        ("single_policy", {"agent": "x"}, "^agent: expected one of solver, got 'x'$"),
        (
            "single_policy",
            {"num_samples": 2, "greedy": True},
            "^num_samples: expected 1, since greedy .*, got 2$",
        ),
        ("single_policy", {"prompt": "Say it."}, r"^prompt: expected \{prompt\} in it, got 'Say it.'$"),
        ("single_policy", {"temperature": 0.0}, "^temperature: expected a number greater than 0, got 0.0$"),
        ("single_policy", {"max_tokens": 0}, "^max_tokens: expected a number greater than 0, got 0$"),
        ("team", {"prompt": "{prompt}!"}, "^agent: expected one of generator, reviewer; only a code team"),
    ],
)
def test_options_that_do_not_fit_are_one_line(bundle, options, message, request):
    with pytest.raises(MarlRayError, match=message) as caught:
        Writer(WritingRequest(policy=request.getfixturevalue(bundle), **options), OWN)
    assert "\n" not in str(caught.value)


def test_bundles_that_cannot_answer_are_refused(tmp_path, single_policy):
    instead = r"; `marl-ray evaluate --episodes N` plays whole episodes with these$"
    with pytest.raises(MarlRayError, match=r"^policy: .* holds actor-critics, expected language models" + instead):
        Writer(WritingRequest(policy=make_bundle(tmp_path, 1)), OWN)
    first, *others = problems()
    longest = replace(first, task_id="long", prompt=first.prompt + "#" * 100)
    writer = Writer(WritingRequest(policy=single_policy, max_tokens=510), OWN)
    with pytest.raises(
        MarlRayError,
        match=r"long: prompt: 1\d\d tokens and generation.max_tokens=510 exceed model.context=512; "
        r"expected model.context=6\d\d or more \(team.\w+.model.context when the policy is trained\)$",
    ):
        writer.manifest([first, longest, *others])


def test_synthetic_tasks_as_a_file_are_those_that_the_environment_holds_out(tmp_path, capsys):
    tasks("python", count=6)
    (tmp_path / "t.jsonl").write_text(capsys.readouterr().out)
    read = read_code(str(tmp_path / "t.jsonl"))
    held_out = {task.prompt: task.code for task in CodeTeam().test}  # type: ignore[attr-defined]  # of its environment's tasks
    assert len(read) == 6 and all(held_out[task.prompt] == task.code for task in read)
    assert [p.task_id for p in load_problems(OWN, str(tmp_path / "t.jsonl")).problems] == [
        task.task_id for task in read
    ]
    tasks("arithmetic", split="train", count=3, levels="1,3")
    (tmp_path / "m.jsonl").write_text(capsys.readouterr().out)
    assert len(read_math(str(tmp_path / "m.jsonl"))) == 3
    with pytest.raises(MarlRayError, match=r"^--levels '9': levels: 9, expected some of 1 to 4$"):
        tasks("python", levels="9")
