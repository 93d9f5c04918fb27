"""The tensors of a checkpoint: trained weights and optimiser states of all policies, by name.

    POLICY/model/PARAMETER              a trained parameter, or a buffer of the model
    POLICY/optimizer/PARAMETER/PART     what the optimiser keeps of that parameter (`step`, `exp_avg`, ...)

Frozen weights, such as the base model under adapters, are not in a checkpoint: the config names where they come from.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from marl_ray.training.learner.policy_update import Learner

OPTIMIZER = "/optimizer/"
"""Part of the names of the optimisers' states."""


def tensors_of(learners: Mapping[str, Learner]) -> dict[str, Tensor]:
    """Return the live tensors by name; those of sharded weights are DTensors."""
    tensors = {}
    for policy, learner in learners.items():
        state = learner.policy.optimizer.state
        for key, value in _model_tensors(learner.policy.model):
            tensors[f"{policy}/model/{key}"] = value
            for part, moment in state.get(value, {}).items():
                tensors[f"{policy}{OPTIMIZER}{key}/{part}"] = moment
    return tensors


def scalars_of(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the numbers among the tensors, such as the steps that Adam has taken.

    The numbers are equal on all workers. As tensors they would lie in one worker's file, and all would have to read it.
    """
    return {name: value.item() for name, value in tensors.items() if value.ndim == 0}


def allocate_states(
    learners: Mapping[str, Learner], stored: Metadata, scalars: Mapping[str, float]
) -> dict[str, Tensor]:
    """Give the optimisers the states that a checkpoint holds: its `scalars`, and tensors of zeros.

    Returns the live tensors by name, to be loaded in place.
    """
    parts: dict[str, list[tuple[str, float | TensorStorageMetadata]]] = {}
    for name, facts in [*stored.state_dict_metadata.items(), *scalars.items()]:
        parameter, _, part = name.rpartition("/")
        assert isinstance(facts, float | TensorStorageMetadata)
        parts.setdefault(parameter, []).append((part, facts))
    for policy, learner in learners.items():
        optimizer = learner.policy.optimizer
        optimizer.state.clear()
        for key, value in _model_tensors(learner.policy.model):
            tensor_parts = parts.get(f"{policy}{OPTIMIZER}{key}")
            if tensor_parts is not None:
                optimizer.state[value] = {part: _allocate_part(value, facts) for part, facts in tensor_parts}
    return {name: value for name, value in tensors_of(learners).items() if name not in scalars}


@torch.no_grad()
def _allocate_part(parameter: Tensor, facts: float | TensorStorageMetadata) -> Tensor:
    """Return a number of a parameter's optimiser state as a tensor, or zeros in place of a stored tensor."""
    if not isinstance(facts, TensorStorageMetadata):
        return torch.tensor(float(facts), device=parameter.device)
    dtype = facts.properties.dtype
    if facts.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(facts.size, dtype=dtype, device=parameter.device)


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each trained parameter and each persistent buffer.

    Tied weights come once.
    """
    yielded: set[int] = set()
    for key, value in model.state_dict(keep_vars=True).items():
        if (isinstance(value, nn.Parameter) and not value.requires_grad) or id(value) in yielded:
            continue
        yielded.add(id(value))
        yield key, value


class CpuCopy:
    """A copy of the learners' tensors in CPU memory, which is taken again for each checkpoint."""

    def __init__(self, learners: Mapping[str, Learner]) -> None:
        self.learners = learners
        self.states: list[int] = []
        """The identities of the tensors of the optimisers' states: a first step makes new ones."""
        self.now: list[tuple[Tensor, Tensor]] = []
        """Copies and their sources that `take` copies itself."""
        self.later: list[tuple[Tensor, Tensor]] = []
        """Those that it leaves to the function which it returns."""
        self.tensors: dict[str, Tensor] = {}
        """The copies by name, in the form that torch's distributed checkpoints take."""

    @torch.no_grad()
    def take(self) -> Callable[[], None]:
        """Copy what playing may change, and all that is on a GPU, and return a function that copies the rest.

        Playing changes the statistics of observations, for example. The rest is what only an update changes: the
        weights and the states of the optimisers. Another thread may call the function, and the next update must wait
        for it (Mohan et al. 2021, CheckFreq, section 4.2).
        """
        optimizers = [learner.policy.optimizer for learner in self.learners.values()]
        states = [id(moment) for each in optimizers for state in each.state.values() for moment in state.values()]
        if states != self.states or not self.tensors:
            self.states = states
            self._allocate()
        _copy(self.now)  # to pinned memory all transfers are under way at once
        if any(source.is_cuda for _, source in self.now):
            torch.cuda.synchronize()
        return partial(_copy, self.later)

    def _allocate(self) -> None:
        """Make the copies, and divide them between `take` and the function that it returns."""
        self.now, self.later, self.tensors = [], [], {}
        for name, live in tensors_of(self.learners).items():
            source = live.to_local() if isinstance(live, DTensor) else live
            target = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda, requires_grad=False)
            is_updated = OPTIMIZER in name or isinstance(live, nn.Parameter)
            (self.later if is_updated and not source.is_cuda else self.now).append((target, source))
            self.tensors[name] = target
            if isinstance(live, DTensor):
                self.tensors[name] = DTensor.from_local(
                    target,
                    cpu_mesh(live.device_mesh),
                    live.placements,
                    run_check=False,
                    shape=live.shape,
                    stride=live.stride(),
                )


def cpu_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the same workers on CPU.

    The mesh only says who holds which part, because nothing is exchanged over it.
    """
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)


@torch.no_grad()
def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
        torch._foreach_copy_(targets, sources, non_blocking=True)
