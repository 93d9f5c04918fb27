"""Arguments of `marl_ray.evaluate`: their types, and the places that list them."""

import dataclasses
import inspect
import re
import typing
from pathlib import Path

import numpy as np
import pytest
from typer.models import OptionInfo

import marl_ray
from marl_ray.api.evaluating.arguments import OPTIONS, convert_options
from marl_ray.api.evaluating.call import SandboxLevel, ScoringMode
from marl_ray.cli.evaluation import evaluate as command
from marl_ray.errors import FieldError
from marl_ray.evaluation.benchmarks import AnswerKind
from marl_ray.evaluation.options import EpisodeOptions, RunningOptions, ScoringOptions, WebRequest, WritingRequest
from marl_ray.sandbox import Level

BENCHMARK_RECORDS = (ScoringOptions, WritingRequest, RunningOptions, WebRequest)
MANY = np.arange(1000)
WHOLE_NUMBER = "expected a whole number of"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("benchmark", 3, "expected a benchmark's name, got 3"),
        ("benchmark", Path("mbpp"), "expected a benchmark's name, got PosixPath('mbpp')"),
        ("benchmark", ["mbpp"], "expected a benchmark's name, got ['mbpp']"),
        ("policy", 3, "expected a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS, got 3"),
        ("policy", False, "expected a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS, got False"),
        ("samples", ["a.jsonl"], "expected a file or a URI, got ['a.jsonl']"),
        ("data", 3, "expected a file, a URI or another source of problems, got 3"),
        ("split", ("test",), "expected the name of a part of the problems, got ('test',)"),
        ("sha256", b"ab", "expected a SHA-256 or any, got b'ab'"),
        ("out", 3, "expected a folder, got 3"),
        ("k", "10", "expected a whole number or a sequence of them, got '10'"),
        ("k", True, "expected a whole number or a sequence of them, got True"),
        ("k", [1, 2.5], "expected a whole number or a sequence of them, got [1, 2.5]"),
        ("k", np.array([1, 10]), "expected a whole number or a sequence of them, got array([ 1, 10])"),
        ("mode", ["official"], "expected official, hardened or both, got ['official']"),
        ("timeout_s", "3", "expected seconds, more than 0 and less than a day (86,400), got '3'"),
        ("timeout_s", float("nan"), "expected seconds, more than 0 and less than a day (86,400), got nan"),
        ("timeout_s", True, "expected seconds, more than 0 and less than a day (86,400), got True"),
        ("min_level", 3, "expected limits, paths or namespaces, got 3"),
        ("min_level", "none", "expected limits, paths or namespaces, got 'none'"),
        ("workers", "2", f"{WHOLE_NUMBER} 1 or more, got '2'"),
        ("workers", 0, f"{WHOLE_NUMBER} 1 or more, got 0"),
        ("local", 1, "expected True or False, got 1"),
        ("local", "no", "expected True or False, got 'no'"),
        ("env", ["max_steps=20"], "expected options of the environment by name, got ['max_steps=20']"),
        ("env", {3: 4}, "expected options of the environment by name, got {3: 4}"),
        ("tracking_uri", Path("mlflow.db"), "expected a URI, got PosixPath('mlflow.db')"),
        ("progress", True, "expected a function of what is counted, the number done and the total, got True"),
        ("agent", ["solver"], "expected an agent's name, got ['solver']"),
        ("num_samples", 2.0, f"{WHOLE_NUMBER} 1 or more, got 2.0"),
        ("num_samples", MANY, f"{WHOLE_NUMBER} 1 or more, got array([ 0, 1, 2, 3, 4,"),
        ("seed", False, f"{WHOLE_NUMBER} 0 or more, got False"),
        ("seed", -1, f"{WHOLE_NUMBER} 0 or more, got -1"),
        ("greedy", "yes", "expected True or False, got 'yes'"),
        ("temperature", "hot", "expected a finite number, got 'hot'"),
        ("temperature", float("inf"), "expected a finite number, got inf"),
        ("temperature", 10**400, "expected a finite number, got 1000"),
        ("max_tokens", float("nan"), f"{WHOLE_NUMBER} 1 or more, got nan"),
        ("answer", "essay", "expected completion, solution or output, got 'essay'"),
        ("prompt", Path("prompt.txt"), "expected a text, got PosixPath('prompt.txt')"),
        ("episodes", "8", f"{WHOLE_NUMBER} 1 or more, got '8'"),
        ("max_steps", [1], f"{WHOLE_NUMBER} 1 or more, got [1]"),
    ],
)
def test_an_option_of_a_wrong_type_is_named_in_one_line_with_what_is_expected(option, value, expected):
    with pytest.raises(FieldError, match=f"^{option}: {re.escape(expected)}") as caught:
        marl_ray.evaluate(**{"benchmark": "mbpp"} | {option: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_right_options_become_what_the_records_hold():
    options = {
        "policy": Path("bundle"),
        "out": "runs",
        "k": np.int64(2),
        "timeout_s": np.float32(2),
        "min_level": "paths",
        "num_samples": np.int64(3),
        "seed": 0,
        "greedy": False,
        "local": True,
        "env": {"max_steps": 3},
        "prompt": None,
    }
    converted = convert_options(options)
    assert converted == {
        "policy": "bundle",
        "out": Path("runs"),
        "k": (2,),
        "timeout_s": 2.0,
        "min_level": Level.PATHS,
        "num_samples": 3,
        "seed": 0,
        "local": True,
        "env": {"max_steps": 3},
    }
    assert [type(converted[name]) for name in ("timeout_s", "num_samples")] == [float, int]
    assert convert_options({"k": (1, 10), "min_level": Level.LIMITS}) == {"k": (1, 10), "min_level": Level.LIMITS}


def test_the_command_the_signatures_and_the_records_have_the_same_options():
    of_benchmark, of_episodes = map(_parameters, typing.get_overloads(marl_ray.evaluate))
    assert set(of_benchmark) == {field.name for record in BENCHMARK_RECORDS for field in dataclasses.fields(record)}
    assert set(of_episodes) == {field.name for field in dataclasses.fields(EpisodeOptions)}
    assert set(of_benchmark) | set(of_episodes) == set(OPTIONS)
    # The command shows progress by itself.
    assert set(_parameters(command)) - {"ctx", "as_json"} == set(OPTIONS) - {"progress"}


def test_the_docstring_names_every_option():
    documented = marl_ray.evaluate.__doc__
    listed = {
        name for names in re.findall(r"^    - ([a-z0-9_, ]+):", documented, re.MULTILINE) for name in names.split(", ")
    }
    listed |= {name for name in ("benchmark", "policy", "samples", "episodes") if f"`{name}`" in documented}
    assert listed == set(OPTIONS)


def test_all_places_have_the_same_defaults():
    _, of_episodes = map(_parameters, typing.get_overloads(marl_ray.evaluate))
    seed, max_steps = EpisodeOptions.seed, EpisodeOptions.max_steps
    assert (of_episodes["seed"].default, of_episodes["max_steps"].default) == (seed, max_steps)
    assert _help("seed") == f"Seed of sampling, {WritingRequest.seed} by default; with --episodes of them, {seed}."
    assert f"{max_steps} by default" in _help("max_steps") and f"{max_steps} by default" in marl_ray.evaluate.__doc__
    assert f"{seed} by default" in marl_ray.evaluate.__doc__
    assert f"{WritingRequest.num_samples} by default" in _help("num_samples")
    assert f"{ScoringOptions.min_level.name.lower()} by default" in _help("min_level")


def test_all_places_have_the_same_choices():
    choices = {"mode": ScoringMode, "min_level": SandboxLevel, "answer": AnswerKind}
    for option, literal in choices.items():
        annotation = _parameters(command)[option].annotation
        taken_by_command, _ = typing.get_args(typing.get_args(annotation)[0])
        assert typing.get_args(taken_by_command) == typing.get_args(literal), option
    assert [level.name.lower() for level in Level] == list(typing.get_args(SandboxLevel))


def test_the_command_and_the_call_have_the_same_least_numbers():
    for option in OPTIONS:
        if option == "progress":
            continue
        (info,) = (
            part for part in _parameters(command)[option].annotation.__metadata__ if isinstance(part, OptionInfo)
        )
        if info.min is not None:
            convert_options({option: info.min})
            with pytest.raises(FieldError, match=f"^{option}: {WHOLE_NUMBER} {info.min} or more, got {info.min - 1}$"):
                convert_options({option: info.min - 1})


def _parameters(function: typing.Callable) -> typing.Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _help(option: str) -> str:
    (info,) = (part for part in _parameters(command)[option].annotation.__metadata__ if isinstance(part, OptionInfo))
    assert info.help is not None, option
    return info.help
