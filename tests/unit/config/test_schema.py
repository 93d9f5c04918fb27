"""The keys of configs: how many a run reads, what they say, and how much their package loads."""

import json
import subprocess
import sys
from typing import Any

import pytest

from marl_ray.cli import main
from marl_ray.config import SPECS, HyperParameters, PolicyConfig, RunConfig
from marl_ray.config.run.algorithms import READ_WITH_KEY


def test_importing_configs_loads_neither_torch_nor_ray():
    code = "import sys, marl_ray.config; print(*sorted({'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def _leaves() -> dict[str, dict[str, Any]]:
    schema = RunConfig.model_json_schema()
    leaves: dict[str, dict[str, Any]] = {}

    def walk(node: dict[str, Any], prefix: str) -> None:
        for name, value in node["properties"].items():
            options = [value, value.get("additionalProperties"), *value.get("anyOf", [])]
            references = [o["$ref"] for o in options if isinstance(o, dict) and "$ref" in o]
            below = schema["$defs"][references[0].rsplit("/", 1)[1]] if references else {}
            if "properties" in below:
                walk(below, f"{prefix}{name}.")
            else:
                leaves[prefix + name] = value

    walk(schema, "")
    return leaves


@pytest.mark.parametrize("language", [False, True])
def test_no_run_reads_more_than_a_hundred_keys(language):
    """That holds for every algorithm.

    The keys of the other family of policies and of other algorithms are not for it, and a run with `data` reads that
    key and three fewer of `train`. A model comes from `path` or from `preset`, and a warm start, which has more keys,
    is refused beside `kl_coef` and beside `resume_from`.
    """
    leaves = _leaves()
    assert "team.agents" in leaves and "hyper.lr" in leaves and "team.model.lora.rank" in leaves  # it does go down
    of_language_models = (
        "data",
        "team.model.",
        "team.generation.",
        "train.curriculum",
        "evaluation.tasks",
        "evaluation.samples",
        "evaluation.benchmarks",
        "resources.hourly_price",
        "warm_start.count",
    )
    unread_by_language_models = (
        "team.network.",
        "env.cost.",
        "train.rollout",
        "warm_start.top",
        "data",
        "team.model.preset",
        "evaluation.episodes",
        "evaluation.max_steps",
        "team.model.cpu_offload",  # refused beside groups of `resources.parallel`
        "train.overlap",  # refused beside language models
    )
    others = (*(unread_by_language_models if language else of_language_models), "resume_from")
    family = [key for key in leaves if not key.startswith("hyper.") and not key.startswith(others)]
    held = {"kl_coef", *(key for key, part in READ_WITH_KEY.items() if part == "kl_coef")} if language else set()
    own_keys = max(len(set(spec.read_keys) - held) for spec in SPECS.values() if spec.token_policies or not language)
    assert len(family) + own_keys <= 100


def test_every_key_says_what_it_is():
    plain = {"seed", "team.network.activation", "hyper.adam_eps", "hyper.entropy_coef", "tracking.experiment"}
    plain |= {"resources.cpus_per_worker"}
    assert {key for key, value in _leaves().items() if "description" not in value} <= plain


def test_defaults_are_valid():
    assert HyperParameters().clip == 0.2
    assert PolicyConfig().agents == ("*",)


@pytest.mark.parametrize("kind", ["run", "sweep", "experiment", "gateway"])
def test_every_kind_of_config_has_a_schema(kind, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["config", "schema", kind])
    assert caught.value.code == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["type"] == "object"
