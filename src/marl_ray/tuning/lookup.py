"""Sweeps by their name or folder, and their winners."""

from marl_ray.errors import MarlRayError, did_you_mean, one_line
from marl_ray.stored_files.folder_kinds import SWEEP_FILE
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.records import REPORT_FILE, SweepRecords, values_line
from marl_ray.tuning.records_file import load_records


def find_sweep(sweep: str, storage: str = "runs") -> tuple[Folder, SweepRecords]:
    """Find a sweep by its folder (or URI), or by its name under the storage. Raises MarlRayError if there is none."""
    parent, _, name = sweep.rstrip("/").rpartition("/")
    places = [Folder(parent or ".", name)] + ([] if parent else [Folder(storage, name)])
    for folder in places:
        if folder.exists(SWEEP_FILE):
            return folder, _load_existing(folder)
    tried = " or ".join(f"{place.uri}/{SWEEP_FILE}" for place in places)
    names = [
        folder for folder in Folder(parent or storage).folders() if Folder(parent or storage, folder).exists(SWEEP_FILE)
    ]
    suggestion = did_you_mean(name, names) if names else ""
    raise MarlRayError(f"sweep {sweep!r}: expected a sweep's folder or name, but there is no {tried}{suggestion}")


def _load_existing(folder: Folder) -> SweepRecords:
    try:
        records = load_records(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MarlRayError(f"{folder.uri}/{SWEEP_FILE} is not the record of a sweep: {one_line(error)}") from error
    if records is None:
        raise MarlRayError(f"{folder.uri}/{SWEEP_FILE} has gone")
    return records


def winner_of(sweep: str, storage: str = "runs") -> tuple[str, str]:
    """Return the registered model of a sweep's winner, and a description of it.

    Raises MarlRayError if there is no winner.
    """
    folder, records = find_sweep(sweep, storage)
    if records.winner is None:
        why_not = {
            "running": "it has not ended",
            "interrupted": f"it was interrupted ({records.error})",
            "failed": records.error,
        }
        reason = why_not.get(records.status, "no trial has a result")
        raise MarlRayError(f"sweep {records.name!r} has no winner: {reason}; see {folder.uri}/{REPORT_FILE}")
    if not records.winner_model:
        raise MarlRayError(
            f"sweep {records.name!r}: the bundle of its winner, trial {records.winner:04d}, is not registered in MLflow; "
            "run the sweep's command again, it registers the bundle and trains nothing"
        )
    values = values_line(records.trials[records.winner].values)
    return records.winner_model, f"winner of sweep {records.name}: trial {records.winner:04d} ({values})"
