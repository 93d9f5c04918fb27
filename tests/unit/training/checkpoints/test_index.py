"""The checkpoints of a folder: those that count, the best, and those that are removed."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from marl_ray.errors import MarlRayError
from marl_ray.training.checkpoints.index import (
    PublishedCheckpoint,
    ReplacedError,
    check_last_group,
    check_rows_own,
    checkpoint_name,
    checkpoints_in,
    find_best,
    find_newest,
    note_start,
    own_checkpoints,
    published_checkpoints,
    remove_unneeded,
    take_attempt_number,
    unneeded_checkpoints,
)
from marl_ray.training.checkpoints.manifest import FORMAT, CheckpointManifest, publish, withdraw_manifest
from marl_ray.training.checkpoints.storage import StoredFile, StoredFolder, local_stored_folder

IDENTITY = "the config of toy"
BUNDLED = {"bundle/bundle.json": StoredFile(1, "0")}


def manifest(iteration: int, score: float = 0.0, bundle: bool = True) -> CheckpointManifest:
    return CheckpointManifest(
        format=FORMAT,
        run="toy",
        identity=IDENTITY,
        iteration=iteration,
        steps=iteration * 32,
        ranks=1,
        score=score,
        metrics={},
        files=BUNDLED if bundle else {},
    )


def write(folder: StoredFolder, iteration: int, score: float = 0.0, attempt: int = 1, copy_of: int = 0) -> StoredFolder:
    """A checkpoint whose manifest is that of iteration `copy_of`, if given."""
    place = folder / checkpoint_name(iteration, attempt)
    folder.filesystem.create_dir(f"{place}/weights")
    publish(place, manifest(copy_of or iteration, score))
    return place


def checkpoints_of(*scores: float | None) -> list[PublishedCheckpoint]:
    """Checkpoints of iterations 1, 2, ...; those without a score have no bundle."""
    nowhere = local_stored_folder(Path("/nowhere"))
    return [
        PublishedCheckpoint(nowhere / checkpoint_name(k, 1), manifest(k, score or 0.0, score is not None))
        for k, score in enumerate(scores, 1)
    ]


def iterations(checkpoints: list[PublishedCheckpoint]) -> list[int]:
    return [checkpoint.manifest.iteration for checkpoint in checkpoints]


def test_groups_that_begin_at_once_or_after_the_clock_was_set_back_have_greater_numbers(tmp_path):
    """Under one number the folder that a killed worker left half-written would be the next group's own."""
    folder = local_stored_folder(tmp_path)
    first = take_attempt_number(folder)
    Path(tmp_path, checkpoint_name(3, first)).mkdir()
    assert take_attempt_number(folder) > first
    Path(tmp_path, checkpoint_name(4, first * 10)).mkdir()
    assert take_attempt_number(folder) == first * 10 + 1


def test_the_newest_and_the_best_are_kept():
    assert iterations(unneeded_checkpoints(checkpoints_of(1, 9, 3, 4, 5), 2, None)) == [1, 3]
    assert iterations(unneeded_checkpoints(checkpoints_of(1, 2, 3), 2, None)) == [1]
    assert iterations(unneeded_checkpoints(checkpoints_of(9, None, None), 1, None)) == [2]
    assert iterations(unneeded_checkpoints(checkpoints_of(1, 1, 1, None), 1, None)) == [
        1,
        2,
    ]  # the newest of equal scores
    assert unneeded_checkpoints([], 1, None) == [] and find_best([]) is None


def test_the_first_of_every_interval_is_kept_too():
    assert iterations(unneeded_checkpoints(checkpoints_of(*[None] * 11, 1.0), 1, 4)) == [2, 3, 5, 6, 7, 9, 10, 11]


@given(st.lists(st.none() | st.integers(0, 3), min_size=1), st.integers(1, 4), st.none() | st.integers(1, 5))
def test_what_was_removed_is_never_needed_later(scores, keep, every):
    """Removing step by step, as a run does, leaves what removing at the end leaves, but for a best that was beaten."""
    listed_scores, remaining = checkpoints_of(*scores), []
    for checkpoint in listed_scores:
        remaining.append(checkpoint)
        removed = unneeded_checkpoints(remaining, keep, every)
        remaining = [each for each in remaining if each not in removed]
        assert remaining[-keep:] == listed_scores[: listed_scores.index(checkpoint) + 1][-keep:]
        assert find_best(remaining) == find_best(listed_scores[: listed_scores.index(checkpoint) + 1])
    at_the_end = unneeded_checkpoints(listed_scores, keep, every)
    assert remaining == [each for each in listed_scores if each not in at_the_end]


@pytest.mark.parametrize("remote", [False, True])
def test_tidying_removes_what_is_not_needed_and_what_was_never_finished(tmp_path, remote):
    folder = local_stored_folder(tmp_path)
    if remote:
        folder = StoredFolder(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "toy")
        folder.filesystem.create_dir("toy")
    for iteration, score in ((10, 5.0), (20, 1.0), (30, 2.0), (40, 0.0)):
        write(folder, iteration, score)
    withdraw_manifest(write(folder, 50))
    folder.filesystem.create_dir(f"{folder / checkpoint_name(60, 1)}/weights")
    folder.filesystem.create_dir(f"{folder}/errors")
    folder.filesystem.create_dir(f"{folder / checkpoint_name(45, 2)}/weights")  # of those that took over
    remove_unneeded(folder, 2, None, 1)
    names = [*(checkpoint_name(k, 1) for k in (10, 30, 40)), checkpoint_name(45, 2), checkpoint_name(50, 1)]
    remaining = sorted(info.base_name for info in folder.filesystem.get_file_info(fs.FileSelector(folder.path)))
    assert remaining == [*names, "errors"]
    assert [each.name for each in published_checkpoints(folder)] == names[:3]


