"""The table of commands: its help, its page, the documents of --json, and what it answers to wrong names."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from processes.command_line import ROOT, keys_of, marl_ray

from marl_ray.cli import app
from marl_ray.cli.documents.forms import FORMS
from marl_ray.cli.documents.output import as_plain_data
from marl_ray.cli.documents.reference import command_page
from marl_ray.cli.main import COMMANDS
from marl_ray.config import SPECS

RUN, SWEEP = "jobs/configs/multigrid_mappo.yaml", "jobs/configs/sweeps/gridworld.yaml"
CLUSTER, SERVE = "cluster/configs/training.yaml", "serve/configs/gridworld.yaml"
WITHOUT_DOCUMENT = {"runs logs", "cluster logs", "cluster local"}
"""Two print a log as it is, and one starts nodes and waits."""
MAX_LINE = 63
"""Maximum number of characters of a command's line in the help, in a terminal of 80 columns."""


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_the_stored_page_is_what_the_commands_say():
    page = (ROOT / "docs" / "command_line.md").read_text()
    assert page == command_page(), "run: .venv/bin/python -m marl_ray.cli.documents.reference > docs/command_line.md"


def test_every_command_has_a_short_line_and_every_option_a_meaning():
    for path, command in commands():
        assert 0 < len(command.help.strip().split("\n\n")[0].replace("\n", " ")) <= MAX_LINE, path
        assert [
            option.name for option in command.params if not getattr(option, "help", None) and option.name != "help"
        ] == [], path


def test_every_listing_and_result_can_be_a_document_whose_form_is_told():
    with_document = {path for path, command in commands() if any(option.name == "as_json" for option in command.params)}
    assert with_document == set(FORMS)
    assert {path for path, _ in commands()} - with_document == WITHOUT_DOCUMENT


