"""Import of users' own objects by `package.module:NAME`."""

import importlib
from typing import Any

from marl_ray.errors import MarlRayError, one_line


def imported(reference: str) -> Any:
    """The object that `package.module:NAME` names; NAME may be dotted. Raises MarlRayError with the reason if it
    fails."""
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise MarlRayError(f"expected package.module:NAME, got {reference!r}")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it loads
        raise MarlRayError(f"cannot import {reference} ({type(error).__name__}: {one_line(error)})") from error
    return target