def test_the_newest_is_that_of_the_last_iteration_and_among_these_of_the_last_attempt(tmp_path):
    folder = local_stored_folder(tmp_path)
    assert find_newest(folder) is None and checkpoints_in(folder / "nothing") == []
    for iteration, attempt in ((9, 100), (10, 100), (10, 200), (8, 300)):
        write(folder, iteration, attempt=attempt)
    last = find_newest(folder)
    assert last is not None and last.name == checkpoint_name(10, 200)
    assert [place.path for place in checkpoints_in(folder)] == sorted(place.path for place in checkpoints_in(folder))


def test_a_folder_with_checkpoints_of_an_older_format_alone_is_refused(tmp_path):
    """Else the run would begin anew beside them."""
    old = tmp_path / "checkpoint_2026-11-01_10-00-00.000000"
    old.mkdir()
    (old / "state.json").write_text('{"format": 1, "iteration": 3}')
    with pytest.raises(MarlRayError, match=r"checkpoint_2026.* has checkpoint format 1, expected 3; it can be read by"):
        checkpoints_in(local_stored_folder(tmp_path))


def test_checkpoints_of_another_run_or_another_iteration_are_named_and_left_out(tmp_path):
    folder, lines = local_stored_folder(tmp_path), list[str]()
    of_run = [write(folder, iteration) for iteration in (10, 20)]
    copy, other = write(folder, 30, copy_of=10), write(folder, 40)
    publish(other, replace(manifest(40), identity="another config"))
    (tmp_path / "checkpoint_00000050_1").mkdir()
    (tmp_path / "checkpoint_00000050_1" / "manifest.json").write_text("{}")  # damaged, which is for the loader to say
    places = own_checkpoints(folder, IDENTITY, lines.append)
    assert [place.path for place in places] == [
        *(place.path for place in of_run),
        str(tmp_path / "checkpoint_00000050_1"),
    ]
    assert lines == [
        f"{copy} is a copy of the checkpoint of iteration 10; it is left out",
        f"{other} is a checkpoint of another run, 'toy' with another config; it is left out",
    ]
    assert [each.name for each in published_checkpoints(folder)] == [checkpoint_name(10, 1), checkpoint_name(20, 1)]


def test_where_all_checkpoints_are_of_another_run_they_stay_and_the_run_does_not_begin_anew(tmp_path):
    place = write(local_stored_folder(tmp_path), 10)
    with pytest.raises(MarlRayError, match=f"^{place} is a checkpoint of another run, 'toy' with another config$"):
        own_checkpoints(local_stored_folder(tmp_path), "another config")
    assert checkpoints_in(local_stored_folder(tmp_path)) == [place]


def test_a_folder_with_a_name_of_its_own_is_neither_read_nor_removed(tmp_path):
    """Such as a copy that somebody has made to be safe."""
    folder = local_stored_folder(tmp_path)
    write(folder, 20)
    for name in ("checkpoint_backup", "checkpoint_old_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept.txt").write_text("")
    publish(folder / "checkpoint_backup", manifest(10))
    assert [place.path for place in checkpoints_in(folder)] == [str(tmp_path / checkpoint_name(20, 1))]
    remove_unneeded(folder, 1, None, 1)
    assert (tmp_path / "checkpoint_backup" / "kept.txt").exists() and (tmp_path / "checkpoint_old_1").exists()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), unique=True),
    st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 5)), unique_by=lambda start: start[0]),
)
def test_checkpoints_whose_iterations_a_later_group_plays_again_do_not_count(tmp_path_factory, written, starts):
    folder = local_stored_folder(tmp_path_factory.mktemp("strays"))
    for attempt, after in starts:
        note_start(folder, attempt, after)
    for iteration, attempt in written:  # also where they are complete only after others have begun
        write(folder, iteration, attempt=attempt)
    replayed = {
        (iteration, attempt)
        for iteration, attempt in written
        for later, after in starts
        if later > attempt and (after is None or after < iteration)
    }
    names = [checkpoint_name(*each) for each in sorted({*written} - replayed)]
    assert [place.path.rpartition("/")[2] for place in checkpoints_in(folder)] == names
    lines: list[str] = []
    own_checkpoints(folder, IDENTITY, lines.append)
    assert len(lines) == len(replayed)
    remove_unneeded(folder, 100, None, 4)
    own_checkpoints(folder, IDENTITY, lines.append)
    assert len(lines) == len(replayed)  # they are withdrawn
    assert take_attempt_number(folder) > 4


def test_a_group_that_removed_the_rows_of_a_later_one_ends_and_leaves_strays(tmp_path):
    folder = local_stored_folder(tmp_path)
    first, second = take_attempt_number(folder), take_attempt_number(folder)
    check_last_group(folder, second)
    note_start(folder, second, None)
    write(folder, 3, attempt=second)
    assert len(checkpoints_in(folder)) == 1
    with pytest.raises(ReplacedError, match="other workers have begun"):
        check_last_group(folder, first)
    with pytest.raises(ReplacedError, match="other workers have begun"):
        check_rows_own(folder, first, 2)
    assert checkpoints_in(folder) == []
