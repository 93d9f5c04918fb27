"""Built-ins, entry points of installed packages and `package.module:NAME` come through one door."""

import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from marl_ray import extensions
from marl_ray.algorithms import algorithm_of
from marl_ray.config import ModelConfig, RunConfig, parse_config
from marl_ray.config.serving.arms import ArmConfig
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MAX_COMPARED, MarlRayError, did_you_mean
from marl_ray.evaluation.benchmarks import benchmark
from marl_ray.extensions import ALGORITHM, BENCHMARK, ENVIRONMENT
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.choice import has_weights, make_engine
from marl_ray.policies.language.token_policy import build_token_policy
from marl_ray.training.tracking.sinks import check_sinks, open_sink
from marl_ray.tuning.search.schedulers import make_scheduler


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path whose packages have metadata as pip writes it."""
    monkeypatch.syspath_prepend(tmp_path)
    extensions.installed_points.cache_clear()
    yield tmp_path
    extensions.installed_points.cache_clear()


def install(folder: Path, package: str, points: str) -> None:
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)


def test_a_package_ships_an_algorithm_by_name(installed):
    (installed / "shipped_ppo.py").write_text("from marl_ray.algorithms.with_critic.ppo import PPO as OURS\n")
    install(installed, "shipped", "[marl_ray.algorithms]\nour_ppo = shipped_ppo:OURS\nppo = shipped_ppo:OTHER\n")
    assert algorithm_of("our_ppo") is algorithm_of("ppo")
    assert ALGORITHM.names()[-1] == "our_ppo" and ALGORITHM.names().count("ppo") == 1
    sys.modules.pop("shipped_ppo")


@pytest.mark.parametrize(
    ("kind", "text", "meant"),
    [
        (ALGORITHM, "from marl_ray.algorithms.with_critic.ppo import PPO as OURS\n", "mine_here:OURS?"),
        (ENVIRONMENT, "class Maze:\n    pass\n", "mine_here:Maze?"),
        (ENVIRONMENT, "raise OSError\n", "mine_here:NAME?"),
    ],
)
def test_the_name_of_a_module_in_this_folder_alone_is_told_what_it_lacks(kind, text, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("mine_here.py").write_text(text)
    importlib.invalidate_caches()
    with pytest.raises(MarlRayError) as refused:
        kind.reference("mine_here")
    sys.modules.pop("mine_here", None)
    assert str(refused.value) == f"'mine_here' is unknown; did you mean {meant}"


def test_a_name_that_two_packages_claim_is_refused_with_both(installed):
    install(installed, "one", "[marl_ray.environments]\nmaze = one_maze:make\n")
    install(installed, "two", "[marl_ray.environments]\nmaze = two_maze:make\n")
    with pytest.raises(MarlRayError, match=r"^'maze' is of one and two; expected package\.module:NAME to say which$"):
        ENVIRONMENT.reference("maze")


@pytest.mark.parametrize("point", extensions.POINTS.values(), ids=lambda point: point.kind)
def test_every_built_in_is_where_its_extension_point_says(point):
    for name in point.builtins:
        assert callable(point.load(name)) or point in (ALGORITHM, BENCHMARK)


def add(count: int | None, share: float, is_kept: bool, either: int | bool, sizes: Sequence[int], text: str) -> None:
    """A part with an option of each type."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"count": True}, "count=True, expected a number"),
        ({"share": False}, "share=False, expected a number"),
        ({"sizes": [2, True]}, "sizes=[2, True], expected no true or false in it"),
        ({"count": 2.5}, "count=2.5, expected a whole number"),
        ({"either": float("inf")}, "either=inf, expected a whole number"),
        ({"sizes": [2, 1.5]}, "sizes=[2, 1.5], expected whole numbers in it"),
    ],
)
def test_an_option_takes_only_numbers_of_its_kind(options, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        extensions.check_numbers(add, options)
    with pytest.raises(MarlRayError) as refused:
        extensions.check_options("add", add, options)
    assert str(refused.value) == f"add rejected {options} ({words})"


def test_an_option_that_is_no_number_takes_a_bool():
    extensions.check_numbers(
        add, {"is_kept": True, "either": False, "text": True, "share": 1, "count": 1, "sizes": [1, 2]}
    )
    extensions.check_numbers(dict, {"count": True})  # it has no signature


@pytest.mark.parametrize("point", [ENVIRONMENT, extensions.REWARD, extensions.TOOL], ids=lambda point: point.kind)
def test_no_number_of_a_built_in_part_takes_a_bool_and_no_whole_one_a_fraction(point):
    for name in point.builtins:
        part = point.load(name)
        for option, parameter in inspect.signature(part).parameters.items():
            if type(parameter.default) in (int, float):
                with pytest.raises(ValueError, match=f"^{option}=True, expected a number$"):
                    extensions.check_numbers(part, {option: True})
            if type(parameter.default) is int:
                with pytest.raises(ValueError, match=rf"^{option}=1\.5, expected a whole number$"):
                    extensions.check_numbers(part, {option: 1.5})


PARTS = """
from marl_ray.config.schedulers import SchedulerSettings
from marl_ray.evaluation.benchmarks.humaneval import HUMANEVAL as OWN_BENCHMARK
from marl_ray.policies.engines.torch_engine import TorchEngine as OwnEngine
from marl_ray.training.tracking.sinks import TensorBoard as OwnTracker
from marl_ray.tuning.search.schedulers.fifo import FifoScheduler


class OwnSettings(SchedulerSettings):
    patience: int = 3


class OwnScheduler(FifoScheduler):
    Settings = OwnSettings

    def __init__(self, settings, sweep, total_steps):
        if settings.patience > total_steps:
            raise ValueError("patience: more than the steps of a run")


class NoScheduler:
    pass
"""
POINTS_OF_PARTS = "".join(
    f"[marl_ray.{kind}s]\nown_{kind} = own_parts:{name}\n"
    for kind, name in {
        "benchmark": "OWN_BENCHMARK",
        "scheduler": "OwnScheduler",
        "tracker": "OwnTracker",
        "engine": "OwnEngine",
    }.items()
)
MODEL = {"preset": "tiny-0.2m", "context": 128}


@pytest.fixture
def parts(installed: Path) -> Iterator[Path]:
    """An installed package that ships a part of each kind."""
    (installed / "own_parts.py").write_text(PARTS)
    install(installed, "parts", POINTS_OF_PARTS)
    yield installed
    sys.modules.pop("own_parts", None)


def run_of(engine: str = "torch", **keys: Any) -> RunConfig:
    team = {"solver": {"model": MODEL, "generation": {"engine": engine}}}
    data = {"name": "r", "algorithm": "reinforce_pp", "env": {"id": "math"}, "team": team, **keys}
    return parse_config(RunConfig, data)


def sweep_of(scheduler: Any) -> SweepConfig:
    run = {"env": {"id": "budget_dag"}, "train": {"total_steps": 1000}}
    data = {"name": "s", "run": run, "space": {"hyper.lr": {"grid": [0.1, 0.2]}}, "scheduler": scheduler}
    return parse_config(SweepConfig, data)


@pytest.mark.parametrize(("name", "metric"), [("own_benchmark", "own_benchmark"), ("own_parts:OWN_BENCHMARK",) * 2])
def test_a_run_is_measured_on_a_benchmark_of_a_package(parts, name, metric):
    config = run_of(evaluation={"benchmarks": [{"name": name, "data": "x.jsonl"}]})
    assert config.evaluation.benchmarks[0].metric == metric.replace(":", ".")
    assert benchmark(name) is benchmark("humaneval")


@pytest.mark.parametrize("name", ["own_tracker", "own_parts:OwnTracker"])
def test_a_run_logs_to_a_tracker_of_a_package(parts, tmp_path, name):
    config = run_of(storage=str(tmp_path), tracking={"also": [name, "tensorboard"]})
    sinks = [open_sink(config, "id", each) for each in config.tracking.also]
    assert type(sinks[0]) is type(sinks[1])
    for sink in sinks:
        sink.end("FINISHED")
    with pytest.raises(
        MarlRayError, match=r"^tracking\.also: tensorboard writes to a local folder or s3://, not to 'hdfs://there'$"
    ):
        check_sinks(run_of(storage="hdfs://there", tracking={"also": [name]}))


@pytest.mark.parametrize("name", ["own_engine", "own_parts:OwnEngine"])
def test_a_policy_samples_with_an_engine_of_a_package(parts, name):
    generation = run_of(name).team["solver"].generation
    policy = build_token_policy(ModelConfig.model_validate(MODEL), generation, 0)
    assert type(make_engine(policy)).__name__ == "TorchEngine"
    assert len(make_engine(policy).generate([Prompt((65,), 0)], 0)) == 1


def test_an_engine_that_is_no_class_of_engines_is_refused(parts):
    generation = run_of("own_parts:NoScheduler").team["solver"].generation
    expected = "generation.engine: 'own_parts:NoScheduler' is no engine, expected a class derived from Engine"
    with pytest.raises(MarlRayError, match=f"^{expected}$"):
        has_weights(generation)


@pytest.mark.parametrize("kind", ["own_scheduler", "own_parts:OwnScheduler"])
def test_a_sweep_has_a_scheduler_of_a_package_with_settings_of_its_own(parts, kind):
    config = sweep_of({"kind": kind, "patience": 5})
    assert config.resolve()["scheduler"] == {"kind": kind, "patience": 5}
    assert type(make_scheduler(config, 1000)).__name__ == "OwnScheduler"
    assert parse_config(SweepConfig, config.resolve()) == config and pickle.loads(pickle.dumps(config)) == config
    assert sweep_of(kind).resolve()["scheduler"]["patience"] == 3
    with pytest.raises(MarlRayError, match=rf"scheduler: {kind} refuses the sweep: patience: more than the steps"):
        make_scheduler(sweep_of({"kind": kind, "patience": 5000}), 1000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: run_of("vlm"), r"team.solver.generation.engine: 'vlm' is unknown; did you mean vllm\?"),
        (
            lambda: run_of("own_parts:Nothing"),
            r"generation.engine: 'Nothing' of 'own_parts:Nothing' is not in the module",
        ),
        (
            lambda: run_of("own_engine", resources={"engines": 1}),
            r"resources.engines=1: expected a policy with generation.engine: vllm",
        ),
        (
            lambda: ArmConfig(bundle="b", engine="toys.engines:Apart"),
            r"engine\n.*'toys.engines:Apart' does not serve; expected torch or vllm, or an engine whose spec",
        ),
        (lambda: ArmConfig(bundle="b", engine="transformers"), r"engine\n.*'transformers' does not serve"),
        (lambda: ArmConfig(bundle="b", engine="vlm"), r"engine\n.*'vlm' is unknown; did you mean vllm\?"),
        (lambda: run_of(tracking={"also": ["wandbb"]}), r"tracking.also.0: 'wandbb' is unknown; did you mean wandb\?"),
        (
            lambda: run_of(evaluation={"benchmarks": ["no_such_module:X"]}),
            r"evaluation.benchmarks.0.name: cannot import 'no_such_module'",
        ),
        (
            lambda: run_of(evaluation={"benchmarks": [{"name": "codecontests", "data": "x"}]}),
            r"name: codecontests is scored by `marl-ray evaluate` alone",
        ),
        (lambda: benchmark("own_parts:OwnEngine"), r"'own_parts:OwnEngine' is of type .*, expected a Benchmark"),
        (lambda: sweep_of("marl_ray.tuning.AshA"), r"is unknown; did you mean marl_ray.tuning:AshA\?"),
        (lambda: sweep_of("ashaa"), r"scheduler: 'ashaa' is unknown; did you mean asha\?"),
        (lambda: sweep_of({"kind": "own_scheduler", "patient": 1}), r"unknown key 'scheduler.patient'"),
        (
            lambda: sweep_of({"kind": "own_scheduler", "patience": "x"}),
            r"scheduler.patience: expected a whole number",
        ),
        (lambda: sweep_of("own_parts:NoScheduler"), r"'own_parts:NoScheduler' has no class `Settings`"),
    ],
)
def test_what_is_wrong_with_a_part_is_said_before_anything_starts(parts, make, message):
    with pytest.raises((MarlRayError, ValidationError), match=message):
        make()


