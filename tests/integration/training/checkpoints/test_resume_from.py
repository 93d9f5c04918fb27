"""Runs that begin from a checkpoint of another run: what continues, what begins anew, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from processes.two_workers import two_workers
from pyarrow import fs
from toy_runs.runs import config, short, timeless, train_rows
from toys import texts as toy_texts

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.training.checkpoints.origin import source_of
from marl_ray.training.driver import train
from marl_ray.training.run_checks import check_run
from marl_ray.training.run_folder.metrics_file import history_of, iteration_of, read_metrics
from marl_ray.training.single_process import train_alone
from marl_ray.training.tracking.mlflow_run import MlflowRun

pytestmark = pytest.mark.shared_ray("two")

TEAM = "team={first: {agents: [a]}, second: {agents: [b]}}"


def trained_rows(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Rows without evaluations, which begin anew."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("eval/", "best/"))} for row in timeless(rows)
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run, by iteration."""
    folder = tmp_path_factory.mktemp("base")
    train_alone(config(), folder)
    return folder


@pytest.mark.parametrize("algorithm", ["mappo", "mappo_lagrangian", "grpo", "cpo"])
def test_a_run_that_changes_nothing_goes_on_as_its_origin_does(tmp_path, algorithm):
    rows = train_alone(short(algorithm), tmp_path / "base")
    following = short(algorithm, "name=next", f"resume_from={tmp_path / 'base' / '2'}")
    again = train_alone(following, tmp_path / "next")
    assert again[0]["iteration"] == 2 and again[0]["steps"] == rows[2]["steps"] and "eval/return" in again[0]
    assert trained_rows(again[1:]) == trained_rows(rows[3:])
    assert (tmp_path / "next" / "2" / "state.json").exists()  # from now on it needs its origin no more
    last = json.loads((tmp_path / "next" / str(again[-1]["iteration"]) / "state.json").read_text())
    assert last["origin"]["run"] == "toy" and last["origin"]["steps"] == rows[2]["steps"]


def test_a_run_after_another_has_its_own_hyper_parameters_and_its_own_play(base, tmp_path):
    keys = ("name=next", "train.total_steps=256", f"resume_from={base / '6'}")
    rows = train_alone(config(*keys, "hyper.lr=1e-12", "train.env_copies=8"), tmp_path)
    assert [row["steps"] for row in rows] == [192, 256]  # 8 copies play 64 steps in a batch
    assert "return" not in rows[0]  # episodes of its origin were played in other copies
    # Nothing moves at such a rate, so both evaluations are of the same weights.
    assert rows[0]["eval/return"] == rows[1]["eval/return"] == rows[0]["best/return"]
    moving = train_alone(config(*keys, "hyper.lr=0.1"))
    assert moving[0]["eval/return"] == rows[0]["eval/return"] and moving[-1]["kl"] > rows[-1]["kl"]


def test_two_workers_begin_from_the_checkpoint_of_one_and_one_from_that_of_two(base, tmp_path):
    more = ("train.total_steps=224", f"resume_from={base / '4'}")
    alone = train_alone(config(*more))
    both = two_workers(train_rows, str(tmp_path / "two"), "resources.workers=2", *more)
    assert [row["return"] for row in both[1:]] == [row["return"] for row in alone[1:]]
    assert [row["policy_loss"] for row in both[1:]] == pytest.approx(
        [row["policy_loss"] for row in alone[1:]], abs=1e-5
    )
    rows = train_alone(config("train.total_steps=256", f"resume_from={tmp_path / 'two' / '7'}"))
    assert [row["steps"] for row in rows] == [224, 256]


def test_language_models_go_on_with_their_tasks(tmp_path):
    rows = train_alone(toy_texts.config(), tmp_path / "base")
    after = train_alone(toy_texts.config(f"resume_from={tmp_path / 'base' / '1'}"))
    assert trained_rows(after) == trained_rows(rows[1:])


