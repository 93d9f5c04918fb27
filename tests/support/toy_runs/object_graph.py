"""Everything that can change in a run, as paths with values: what a checkpoint must bring back."""

import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn
from torch.distributed.tensor import DTensor

PLAIN = (bool, int, float, str, bytes, type(None), complex)
FIXED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, BaseModel)


def walk(value: Any, path: str, seen: frozenset[int], without: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """(path, plain value) of all that `value` refers to, but for the paths in `without`."""
    if path in without or isinstance(value, FIXED):
        return
    if isinstance(value, (*PLAIN, np.generic)):
        yield path, value
        return
    if id(value) in seen:  # a circle
        return
    seen = seen | {id(value)}
    match value:
        case torch.Tensor():
            local = value.to_local() if isinstance(value, DTensor) else value
            yield path, local.detach().cpu().numpy().copy() if local.dtype != torch.bfloat16 else local.float().numpy()
        case np.ndarray():
            if value.dtype != object:
                yield path, value.copy()
        case nn.Module():
            for key, tensor in value.state_dict(keep_vars=True).items():
                yield from walk(tensor, f"{path}.{key}", seen, without)
            for module_path, module in value.named_modules():
                if type(module).__module__.startswith("marl_ray"):
                    part = {key: part for key, part in vars(module).items() if not key.startswith("_")}
                    part = {key: part for key, part in part.items() if not isinstance(part, nn.Module)}
                    yield from walk(part, f"{path}({module_path})", seen, without)
        case torch.optim.Optimizer():
            for number, group in enumerate(value.param_groups):
                for at, parameter in enumerate(group["params"]):
                    yield from walk(dict(value.state.get(parameter, {})), f"{path}[{number}][{at}]", seen, without)
                rest = {key: part for key, part in group.items() if key != "params"}
                yield from walk(rest, f"{path}[{number}]", seen, without)
        case Mapping():
            yield f"{path}.keys", sorted(map(str, value))
            for key, part in value.items():
                yield from walk(part, f"{path}[{key}]", seen, without)
        case list() | tuple() | deque():
            yield f"{path}.length", len(value)
            for at, part in enumerate(value):
                yield from walk(part, f"{path}[{at}]", seen, without)
        case set() | frozenset():
            yield path, sorted(map(str, value))
        case _:
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            names = {**getattr(value, "__dict__", {}), **{n: getattr(value, n) for n in slots if hasattr(value, n)}}
            for name, part in names.items():
                yield from walk(part, f"{path}.{name}", seen, without)


def differing(first: Any, other: Any, without: Mapping[str, str]) -> list[str]:
    """Paths at which two runs differ, or that one of them lacks."""
    left, right = (dict(walk(run, "run", frozenset(), without)) for run in (first, other))
    return sorted(
        path for path in {*left, *right}
        if path not in left or path not in right or not same(left[path], right[path])
    )  # fmt: skip


def same(first: Any, other: Any) -> bool:
    if isinstance(first, np.ndarray) and isinstance(other, np.ndarray):
        return first.shape == other.shape and np.array_equal(first, other, equal_nan=first.dtype.kind == "f")
    return bool(first == other) or (first != first and other != other)  # noqa: PLR0124  NaN, of any type
