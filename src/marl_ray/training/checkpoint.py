"""Checkpoints: everything needed to continue a run bit for bit, on any number of workers.

A checkpoint is a folder that all workers write into: sharded weights and optimisers by `torch.distributed.checkpoint`,
`state.json` (rank 0: progress, value normalisers, recent episodes, best score, MLflow run id), and `envs-RANK.json` (the
running episodes of each worker's environment copies). Random numbers need no state: they are functions of the seed and of
the position.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.training.collectives import world
from marl_ray.training.costs import CostStats
from marl_ray.training.learner.policy_learner import Learner
from marl_ray.training.run_folder.origin import FORMAT, PLAY, STATE, WEIGHTS, check_format, play_of


def save(folder: Path, learners: dict[str, Learner], state: dict[str, Any], envs: dict[str, Any]) -> None:
    """Write this worker's part of a checkpoint into `folder`; every worker calls it, with the same `state`."""
    rank, _ = world()
    folder.mkdir(parents=True, exist_ok=True)
    state_dict_saver.save(_sharded(learners), storage_writer=FileSystemWriter(folder / WEIGHTS))
    (folder / f"envs-{rank}.json").write_text(json.dumps(envs))
    if rank == 0:
        run_state = (
            {"format": FORMAT}
            | state
            | {"learners": {name: learner.state.plain() for name, learner in learners.items()}}
        )
        (folder / STATE).write_text(json.dumps(run_state))


def load(folder: Path, learners: dict[str, Learner], own_hyper: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restore the learners from `folder`; returns the run's state and the environment copies of all workers.

    The stored states of optimisers and learners contain hyper-parameters. With `own_hyper` the learners keep their own.
    Raises MarlRayError for a checkpoint of another format.
    """
    state = json.loads((folder / STATE).read_text())
    try:
        check_format(state)
    except MarlRayError as error:
        raise MarlRayError(f"{folder} {error}") from error
    sharded = _sharded(learners)
    state_dict_loader.load(sharded, storage_reader=FileSystemReader(folder / WEIGHTS))
    for name, learner in learners.items():
        part, policy = sharded[name], learner.policy
        set_state_dict(
            policy.model, policy.optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"]
        )
    for name, learner in learners.items():
        learner.load_state(state["learners"][name])
        if own_hyper:
            learner.apply_hyper()
    envs: dict[str, Any] = {}
    for path in folder.glob("envs-*.json"):
        envs |= json.loads(path.read_text())
    return state, envs


def iteration_of(folder: Path) -> int:
    """The iteration after which a checkpoint was written."""
    return int(json.loads((folder / STATE).read_text())["iteration"])


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


def _sharded(learners: dict[str, Learner]) -> dict[str, Any]:
    states = {}
    for name, learner in learners.items():
        untouched = not learner.policy.optimizer.state
        model, optimizer = get_state_dict(learner.policy.model, learner.policy.optimizer)
        if untouched:
            # Reading the state of an optimiser that has none makes it take an empty step, which Adam would count.
            for own in learner.policy.optimizer.state.values():
                if "step" in own:
                    own["step"].zero_()
        states[name] = {"model": model, "optimizer": optimizer}
    return states