@pytest.mark.slow
def test_on_ray_a_run_names_its_origin_and_outlives_it(ray_cluster, tmp_path):
    keys = (f"storage={tmp_path}", "tracking.progress=false", "train.total_steps=64")
    train(config(*keys))
    run_config = config(*keys, "name=next", "resume_from=toy", "train.total_steps=128", "hyper.lr=0.02")
    check_run(run_config)
    outcome = train(run_config)
    origin = load_bundle(outcome.bundle).manifest.lineage.origin
    assert origin is not None and (origin.run, origin.steps) == ("toy", 64)
    tags = MlflowRun(run_config, outcome.run_id).client.get_run(outcome.run_id).data.tags
    assert tags["resume_from"] == origin.checkpoint == source_of(run_config)
    rows = read_metrics(fs.LocalFileSystem(), str(tmp_path / "next"))
    assert [iteration_of(row) for row in rows] == [2, 3, 4]
    assert history_of(rows, "return") == MlflowRun(run_config, outcome.run_id).history("return")
    shutil.rmtree(tmp_path / "toy")
    longer = config(*keys, "name=next", "resume_from=toy", "train.total_steps=160", "hyper.lr=0.02")
    check_run(longer)
    assert train(longer).metrics["steps"] == 160


def refusal(run_config: RunConfig) -> str:
    with pytest.raises(MarlRayError) as caught:
        check_run(run_config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["team={shared: {network: {hidden: [32]}}}"], "has another network of policy 'shared': {'hidden': [64, 64], "),
        ([TEAM], "holds the trained policies shared; expected first, second (first is in this run alone)"),
        (["env={id: toys.envs:sprint}"], "has another "),
        (
            ["algorithm=grpo", "train.group_size=2"],
            "has another critic of policy 'shared': central, where this run has none",
        ),
        (["hyper.optimizer=sgd"], "has another optimizer of policy 'shared': adamw, where this run has sgd"),
        (
            ["algorithm=mappo_lagrangian", "constraints=[{budget: 4}]"],
            "has another cost critics of policy 'shared': 0, where this run has 1",
        ),
        (["train.total_steps=192"], "expected more than the 192 steps that"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(base, tmp_path, overrides, message):
    keys = (f"storage={tmp_path}", "name=next", f"resume_from={base / '6'}", "train.total_steps=256")
    assert message in refusal(config(*keys, *overrides))


def damage(folder: Path, how: str) -> None:
    state = folder / "state.json"
    (part,) = (folder / "weights").glob("*.distcp")
    match how:
        case "shortened":
            part.write_bytes(part.read_bytes()[:-100])
        case "part":
            part.unlink()
        case "metadata":
            (folder / "weights" / ".metadata").write_bytes(b"nonsense")
        case "state":
            state.write_text("{")
        case "format":
            (folder / "manifest.json").unlink()
            state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 1}))
        case "manifest":
            (folder / "manifest.json").write_text("{")
        case "unpublished":
            (folder / "manifest.json").unlink()
        case "all":
            shutil.rmtree(folder)
        case "bundle":
            shutil.rmtree(folder)
            folder.mkdir()
            (folder / "bundle.json").write_text("{}")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shortened", "is damaged: weights/__0_0.distcp is missing or has another size"),
        ("part", "is damaged: weights/__0_0.distcp is missing or has another size"),
        ("metadata", "is damaged: "),
        ("state", "is damaged: "),
        ("manifest", "manifest.json is no manifest: "),
        ("unpublished", "is no checkpoint, and no run that has one; looked for "),
        ("format", "has checkpoint format 1, expected 3; it can be read by the version of marl-ray that wrote it"),
        ("all", "is no checkpoint, and no run that has one; looked for "),
        ("bundle", "is a bundle, which has no optimiser; expected a run's name, its folder or a checkpoint in it"),
    ],
)
def test_a_checkpoint_that_is_damaged_is_refused(base, tmp_path, how, message):
    copy = shutil.copytree(base / "6", tmp_path / "copy")
    damage(copy, how)
    text = refusal(config(f"storage={tmp_path}", f"resume_from={copy}", "train.total_steps=256"))
    assert text.startswith("resume_from: ") and message in text, text


def test_a_source_is_a_name_a_folder_or_a_uri(base, tmp_path, monkeypatch):
    named = tmp_path / "runs" / "base"
    shutil.copytree(base / "6", named / "checkpoint_6")
    monkeypatch.chdir(tmp_path)
    for reference in ("base", "runs/base", str(named), "runs/base/checkpoint_6"):
        source = source_of(config("storage=runs", f"resume_from={reference}"))
        assert source == str(named / "checkpoint_6")
    assert source_of(config(f"resume_from=file://{named}")) == f"file://{named}/checkpoint_6"
    assert "no run that has one; looked for " in refusal(config(f"storage={tmp_path}", "resume_from=nobody"))
    assert refusal(config("storage=runs", "resume_from=bsae")).endswith("; did you mean base?")
    (tmp_path / "runs" / "basis").mkdir()  # of a run that has no checkpoint yet
    assert refusal(config("storage=runs", "resume_from=basis")).endswith("; did you mean base?")
