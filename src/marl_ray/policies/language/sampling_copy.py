"""Copies of a token policy: complete ones that sample, and empty ones for engines with weights."""

import copy
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from marl_ray.config.run.model import ModelConfig
from marl_ray.policies.language.lora import (
    adapted_layers,
    bare_name,
    bare_weights,
    is_adapter,
    lay_matrices_together,
    merged_weight,
)
from marl_ray.policies.language.sharding.gather_shards import MAX_GATHERED_BYTES, full_tensors
from marl_ray.policies.language.sharding.stored_weights import tied_names
from marl_ray.policies.language.token_policy import TokenPolicy, WeightSource, move_to_device, read_weights


def frozen_copy(policy: TokenPolicy) -> TokenPolicy:
    """Copy a policy that is not sharded yet; the copy has no gradients."""
    return _copy_policy(policy, None)


def plain_copy(policy: TokenPolicy, device: torch.device | None = None) -> TokenPolicy:
    """Make the copy that samples: without gradients, in `config.dtype`, on the policy's device or on `device`.

    `device` has to be given for a policy whose weights are still in files. The policy is not sharded yet. Adapters are
    not merged into the weights: in bfloat16 rounding would remove small adapters.
    """
    device = device or policy.device
    plain = _copy_policy(policy, sampling_dtype(policy.config, device))
    read_weights(plain, device)
    lay_matrices_together(plain)
    return plain


def empty_copy(policy: TokenPolicy, device: torch.device, trained: bool = True) -> TokenPolicy:
    """Make the copy for an engine that has the weights itself.

    The copy is all that `plain_copy` makes except for weights that are still in files, which `sampling_weights` brings.
    With `trained` the policy will be sharded, and they are its shards.
    """
    assert policy.unread is not None
    empty = _copy_policy(policy, sampling_dtype(policy.config, device))
    empty.unread, empty.home = None, device
    empty.source = WeightSource(policy.unread, policy if trained else None)
    return empty


def sampling_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the number type of weights that sample on a device."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.dtype == "fp32" else torch.bfloat16


def _copy_policy(policy: TokenPolicy, dtype: torch.dtype | None) -> TokenPolicy:
    # The parameters are passed in their new type, so that the copy is never in memory in the old type.
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to(dtype or parameter.dtype, copy=True), requires_grad=False)
        for parameter in policy.parameters()
    }
    memo |= {id(shared): shared for shared in (policy.tokenizer, policy.unread)}
    return copy.deepcopy(policy, memo)


def detach_copy(empty: TokenPolicy) -> TokenPolicy:
    """Copy an empty copy for another process, which gets the weights in another way. What it holds is on CPU."""
    memo: dict[int, object] = {id(empty.tokenizer): empty.tokenizer, id(empty.source): None}
    detached = copy.deepcopy(empty, memo)
    detached.home = None
    move_to_device(detached, torch.device("cpu"))
    return detached


def fill_with_zeros(policy: TokenPolicy) -> None:
    """Give a policy zeros on CPU in place of weights on the meta device, so that weights can be copied into it."""
    state: dict[str, nn.Parameter] = {}
    for names in tied_names(policy.lm):
        parameter = policy.lm.get_parameter(names[0])
        if parameter.is_meta:
            state |= dict.fromkeys(names, nn.Parameter(torch.zeros_like(parameter, device="cpu"), requires_grad=False))
    policy.lm.load_state_dict(state, strict=False, assign=True)


@torch.no_grad()
def snapshot_copy(plain: TokenPolicy, changing: Collection[str]) -> TokenPolicy:
    """Copy a sampling copy as it is now, so that it can be written while the other is refreshed.

    The two share the weights that are not `changing`. Where all change, the copy is on the CPU, because a GPU has no
    room for one more.
    """
    everything = all(name in changing for name, _ in plain.named_parameters())
    memo: dict[int, object] = {id(shared): shared for shared in (plain.tokenizer, plain.source)}
    for name, parameter in plain.named_parameters():
        device = "cpu" if everything else parameter.device
        copied = name in changing and not parameter.is_meta
        memo[id(parameter)] = nn.Parameter(parameter.to(device, copy=True), False) if copied else parameter
    return copy.deepcopy(plain, memo)


@torch.no_grad()
def refresh(plain: TokenPolicy, trained: TokenPolicy) -> None:
    """Copy trained weights, sharded or not, into a sampling copy; every worker takes part.

    Frozen weights never change, so they are not copied, nor are those that an empty copy does not hold.
    """
    targets = dict(plain.named_parameters())
    trainable = {
        name: parameter
        for name, parameter in trained.named_parameters()
        if parameter.requires_grad and not targets[name].is_meta
    }
    for name, value in zip(trainable, full_tensors(trainable.values()), strict=True):
        targets[name].copy_(value)
    plain.version += 1


