"""Completes names on the command line: cheap ones alone, and nothing where they cannot be read."""

from marl_ray.errors import MarlRayError
from marl_ray.extensions import ALGORITHM


def complete_run(incomplete: str) -> list[str]:
    """Return the names of folders under `runs`."""
    from marl_ray.runs.stored import folder_names

    try:
        return _with_prefix(folder_names("runs"), incomplete)
    except MarlRayError:
        return []


def complete_algorithm(incomplete: str) -> list[str]:
    """Return the names of algorithms."""
    return _with_prefix(ALGORITHM.names(), incomplete)


def complete_override(incomplete: str) -> list[str]:
    """Return the dotted keys of a run's config, and the algorithms after `algorithm=`."""
    from marl_ray.config.reference import key_rows

    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={name}" for name in complete_algorithm(value)] if key.endswith("algorithm") else []
    return _with_prefix([f"{row.key}=" for row in key_rows("run") if not {"NAME", "[]"} & set(row.key.split("."))], key)


def _with_prefix(names: list[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]
