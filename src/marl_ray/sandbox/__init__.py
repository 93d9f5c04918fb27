"""Runs untrusted Python programs and judges them. Standard library only, Linux only, no Docker.

`Pool` holds fork servers; `probe` tells how well this host can confine a program. See docs/sandbox.md.
"""

from marl_ray.sandbox.limits import Execution, Judgement, Level, Limits, Status
from marl_ray.sandbox.pool import Pool, probe

__all__ = ["Execution", "Judgement", "Level", "Limits", "Pool", "Status", "probe"]