def test_the_help_begins_with_train_and_has_groups():
    shown = marl_ray("--help").stdout
    assert [group for group in COMMANDS if f"─ {group} ─" in shown] == list(COMMANDS)
    listed = re.findall(r"^│ ([a-z]+) ", shown, re.MULTILINE)
    assert listed == [name for group in COMMANDS.values() for name in group] and listed[0] == "train"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("trian",), "Did you mean 'train'"),
        (("runs", "resme"), "Did you mean 'resume'"),
        (("experiment", "list"), "Did you mean 'ls'"),
        (("train", RUN, "hyper.lrr=1"), "unknown key 'hyper.lrr'; did you mean hyper.lr or hyper.lr_warmup?"),
        (("train", RUN, "hyper.learning_rate=1"), "unknown key 'hyper.learning_rate'; did you mean hyper.lr?"),
        (("train", RUN, "total_steps=9"), "unknown key 'total_steps'; did you mean train.total_steps?"),
        (
            ("train", RUN, "team.shared.model.lora.rnk=3"),
            "unknown key 'team.shared.model.lora.rnk'; did you mean team.shared.model.lora.rank?",
        ),
        (
            ("train", RUN, "evaluation.benchmarks=[{nmae: math}]"),
            "benchmarks.0.nmae'; did you mean evaluation.benchmarks.0.name?",
        ),
        (("train", RUN, "algorithm=mapo"), "'mapo' is unknown; did you mean mappo"),
        (
            ("sweep", SWEEP, "scheduler={kind: asha, reductoin: 3}"),
            "unknown key 'scheduler.reductoin'; did you mean scheduler.reduction?",
        ),
        (("sweep", SWEEP, "sedes=3"), "unknown key 'sedes'; did you mean seeds or"),
        (
            ("sweep", SWEEP, "search.kind=tpee"),
            "search.kind: expected 'grid', 'random' or 'tpe', got 'tpee'; did",
        ),
        (("train", RUN.replace("mappo", "map")), f"No such file or directory; did you mean {RUN}"),
        (("new", "tol", "x"), "KIND 'tol' is unknown; did you mean tool?"),
        (("algorithms", "mapo"), "'mapo' is unknown; did you mean mappo"),
        (("config", "schema", "swep"), "kind 'swep' is unknown; did you mean sweep?"),
        (("evaluate", "--benchmark", "humanval", "--samples", "x"), "'humanval' is unknown; did you mean humaneval"),
        (("train", SWEEP), "is a sweep's config; expected a run's config: marl-ray sweep jobs/"),
        (("train", SERVE), "is a gateway's Serve config; expected a run's config: marl-ray serve serve/"),
        (("train", CLUSTER), "is a cluster's config; expected a run's config: marl-ray cluster render cluster/"),
        (("sweep", RUN), "is a run's config; expected a sweep's config: marl-ray train jobs/"),
        (("cluster", "render", RUN), "is a run's config; expected a cluster's config: marl-ray train jobs/"),
        (("experiment", "create", RUN), "is a run's config; expected an experiment's config: marl-ray train jobs/"),
        (("serve", RUN), "is a run's config; expected a gateway's Serve config: marl-ray train jobs/"),
    ],
)
def test_a_wrong_name_is_answered_with_what_was_meant(arguments, expected):
    done = marl_ray(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert expected in " ".join(done.stderr.split())
    assert done.stderr.startswith("marl-ray") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train",), "marl-ray train: Missing argument 'CONFIG'; marl-ray train --help tells more"),
        (("runs", "ls", "--jsno"), "marl-ray runs ls: No such option: --jsno (Possible options: --json)"),
        (("train", RUN, "--hyper.lr=3"), "; a key of the config has no dashes: hyper.lr=VALUE; "),
        (("train", RUN, "--set", "hyper.lr=3"), "has no dashes: hyper.lr=3, without --set; "),
        (("sweep", SWEEP, "--set=metric.name=return", "--dry-run"), "dashes: metric.name=return, without --set; "),
        (("evaluate", "--episodes", "five"), "Invalid value for '--episodes': expected a whole number, got 'five'; "),
        (("evaluate", "--episodes", "0"), "'--episodes': expected a number of at least 1, got '0'; "),
        (
            ("evaluate", "--benchmark", "miniwob", "--policy", "expert", "--env", "max_step=3"),
            "marl-ray: --env max_step: miniwob has no such argument; did you mean max_steps or step_s?",
        ),
        (("tasks", "python", "--levels", "x"), "--levels: expected whole numbers with commas, such as 1,10, got 'x'"),
        (("cluster", "local", "--cpus", "0"), "Invalid value for '--cpus': expected a number of at least 1, got '0'; "),
        (("tasks", "nope"), "marl-ray tasks: Invalid value for 'kind': 'nope' is not one of 'python', 'arithmetic'"),
        (("train", RUN, "name="), f"marl-ray: {RUN}: name: expected text, got nothing"),
        (
            ("train", RUN, "name=a/b"),
            "name: expected letters, digits, _, . and -, a letter or digit first, at most 100",
        ),
        (("train", RUN, "hyper.lr=fast"), "hyper.lr: expected a number, got 'fast'"),
        (("train", RUN, "train.total_steps=1.5"), "train.total_steps: expected a whole number, got 1.5"),
        (
            ("train", RUN, "name=untrained", "env={id: toys.envs:countdown}", "resume_from=models:/x/1"),
            "'models:/x/1' is a bundle, which has no optimiser; expected a run's",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_expected(arguments, expected):
    done = marl_ray(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    # A command that takes its time says what it does.
    errors = [line for line in done.stderr.splitlines() if not re.fullmatch(r"\S+: +\d+\.\d s  .*", line)]
    assert len(errors) == 1 and expected in errors[0], done.stderr


def test_a_dry_run_without_a_name_promises_no_run_to_go_on_with(tmp_path):
    (tmp_path / "nameless.json").write_text('{"algorithm": "ippo", "env": {"id": "toys.envs:countdown"}}')
    done = marl_ray("train", tmp_path / "nameless.json", "--dry-run")
    assert done.returncode == 0 and "the config has no name; a run gets one such as this\n" in done.stderr
    assert "resume" not in done.stderr


def test_what_is_listed_for_language_models_is_what_training_takes(tmp_path):
    listed = {entry["name"]: entry["language_models"] for entry in document("algorithms")}
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1+1", "chosen": "2", "rejected": "3", "agent": "solver"}\n')
    for name, spec in SPECS.items():
        run: dict[str, Any] = {"name": "x", "env": {"id": "math"}, "algorithm": name, "hyper": {"minibatches": 1}}
        run["team"] = {"solver": {"model": {"preset": "tiny-1m"}}}
        run["train"] = {"group_size": 4} if spec.groups else {}
        run |= {"data": str(pairs)} if spec.pairs else {}
        run |= {"constraints": [{"budget": 4}]} if spec.needs_costs else {}
        run["hyper"] |= {"highest_return": 1} if "highest_return" in spec.read_keys else {}
        (tmp_path / "run.json").write_text(json.dumps(run))
        done = marl_ray("train", tmp_path / "run.json", "--dry-run")
        refused = f"{name} trains actor-critics, not language models" in done.stderr
        assert refused != listed[name] and (refused or spec.needs_costs or done.returncode == 0), done.stderr
        of_vectors = run | {"env": {"id": "toys.envs:countdown"}, "team": {"all": {}}}
        (tmp_path / "run.json").write_text(json.dumps(of_vectors))
        done = marl_ray("train", tmp_path / "run.json", "--dry-run")
        assert done.returncode == (2 if spec.pairs else 0), done.stderr


def document(*arguments: str | Path, status: int = 0, folder: Path = ROOT) -> Any:
    """The one document that a command prints on stdout."""
    done = marl_ray(*arguments, "--json", folder=folder)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def test_documents_have_their_forms(tmp_path):
    listed = document("algorithms")
    assert [entry["name"] for entry in listed] == list(SPECS)
    assert all(set(entry) == keys_of("algorithms") for entry in listed)
    defaults = {each["key"]: each["default"] for each in document("algorithms", "dapo")["hyper"]}
    assert defaults["hyper.clip_high"] == 0.28
    keys = document("config", "reference")
    assert set(keys) == keys_of("config reference") and {"key", "type", "default", "description"} == set(keys["run"][0])
    assert document("config", "schema", "sweep")["title"] == "SweepConfig"
    assert [task["task_id"] for task in document("tasks", "arithmetic", "--count", "2")] == ["6-6=", "76-70="]
    # The gridworld would be compiled, and the checkout may hold a run of the config's own name.
    dry_run = document("train", RUN, "name=untrained", "env={id: toys.envs:countdown}", "--dry-run")
    assert dry_run["team"]["shared"]["algorithm"] == "mappo"
    checked = document("lint", SERVE)
    assert set(checked) == keys_of("lint") == keys_of("cluster lint") and checked["passed"]
    refused = document("lint", RUN, status=2)
    assert [entry["advice"] for entry in refused["findings"]] == [False] and not refused["passed"]
    manifests = document("cluster", "render", CLUSTER)
    assert all(keys_of("cluster render") <= set(manifest) for manifest in manifests)
    planned = document("experiment", "plan", "--effect", "0.05", "--sd", "0.5")
    assert set(planned) == keys_of("experiment plan") and set(planned["units"]) == {"fixed", "median", "sure"}


def test_a_part_of_ones_own_is_written_and_checked_as_documents(tmp_path):
    written = document("new", "tool", "stall", folder=tmp_path)
    assert set(written) == keys_of("new") and all((tmp_path / file).is_file() for file in written["files"])
    assert "marl-ray check plugin tool stall:Stall discount=0.1" in written["next"]
    checked = document("check", "plugin", "tool", "stall:Stall", folder=tmp_path)
    assert set(checked) == keys_of("check plugin") and checked["passed"]
    assert all(each["failure"] is None and each["text"] for each in checked["properties"])
    (tmp_path / "raising.py").write_text('def raising() -> str:\n    """Fails."""\n    raise KeyError("x")\n')
    refused = document("check", "plugin", "tool", "raising:raising", status=1, folder=tmp_path)
    assert not refused["passed"] and any(each["failure"] for each in refused["properties"])


def test_forms_of_results_are_those_of_their_types():
    from marl_ray.evaluation.off_policy.estimates import OffPolicyEstimate
    from marl_ray.serving.handlers.api_description.answers import ExperimentReport
    from marl_ray.serving.logs.export import ExportSummary
    from marl_ray.training.run_result import RunResult

    results = {"train": RunResult, "export": ExportSummary, "experiment off-policy": OffPolicyEstimate}
    for command, result in results.items():
        assert {field.name for field in fields(result)} == keys_of(command)
    assert keys_of("deploy") <= set(ExperimentReport.__annotations__)


def test_numbers_that_are_not_finite_are_null():
    assert as_plain_data({"a": (float("nan"), 1.5), 2: Path("x")}) == {"a": [None, 1.5], "2": "x"}