def sampled_weights(plain: TokenPolicy) -> dict[str, Tensor]:
    """Return the weights of the language model that samples, without its adapters.

    The weights have the names of the model without adapters, and are in the order of `sampling_weights`. Those of an
    empty copy are on the meta device.
    """
    if plain.source is None:
        return bare_weights(plain.lm)
    return {
        name: plain.lm.get_parameter(names[0])
        for names in _trained_names_first(plain)
        for name in map(bare_name, names)
    }


@torch.no_grad()
def sampling_weights(plain: TokenPolicy, frozen: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the present weights of `sampled_weights` one by one, on the policy's device and in the type that samples.

    Those that are never trained are left out unless `frozen`. For an empty copy every worker takes part, and takes all;
    one that fails in a block of `run_on_all_workers` ends that of the others too.
    """
    if plain.source is None:
        yield from bare_weights(plain.lm).items()
        return
    sharded = _sharded_weights(plain)
    gathered = full_tensors(sharded.values())
    for names in _trained_names_first(plain):
        parameter = plain.lm.get_parameter(names[0])
        if names[0] in sharded:
            value = next(gathered).to(parameter.dtype)
        elif not frozen:
            continue
        else:
            value = (
                plain.source.stored_weights.read_complete(names, parameter, plain.device)
                if parameter.is_meta
                else parameter
            )
        for name in names:
            yield bare_name(name), value


def group_into_parts(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the weights in parts of at most MAX_GATHERED_BYTES bytes, or of one weight that is larger."""
    part: dict[str, Tensor] = {}
    for name, tensor in weights:
        if part and sum(other.nbytes for other in part.values()) + tensor.nbytes > MAX_GATHERED_BYTES:
            yield part
            part = {}
        part[name] = tensor
    if part:
        yield part


def _sharded_weights(plain: TokenPolicy) -> dict[str, Tensor]:
    """Return name -> trained weight, of those that an empty copy does not hold."""
    assert plain.source is not None
    trained = plain.source.trained_policy
    if trained is None:
        return {}
    targets = dict(plain.lm.named_parameters())
    return {
        name: parameter
        for name, parameter in trained.lm.named_parameters()
        if parameter.requires_grad and targets[name].is_meta
    }


def _trained_names_first(plain: TokenPolicy) -> list[list[str]]:
    """Return the names of each weight without the adapters: first of those that are trained."""
    sharded = _sharded_weights(plain)
    weights = [names for names in tied_names(plain.lm) if not is_adapter(names[0])]
    return sorted(weights, key=lambda names: names[0] not in sharded)  # stable, so both parts keep their order


class WeightSnapshot:
    """The weights of an empty copy as they are now, for a thread that writes them while training continues."""

    def __init__(self, empty: TokenPolicy) -> None:
        self.policy = snapshot_copy(empty, {name for name, _ in empty.named_parameters()})
        self._order, self._sharded = _trained_names_first(empty), set(_sharded_weights(empty))
        self._adapted = {f"{name}.base_layer.weight": layer for name, layer in adapted_layers(self.policy.lm)}

    @property
    def shapes(self) -> dict[str, Tensor]:
        """Name in the model without adapters -> a tensor of the weight's shape and type; tied weights once."""
        return {bare_name(names[0]): self.policy.lm.get_parameter(names[0]) for names in self._order}

    def send(self, first: Callable[[str], Tensor | None]) -> None:
        """Take part in the reading of rank 0: call `first` with the name of each trained weight, as it does."""
        for names in self._order:
            if names[0] in self._sharded:
                first(names[0])

    def read_merged(self, first: Callable[[str], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of `shapes` one by one, with adapters merged.

        `first` returns a trained weight of `policy.lm` on rank 0, with all workers.
        """
        for name, value in self._bare(first):
            layer = self._adapted.get(name)
            yield bare_name(name), value if layer is None else merged_weight(layer, value.to(layer.up.device))

    def read_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights below adapters, by all their names in the model without adapters, in the order of these."""
        places = {bare_name(name): names for names in self._order for name in names}
        for name in sorted(places):
            yield name, self._frozen(places[name])

    def _bare(self, first: Callable[[str], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        for names in self._order:
            if names[0] in self._sharded:
                value = first(names[0])
                assert value is not None
                yield names[0], value.to(self.policy.lm.get_parameter(names[0]).dtype)
            else:
                yield names[0], self._frozen(names)

    def _frozen(self, names: list[str]) -> Tensor:
        parameter: Tensor = self.policy.lm.get_parameter(names[0])
        assert isinstance(self.policy.source, WeightSource)
        return (
            self.policy.source.stored_weights.read_complete(names, parameter, torch.device("cpu"))
            if parameter.is_meta
            else parameter
        )
