"""Bundles: what is written is what is served, and nothing that was touched is."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_ray.config import NetworkConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.actor_critic.spaces import space_from_json, space_to_json
from marl_ray.policies.bundles.actor_critic import PolicyParts, save_bundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.bundles.manifest import Lineage

OBSERVATION = spaces.MultiDiscrete([5, 4], dtype=np.int8)
NETWORK = NetworkConfig(hidden=(8,))


def write(folder: Path, model: ActorCritic, space: spaces.Space = OBSERVATION) -> Path:
    lineage = Lineage(
        run="r",
        algorithm={"shared": "ippo"},
        config_hash="c",
        code_version="0",
        seed=0,
        env={},
        steps=1,
        metrics={"x": 1.0},
    )
    parts = PolicyParts(NETWORK, space, spaces.Discrete(3), model.actor.state_dict())
    return save_bundle(folder, {"a": "shared", "b": "shared"}, {"shared": parts}, lineage)


@pytest.fixture
def model() -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(OBSERVATION, spaces.Discrete(3), NETWORK)


@pytest.fixture
def folder(tmp_path: Path, model: ActorCritic) -> Path:
    return write(tmp_path, model)


def test_a_bundle_acts_as_the_policy_did(folder, model):
    bundle = load_bundle(folder)
    rows = np.array([[0, 1], [4, 3], [2, 2]])
    outputs = model.actor.infer(torch.from_numpy(rows))
    requests = [{"a": rows[0], "b": rows[1]}, {"b": rows[2]}]
    answers = bundle.act(requests)
    got = [answers[0]["a"], answers[0]["b"], answers[1]["b"]]
    assert [int(action) for action, _ in got] == outputs.argmax(-1).tolist()
    expected = outputs.log_softmax(-1).max(-1).values.tolist()
    assert [log_prob for _, log_prob in got] == pytest.approx(expected, rel=1e-5)


def test_equal_content_has_an_equal_digest(folder, tmp_path, model):
    again = write(tmp_path / "again", model)
    assert load_bundle(folder).digest == load_bundle(again).digest
    assert folder.name == load_bundle(folder).digest[:16]
    assert sorted(path.name for path in folder.iterdir()) == ["bundle.json", "shared.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder.name, "again"])


def test_equal_weights_are_known_whatever_run_and_policy_they_are_of(folder, tmp_path, model):
    bundle = load_bundle(folder)
    renamed = {"run": "another", "metrics": {"x": 2.0}}
    lineage = bundle.manifest.lineage.model_copy(update=renamed)
    parts = PolicyParts(NETWORK, OBSERVATION, spaces.Discrete(3), model.actor.state_dict())
    again = load_bundle(save_bundle(tmp_path, {"a": "p", "b": "p"}, {"p": parts}, lineage))
    assert again.digest != bundle.digest
    assert again.manifest.weights_sha256 == bundle.manifest.weights_sha256
    with torch.no_grad():
        model.actor.rest[-1].bias[0] += 1e-3
    other = load_bundle(write(tmp_path / "other", model))
    assert other.manifest.weights_sha256 != bundle.manifest.weights_sha256


def _flip_weights(folder: Path) -> None:
    path = folder / "shared.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def _edit_manifest(folder: Path) -> None:
    path = folder / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"agents": {"c": "shared"}}))


def _escape(folder: Path) -> None:
    data = json.loads((folder / "bundle.json").read_text())
    data["policies"]["shared"]["weights"] = "../x.safetensors"
    (folder / "bundle.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_weights, "content hash of shared.safetensors does not fit"),
        (_edit_manifest, "content hash of bundle.json does not fit"),
        (_escape, "does not fit"),
        (lambda folder: (folder / "shared.safetensors").unlink(), "shared.safetensors is missing"),
        (lambda folder: (folder / "bundle.json").write_text("{}"), "bundle.json: missing key 'agents'"),
        (
            lambda folder: (folder / "bundle.json").write_text("not json"),
            "bundle.json: not JSON: expected ident at line 1 column 2$",
        ),
        (lambda folder: (folder / "bundle.json").unlink(), "no readable bundle.json"),
    ],
)
def test_a_touched_bundle_is_refused_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(MarlRayError, match=message) as caught:
        load_bundle(folder)
    assert "\n" not in str(caught.value)


def test_a_bundle_is_whole_also_where_the_damaged_one_before_cannot_be_deleted(folder, model, monkeypatch):
    deleted, unlink = [], os.unlink

    def delete_one(path: str, **options: int) -> None:
        deleted.append(path)
        if len(deleted) > 1:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, **options)

    _flip_weights(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", delete_one)
        assert write(folder.parent, model) == folder
    assert len(deleted) > 1
    load_bundle(folder)


def test_a_bundle_that_cannot_be_written_again_stays_as_it_was(folder, model, monkeypatch):
    before, replace = load_bundle(folder).digest, os.replace

    def refuse_new(source: Path, target: Path) -> None:
        if source.name == "bundle":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse_new)
        with pytest.raises(OSError, match="Input/output error"):
            write(folder.parent, model)
    assert load_bundle(folder).digest == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_unknown_model_version_is_refused(tmp_path):
    with pytest.raises(MarlRayError, match="'models:/none/1' is not in the model registry"):
        load_bundle("models:/none/1", f"sqlite:///{tmp_path}/mlflow.db")


@pytest.mark.parametrize("reference", ["models:/none/1", "models:/none@best"])
def test_looking_for_a_model_makes_no_registry(tmp_path, reference):
    with pytest.raises(MarlRayError, match=rf"is not in the model registry: there is no file {tmp_path}/mlflow.db$"):
        load_bundle(reference, f"sqlite:///{tmp_path}/mlflow.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("agent", "observation", "message"),
    [
        ("z", [0, 0], "observations.z: unknown agent; expected one of a, b"),
        ("a", [0], r"observations.a: expected an array of shape \[2\] .*got shape \[1\]"),
        ("a", [5, 0], "observations.a: .*category out of range"),
        ("a", [-1, 0], "observations.a: .*category out of range"),
        ("a", [300, 0], "observations.a: .*category out of range"),
        ("a", [0.5, 0], "observations.a: .*fractional"),
        ("a", [float("nan"), 0], "observations.a: .*NaN"),
        ("a", ["x", 0], r"observations.a: expected an array of shape \[2\]"),
        ("a", ["x" * 400_000, *[""] * 100_000], r"observations.a: expected an array"),  # 160 GB as a table of texts
        ("a", [[0], [0, 1]], r"observations.a: expected an array of shape \[2\]"),
        ("a", None, r"observations.a: expected an array of shape \[2\]"),
    ],
)
def test_an_observation_from_outside_is_checked(folder, agent, observation, message):
    with pytest.raises(MarlRayError, match=message):
        load_bundle(folder).parse_observation(agent, observation)


@pytest.mark.parametrize(
    ("space", "right", "wrong", "message"),
    [
        (spaces.Box(-1, 1, (2,)), [1, -1.0], [1e30, 0], r"got 1e\+30 at \[0\], where they are -1 and 1"),
        (spaces.Box(-0.1, 0.1, (1,)), [0.1], [0.1001], r"got 0.1001 at \[0\]"),  # 0.1 is more than its float32
        (spaces.Box(0, np.inf, (1,)), [1e30], [-1e-3], r"got -0.001 at \[0\], where they are 0 and inf"),
        (spaces.Box(0, 200, (1, 2), np.uint8), [[0, 200]], [[0, 201]], r"got 201 at \[0, 1\]"),
        (spaces.Box(-3, 3, (1,), np.int64), [3], [4], r"got 4 at \[0\]"),
    ],
)
def test_an_observation_lies_within_its_box(tmp_path, space, right, wrong, message):
    torch.manual_seed(0)
    bundle = load_bundle(write(tmp_path / "bundle", ActorCritic(space, spaces.Discrete(3), NETWORK), space))
    assert bundle.parse_observation("a", right).tolist() == right
    with pytest.raises(
        MarlRayError, match=f"^observations.a: expected an array of shape .* within its bounds, {message}"
    ):
        bundle.parse_observation("a", wrong)


def test_a_box_of_integers_takes_no_fractions(tmp_path):
    space = spaces.Box(0, 255, (2,), np.uint8)
    bundle = load_bundle(write(tmp_path / "bundle", ActorCritic(space, spaces.Discrete(3), NETWORK), space))
    assert bundle.parse_observation("a", [0, 7.0]).tolist() == [0, 7]
    with pytest.raises(MarlRayError, match=r"^observations.a: .* of integers, got fractional numbers$"):
        bundle.parse_observation("a", [0, 0.5])


def test_spaces_with_infinite_bounds_survive_the_manifest(tmp_path):
    """CartPole's: some entries bounded, some not; and a Box that is unbounded altogether."""
    mixed = spaces.Box(np.array([-4.8, -np.inf], np.float32), np.array([4.8, np.inf], np.float32))
    for space in (mixed, spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Box(0, 255, (2, 2, 3), np.uint8)):
        text = json.dumps(space_to_json(space), allow_nan=False)
        assert space_from_json(json.loads(text)) == space
    torch.manual_seed(0)
    parts = PolicyParts(
        NETWORK, mixed, spaces.Discrete(3), ActorCritic(mixed, spaces.Discrete(3), NETWORK).actor.state_dict()
    )
    lineage = Lineage(run="r", algorithm={}, config_hash="c", code_version="0", seed=0, env={}, steps=1, metrics={})
    assert (
        load_bundle(save_bundle(tmp_path, {"a": "p"}, {"p": parts}, lineage)).policies["p"].observation_space == mixed
    )
