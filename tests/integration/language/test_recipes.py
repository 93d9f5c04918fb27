"""The recipes for large models in jobs/configs, checked and begun with a tiny model: prompts, tools, tasks, benchmarks."""

import json
from pathlib import Path

import pytest

from marl_ray.config import RunConfig, parse_config, read_yaml
from marl_ray.training.run_checks import check_run
from marl_ray.training.single_process import train_alone

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
TINY = {"preset": "tiny-0.2m", "context": 3000}
SMALL = [
    "train.env_copies=8",
    "train.total_steps=8",
    "resources.workers=1",
    "resources.device=cpu",
    "evaluation.every=0",
]


def recipe(name: str, files: dict[str, Path], folder: Path, *overrides: str) -> RunConfig:
    """The recipe with a tiny model, other files in place of its own, and the engine that is always there."""
    data = read_yaml(ROOT / "jobs/configs" / name)
    text = json.dumps(data)
    for placeholder, path in files.items():
        assert placeholder in text, placeholder
        text = text.replace(placeholder, str(path))
    data = json.loads(text)
    for policy in data["team"].values():
        policy |= {"model": TINY, "generation": {"max_tokens": 8}}
    for benchmark in data["evaluation"]["benchmarks"]:
        benchmark |= {"problems": 1, "sha256": "any"}
    return parse_config(RunConfig, data, [*SMALL, f"storage={folder}", *overrides])


def begin(run: RunConfig, *names: str) -> None:
    check_run(run)
    rows = train_alone(run)
    for row in (rows[0], rows[-1]):
        assert all(f"benchmark/{name}/pass_at_1" in row for name in names) and "benchmark/price" in row


@pytest.mark.long
def test_the_code_team_begins(tmp_path):
    files = {
        "data/programs.jsonl": FIXTURES / "own.jsonl",
        "data/held_out.jsonl": FIXTURES / "own.jsonl",
        "data/measured.jsonl": FIXTURES / "own.jsonl",
        "data/HumanEvalPlus.jsonl.gz": FIXTURES / "humaneval_plus.jsonl",
        "data/MbppPlus.jsonl.gz": FIXTURES / "mbpp_plus.jsonl",
    }
    begin(recipe("qwen_coder_team.yaml", files, tmp_path), "humaneval_plus", "mbpp_plus", "jsonl")


@pytest.mark.long
def test_the_agent_with_tools_begins(tmp_path, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "none")  # an untrained model makes no call
    files = {
        "data/questions.jsonl": FIXTURES / "math.jsonl",
        "data/held_out.jsonl": FIXTURES / "math.jsonl",
        "data/math.jsonl": FIXTURES / "math.jsonl",
        "data/searches.sqlite": tmp_path / "searches.sqlite",
    }
    begin(recipe("qwen_react.yaml", files, tmp_path, "hyper.lr=1.0e-4"), "math")
