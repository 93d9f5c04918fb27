"""marl-ray: train teams of policies on Ray, measure them, serve the winners.

    import marl_ray

    run = marl_ray.train("jobs/configs/multigrid_mappo.yaml", hyper={"lr": 3e-4})
    team = run.load()                  # or marl_ray.load("models:/gridworld-mappo/1")
    actions = team.act(observations)

`train`, `sweep`, `compare`, `evaluate` and `load` run here; `Client` speaks to a gateway. Each is imported at its first use,
so that `import marl_ray` loads neither torch nor Ray. `__init__.pyi` has their types.
"""

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

_API = {
    "ActResult": "client",
    "Client": "client",
    "BenchmarkResult": "evaluating.benchmarks",
    "EpisodeScores": "evaluating.episodes",
    "RunComparison": "comparing",
    "TrainedRun": "training",
    "LoadedTeam": "teams",
    "compare": "comparing",
    "evaluate": "evaluating.call",
    "load": "teams",
    "sweep": "sweeping",
    "train": "training",
}
"""Name -> module of `marl_ray.api`."""
__all__ = ["MarlRayError", "__version__", *_API]


def __getattr__(name: str) -> Any:
    if name == "MarlRayError":
        return importlib.import_module("marl_ray.errors").MarlRayError
    if name not in _API:
        # With `name` and `obj`, Python suggests the name that is close.
        raise AttributeError(f"module 'marl_ray' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f"marl_ray.api.{_API[name]}"), name)
    globals()[name] = value  # so that this function is called once for each name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
