"""Runs untrusted Python programs and judges them. Standard library only, Linux only, no Docker.

`Pool` holds fork servers; `probe` tells how well this host can confine a program. See docs/sandbox.md.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marl_ray.sandbox.client.pool import Pool, probe
    from marl_ray.sandbox.limits import Execution, Judgement, Level, Limits, Status

__all__ = ["Execution", "Judgement", "Level", "Limits", "Pool", "Status", "probe"]


def __getattr__(name: str) -> object:
    """Return a name of `__all__`, imported when it is first used. Raises AttributeError for every other name.

    The fork servers import this package too and should stay small.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "client.pool" if name in ("Pool", "probe") else "limits"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