def test_a_misspelt_name_is_answered_with_what_the_module_defines(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "import numpy as np\nfrom pathlib import Path\n\n\nclass Carry:\n    pass\n"
    (tmp_path / "carrying.py").write_text(text)
    with pytest.raises(MarlRayError, match=r"^'Nope' of 'carrying:Nope' is not in the module; expected one of Carry$"):
        extensions.import_reference("carrying:Nope")


OWN_ALGORITHM = """
from marl_ray.algorithms import Algorithm
from marl_ray.algorithms.with_critic.ppo import PPO

class ClipfreeHyper:
    pass

CLIPFREE = Algorithm("clipfree", PPO.spec, PPO.advantages, PPO.policy_loss)
"""


@pytest.mark.parametrize(
    ("point", "text", "name", "end"),
    [
        (ALGORITHM, OWN_ALGORITHM, "CLIPFRE", r"; did you mean CLIPFREE\?$"),
        (ALGORITHM, OWN_ALGORITHM, "Nope", r"; expected one of CLIPFREE, PPO$"),
        (ALGORITHM, "class Other:\n    pass\n", "Nope", r"; expected one of Other$"),
    ],
)
def test_a_misspelt_part_is_answered_with_the_parts_of_the_module(tmp_path, monkeypatch, point, text, name, end):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "clipfree_parts.py").write_text(text)
    monkeypatch.delitem(sys.modules, "clipfree_parts", raising=False)
    with pytest.raises(MarlRayError, match=end):
        point.load(f"clipfree_parts:{name}")
    sys.modules.pop("clipfree_parts")


