"""The manifest: it comes back as it was written, and no byte of it can change unseen."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.errors import MarlRayError
from marl_ray.training.checkpoints.manifest import (
    FORMAT,
    MANIFEST_FILE,
    CheckpointManifest,
    publish,
    read_manifest,
    withdraw_manifest,
)
from marl_ray.training.checkpoints.storage import (
    DamagedCheckpointError,
    StoredFile,
    UnwritableCheckpointError,
    local_stored_folder,
)

TOY_MANIFEST = CheckpointManifest(
    format=FORMAT,
    run="toy",
    identity="1",
    iteration=12,
    steps=384,
    ranks=2,
    score=-1e12,
    metrics={"return": 0.1, "loss": 1e-300},
    files={"weights/.metadata": StoredFile(7, "ab")},
)


def test_it_comes_back_as_it_was_written(tmp_path):
    place = local_stored_folder(tmp_path)
    assert read_manifest(place) is None
    publish(place, TOY_MANIFEST)
    assert read_manifest(place) == TOY_MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_no_bit_of_it_can_change_unseen(tmp_path_factory, position, bit):
    folder = tmp_path_factory.mktemp("flipped")
    place = local_stored_folder(folder)
    publish(place, TOY_MANIFEST)
    data = bytearray((folder / MANIFEST_FILE).read_bytes())
    data[position % len(data)] ^= 1 << bit
    (folder / MANIFEST_FILE).write_bytes(data)
    try:
        assert read_manifest(place) == TOY_MANIFEST  # a blank between two words
    except MarlRayError as error:
        assert str(folder / MANIFEST_FILE) in str(error)


@pytest.mark.parametrize("length", [0, 1, 40])
def test_one_that_was_cut_is_damaged(tmp_path, length):
    publish(local_stored_folder(tmp_path), TOY_MANIFEST)
    (tmp_path / MANIFEST_FILE).write_bytes((tmp_path / MANIFEST_FILE).read_bytes()[:length])
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is no manifest: "):
        read_manifest(local_stored_folder(tmp_path))


@pytest.mark.parametrize("text", ["{}", "[]", "null", "7", '"sha256"', "\x00\x00"])
def test_a_file_of_something_else_is_damaged_and_the_line_says_so(tmp_path, text):
    (tmp_path / MANIFEST_FILE).write_text(text)
    with pytest.raises(
        DamagedCheckpointError,
        match=rf"^{tmp_path / MANIFEST_FILE} is no manifest: (it is no JSON object with|Expecting value)",
    ):
        read_manifest(local_stored_folder(tmp_path))


def test_one_with_a_right_hash_and_other_keys_is_damaged(tmp_path):
    facts = {"format": FORMAT, "files": {}}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({"sha256": digest} | facts))
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is no manifest: .*identity"):
        read_manifest(local_stored_folder(tmp_path))


def test_one_of_another_format_is_refused(tmp_path):
    publish(local_stored_folder(tmp_path), CheckpointManifest(**vars(TOY_MANIFEST) | {"format": FORMAT + 1}))
    with pytest.raises(
        MarlRayError, match=rf"has checkpoint format {FORMAT + 1}, expected {FORMAT}; it can be read by"
    ):
        read_manifest(local_stored_folder(tmp_path))


def test_a_folder_that_takes_no_manifest_is_named(tmp_path):
    (tmp_path / MANIFEST_FILE).mkdir()
    with pytest.raises(UnwritableCheckpointError, match=rf"^{tmp_path}/{MANIFEST_FILE} cannot be written: "):
        publish(local_stored_folder(tmp_path), TOY_MANIFEST)


def test_a_withdrawn_checkpoint_is_none_and_keeps_its_facts(tmp_path):
    publish(local_stored_folder(tmp_path), TOY_MANIFEST)
    withdraw_manifest(local_stored_folder(tmp_path))
    assert read_manifest(local_stored_folder(tmp_path)) is None
    assert json.loads((tmp_path / "damaged" / MANIFEST_FILE).read_text())["iteration"] == 12
