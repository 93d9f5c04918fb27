"""The weights and the state with which a run starts: new ones, or those of its own or of another run's checkpoint."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from marl_ray.config import RunConfig
from marl_ray.training.checkpoints.loading import load_newest
from marl_ray.training.checkpoints.origin import state_after
from marl_ray.training.checkpoints.run_state import RunState
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.costs import CostStats
from marl_ray.training.loop.callbacks import RunCallbacks
from marl_ray.training.team.members import Team


@dataclass(frozen=True)
class RunStart:
    """The checkpoints that a run may start from."""

    checkpoints: Sequence[StoredFolder] = ()
    """The run takes the first that is whole. If the list is empty, it begins anew."""
    origin: str | None = None
    """The checkpoint's URI if another run wrote it (`config.resume_from`)."""
    run_id: str | None = None
    """The run's id in MLflow, which its checkpoints hold."""
    own_hyper: bool = False
    """True if the checkpoint may be of a run with other hyper-parameters: the run takes its weights and optimiser state, and
    keeps the hyper-parameters of its config."""
    best_score_left: float = math.inf
    """The greatest score of a bundle that is left, if a better one may be lost."""
    pass_sizes: Mapping[str, int] = field(default_factory=dict)
    """Policy -> most sequences of a pass, where larger passes had no room on a worker."""

    @property
    def is_continuation(self) -> bool:
        """True if the run continues from a checkpoint of its own."""
        return bool(self.checkpoints) and self.origin is None


START_ANEW = RunStart()
"""The start of a run that has no checkpoint."""


def load_start(
    config: RunConfig, team: Team, start: RunStart, callbacks: RunCallbacks
) -> tuple[RunState, Mapping[str, object] | None]:
    """Load the weights of the run's start into the team.

    Returns the run's state and the collector's snapshot, if there is one. Raises as `load_newest` does.
    """
    initial = RunState(costs=dict.fromkeys(team.models, CostStats(None, 0)), mlflow_run_id=start.run_id)
    if not start.checkpoints:
        return initial, None
    callbacks.phase("reading the checkpoint")
    own_hyper = start.own_hyper or start.origin is not None
    state, snapshot = load_newest(start.checkpoints, team.learners, own_hyper, callbacks.say)
    if start.origin is not None:
        return state_after(config, state, snapshot, start.origin, initial)
    return replace(state, best_score=min(state.best_score, start.best_score_left)), snapshot
