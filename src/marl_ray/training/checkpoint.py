"""Checkpoints: everything needed to continue a run bit for bit, on any number of workers.

A checkpoint is a folder that all workers write into: sharded weights and optimisers by `torch.distributed.checkpoint`,
`state.json` (rank 0: progress, value normalisers, recent episodes, best score, MLflow run id), and `envs-RANK.json` (the
running episodes of each worker's environment copies). Random numbers need no state: they are functions of the seed and of
the position.
"""

import json
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from marl_ray.training.collectives import world
from marl_ray.training.learner.policy_learner import Learner

WEIGHTS = "weights"


def save(folder: Path, learners: dict[str, Learner], state: dict[str, Any], envs: dict[str, Any]) -> None:
    """Write this worker's part of a checkpoint into `folder`; every worker calls it, with the same `state`."""
    rank, _ = world()
    folder.mkdir(parents=True, exist_ok=True)
    state_dict_saver.save(_sharded(learners), storage_writer=FileSystemWriter(folder / WEIGHTS))
    (folder / f"envs-{rank}.json").write_text(json.dumps(envs))
    if rank == 0:
        run_state = state | {"learners": {name: learner.state.plain() for name, learner in learners.items()}}
        (folder / "state.json").write_text(json.dumps(run_state))


def load(folder: Path, learners: dict[str, Learner], own_hyper: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restore the learners from `folder`; returns the run's state and the environment copies of all workers.

    The stored states of optimisers and learners contain hyper-parameters. With `own_hyper` the learners keep their own.
    """
    sharded = _sharded(learners)
    state_dict_loader.load(sharded, storage_reader=FileSystemReader(folder / WEIGHTS))
    for name, learner in learners.items():
        part, policy = sharded[name], learner.policy
        set_state_dict(
            policy.model, policy.optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"]
        )
    state = json.loads((folder / "state.json").read_text())
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
    return int(json.loads((folder / "state.json").read_text())["iteration"])


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
