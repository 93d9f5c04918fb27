"""`manifest.json`, the last file of a checkpoint: a folder without it is no checkpoint.

It names every other file with its size and sha256, and says what the checkpoint is of. It holds the sha256 of its own other
keys too.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from marl_ray.errors import MarlRayError, one_line
from marl_ray.stored_files.temporary_files import write_file
from marl_ray.training.checkpoints.storage import (
    DamagedCheckpointError,
    StoredFile,
    StoredFolder,
    UnwritableCheckpointError,
    read_file,
)
from marl_ray.training.run_folder.record import DIGEST_KEY, digest_of

FORMAT = 3
"""Version of a checkpoint's layout."""
MANIFEST_FILE = "manifest.json"
WITHDRAWN_FOLDER = "damaged"
"""Folder into which the manifest of a damaged checkpoint is moved."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The facts about a complete checkpoint."""

    format: int
    """FORMAT of the code that wrote it."""
    run: str
    """Name of the run."""
    identity: str
    """Hash of that part of the run's config which stays the same however often the run continues."""
    iteration: int
    """Iterations after which it was written."""
    steps: int
    """Environment steps of the run so far."""
    ranks: int
    """Number of workers that have written it."""
    score: float
    """Its score, by which the best checkpoint is chosen; UNKNOWN_SCORE for weights that were not evaluated."""
    metrics: Mapping[str, float]
    """The last row of metrics."""
    files: Mapping[str, StoredFile]
    """Every other file, by its path in the folder."""


def publish(place: StoredFolder, manifest: CheckpointManifest) -> None:
    """Write the manifest, complete or not at all: from then on the folder is a checkpoint.

    Raises UnwritableCheckpointError.
    """
    facts = asdict(manifest) | {"files": {name: list(file) for name, file in sorted(manifest.files.items())}}
    data = json.dumps({DIGEST_KEY: digest_of(facts), **facts}, indent=1).encode()
    target = place / MANIFEST_FILE
    try:
        write_file(place.filesystem, target.path, data, durable=True)
    except OSError as error:
        raise UnwritableCheckpointError(f"{target} cannot be written: {one_line(error)}") from error


def read_manifest(place: StoredFolder) -> CheckpointManifest | None:
    """Return the manifest of a folder; None where there is none.

    Raises DamagedCheckpointError, OSError, and MarlRayError for another format.
    """
    target = place / MANIFEST_FILE
    data = read_file(target)
    if data is None:
        return None
    try:
        facts = json.loads(data)
    except ValueError as error:
        raise DamagedCheckpointError(f"{target} is no manifest: {one_line(error)}") from error
    if not isinstance(facts, dict) or DIGEST_KEY not in facts:
        raise DamagedCheckpointError(f"{target} is no manifest: it is no JSON object with the key {DIGEST_KEY!r}")
    digest = facts.pop(DIGEST_KEY)
    if digest_of(facts) != digest:
        raise DamagedCheckpointError(f"{target} has another content than was written: its sha256 differs")
    check_format(facts)
    try:
        files = {name: StoredFile(*file) for name, file in facts["files"].items()}
        return CheckpointManifest(**facts | {"files": files})
    except (KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpointError(f"{target} is no manifest: {one_line(error)}") from error


def withdraw_manifest(place: StoredFolder) -> None:
    """Turn a damaged checkpoint into a folder that is none.

    The files stay for whoever wants to look. Where the storage does not let itself be changed, the next reader finds
    the damage again.
    """
    with contextlib.suppress(OSError, NotImplementedError):
        place.filesystem.create_dir((place / WITHDRAWN_FOLDER).path)
        place.filesystem.move((place / MANIFEST_FILE).path, (place / WITHDRAWN_FOLDER / MANIFEST_FILE).path)


def check_format(facts: Mapping[str, object]) -> None:
    """Raise MarlRayError if a checkpoint is of another version."""
    if facts.get("format") != FORMAT:
        raise MarlRayError(
            f"has checkpoint format {facts.get('format')}, expected {FORMAT}; it can be read by the version of marl-ray "
            "that wrote it"
        )
