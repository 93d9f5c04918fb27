"""Names for runs whose configs have none."""

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from marl_ray.config import RunConfig, parse_config, read_yaml
from marl_ray.errors import MarlRayError

LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
"""Letters and digits that are not mistaken for each other."""
MAX_NAME_LENGTH = 40
"""Maximum number of characters of a made name before its random end, so that a table of runs stays narrow."""


def load_named(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
    """Return the run's config, which has a name, and the overrides that make the same config again.

    A name is made if none is given. Raises MarlRayError as `load_config` does.
    """
    return parse_named(read_yaml(path), overrides, str(path))


def parse_named(data: object, overrides: Sequence[str], source: str) -> tuple[RunConfig, list[str]]:
    """Return the result of `load_named` for plain data, which `source` names in errors. Raises MarlRayError."""
    has_name = (isinstance(data, dict) and "name" in data) or any(
        override.startswith("name=") for override in overrides
    )
    if not has_name:
        draft = parse_config(RunConfig, data, [*overrides, "name=run"], source=source)
        overrides = [*overrides, f"name={make_name(draft)}"]
    return parse_config(RunConfig, data, overrides, source=source), list(overrides)


def make_name(config: RunConfig) -> str:
    """Make a name of the algorithm, the environment and four random characters, such as `mappo-empty-8x8-k3f9`.

    No folder under the config's storage has this name.
    """
    learner = next(name for name, policy in config.team.items() if not policy.frozen)
    parts = (config.algorithm_of(learner), config.env.id)
    words = "-".join(
        re.sub(r"^MultiGrid-|^mpe2\.|^gymnasium\.|[-_]v\d+$", "", part.rpartition(":")[2]) for part in parts
    )
    stem = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:MAX_NAME_LENGTH].strip("-")
    taken = _taken_names(config.storage)
    while (name := f"{stem}-{''.join(secrets.choice(LETTERS) for _ in range(4))}") in taken:
        pass
    return name


def _taken_names(storage: str) -> frozenset[str]:
    from marl_ray.runs.stored import folder_names

    try:
        return frozenset(folder_names(storage))
    except MarlRayError:  # a storage that this machine does not reach; the random end is enough
        return frozenset()
