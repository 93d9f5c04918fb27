"""The default address of MLflow, which all commands and services share."""

import os
from pathlib import Path

from marl_ray.errors import MarlRayError

TRACKING_URI = "MLFLOW_TRACKING_URI"
"""MLflow's own environment variable."""


def resolve_tracking_uri(configured: str | None = None, storage: str = "runs") -> str:
    """Return the configured tracking URI, else that of MLFLOW_TRACKING_URI, else `mlflow.db` in the storage folder.

    Raises MarlRayError for remote storage, which cannot hold that file.
    """
    uri = configured or os.environ.get(TRACKING_URI)
    if uri:
        return uri
    if "://" in storage:
        raise MarlRayError(
            f"tracking.uri: expected a tracking URI here or in {TRACKING_URI}, because storage {storage!r} is not a "
            "local folder"
        )
    return f"sqlite:///{Path(storage).resolve() / 'mlflow.db'}"
