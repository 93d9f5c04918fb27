"""The state of a run that is equal on all workers, and its file.

The file, `state.json`, holds the learners' parts beside it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypedDict

from marl_ray.json_types import JsonMapping, JsonObject, JsonValue
from marl_ray.training.costs import CostStats


class RunOrigin(TypedDict):
    """The checkpoint of another run from which a run began."""

    run: str
    steps: int
    checkpoint: str
    """Its URI."""


@dataclass
class RunState:
    """Everything that a run continues with besides the learners, the environment copies and their tensors.

    A field's name is its key in `state.json`.
    """

    costs: Mapping[str, CostStats]
    """Policy -> the costs with which its last update compared the budgets."""
    mlflow_run_id: str | None
    """The run's id in MLflow; None without tracking."""
    run: str = ""
    """The run's name."""
    identity: str = ""
    """The run's `identity_hash`: which checkpoints are its own."""
    layouts: JsonMapping = field(default_factory=dict)
    """Trained policy -> the facts on which the layout of its weights and its state depend (`origin.state_layouts`)."""
    play_facts: Mapping[str, object] = field(default_factory=dict)
    """The facts on which the running episodes of the environment copies depend (`origin.play_facts`)."""
    iteration: int = 0
    """Number of iterations that are done."""
    steps: int = 0
    """Environment steps that all workers have played, over all iterations."""
    recent: JsonMapping = field(default_factory=dict)
    """The last training episodes, as `RecentEpisodes.state` gives them."""
    best_score: float = -math.inf
    """Greatest score of a saved checkpoint."""
    evaluate_at: float = 0
    """Environment steps at which the next evaluation is due, unless `evaluation.every` sets the iterations."""
    tokens: float = 0.0
    """Tokens that were sampled and trained on."""
    seconds: float = 0.0
    """Seconds of sampling and updates."""
    benchmarks: dict[str, str] = field(default_factory=dict)
    """Benchmark -> sha256 of its file when the run began."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the last iteration."""
    origin: RunOrigin | None = None
    """The checkpoint of another run from which this one began."""


class StateFile(NamedTuple):
    """The contents of `state.json`."""

    state: RunState
    learners: JsonMapping
    """Policy -> the plain state of its learner."""
    scalars: Mapping[str, float]
    """The numbers among the tensors, by the tensor's name."""

    def encode(self) -> bytes:
        """Return the JSON of one object.

        The object's keys are those of the state's fields, and `learners` and `scalars`.
        """
        plain = {each.name: getattr(self.state, each.name) for each in fields(RunState)}
        plain["costs"] = {name: vars(stats) for name, stats in self.state.costs.items()}
        return json.dumps(plain | {"learners": self.learners, "scalars": self.scalars}).encode()

    @classmethod
    def decode(cls, data: bytes) -> "StateFile":
        """Undo `encode`. Raises KeyError, TypeError or ValueError for other data."""
        plain = _object(json.loads(data))
        learners, scalars, costs = (_object(plain.pop(key)) for key in ("learners", "scalars", "costs"))
        stats = {name: _cost_stats(**_object(stored)) for name, stored in costs.items()}
        return cls(RunState(costs=stats, **plain), learners, scalars)


def _object(value: JsonValue) -> JsonObject:
    """Return a JSON object. Raises TypeError for another value."""
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return value


def _cost_stats(means: list[float] | None, episodes: int, decisions: float) -> CostStats:
    return CostStats(None if means is None else tuple(means), episodes, decisions)