def test_the_classes_of_parts_are_those_of_the_built_in_ones():
    for point in (ALGORITHM, BENCHMARK):
        classes = tuple(extensions.import_reference(reference) for reference in point.classes)
        assert {type(point.load(name)) for name in point.builtins} == set(classes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("relay.py", r"'relay.py' is unknown; expected relay:NAME, not a file$"),
        ("./relay.py", r"'./relay.py' is unknown; expected relay:NAME, not a file$"),
        ("own/relay.py", r"expected own.relay:NAME, not a file$"),
        ("/own/relay.py", r"expected relay:NAME, not a file$"),
        ("./relay.py:Relay", r"got a file: did you mean relay:Relay\?$"),
        ("no_relay:Relay", r"No module named 'no_relay'\); commands look in the folder in which they are started$"),
        ("marl_ray.no_relay:Relay", r"No module named 'marl_ray.no_relay'\)$"),
    ],
)
def test_a_file_or_a_module_that_is_not_found_is_told_the_form_and_the_place(name, message):
    for kind in ("environment", "benchmark", "algorithm"):
        with pytest.raises(MarlRayError, match=message):
            next(iter(importlib.import_module(f"marl_ray.conformance.extensions.{kind}").check(name, {})))


def test_only_the_beginning_of_a_name_is_compared():
    """Requests may have names of a million characters, of which a comparison takes a third of a second."""
    known = "x" * MAX_COMPARED
    assert did_you_mean(known + "y" * 1_000_000, [known]) == f"; did you mean {known}?"


def test_a_long_list_of_names_says_how_many_are_left_out():
    assert did_you_mean("zzz", [f"name{n}" for n in range(23)]).endswith(", name19 and 3 more")
