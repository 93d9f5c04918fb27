"""The state of a run that is equal on all workers, as `state.json` holds it beside the learners' parts."""

from collections.abc import Mapping, Sequence
from typing import Any

from marl_ray.config import RunConfig
from marl_ray.training.checkpoints.origin import PLAY, play_of
from marl_ray.training.costs import CostStats


def fresh_state(run_id: str | None, policies: Sequence[str]) -> dict[str, Any]:
    """The state with which a run begins."""
    return {
        "iteration": 0,
        "steps": 0,
        "costs": {name: vars(CostStats(None, 0)) for name in policies},
        "recent": {},
        "best_score": float("-inf"),
        "evaluate_at": 0,
        "tokens": 0.0,
        "seconds": 0.0,
        "benchmarks": {},
        "metrics": {},
        "mlflow_run_id": run_id,
        "origin": None,
    }


def state_after(
    config: RunConfig,
    other: Mapping[str, Any],
    envs: Mapping[str, Any],
    checkpoint_uri: str,
    run_id: str | None,
    policies: Sequence[str],
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The state with which a run begins after another one's checkpoint: counters go on, and evaluations begin anew. Running
    episodes and means over recent ones go on if both runs play alike."""
    state = fresh_state(run_id, policies) | {key: other[key] for key in ("iteration", "steps", "tokens", "seconds")}
    state["origin"] = {"run": other["run"], "steps": other["steps"], "checkpoint": checkpoint_uri}
    if other[PLAY] != play_of(config):
        return state, None
    return state | {key: other[key] for key in ("recent", "costs")}, envs
