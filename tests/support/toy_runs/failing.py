"""The errors of several workers of which one fails; a module of its own, which other processes import."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from toys import engines, texts
from toys.engines import Apart

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError
from marl_ray.policies.agreement import all_gather_values
from marl_ray.policies.engines.base import EngineRefusedError
from marl_ray.policies.language import token_policy
from marl_ray.policies.language.sampling_copy import sampling_weights
from marl_ray.policies.language.sharding import gather_shards, stored_weights
from marl_ray.policies.language.sharding.shard import shard
from marl_ray.policies.language.token_policy import TokenPolicy
from marl_ray.training.checkpoints import saving
from marl_ray.training.checkpoints.storage import local_stored_folder
from marl_ray.training.collectives import broadcast_from_rank0, worker_mesh
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.start import RunStart
from marl_ray.training.single_process import train_alone
from marl_ray.training.team import gpu_pass_limit
from marl_ray.training.team.assembly import build_team
from toy_runs import runs

SOON_S = 20.0
"""Seconds within which all workers raise an error; the process group would wait for minutes, a checkpoint's for an hour."""
CPU = torch.device("cpu")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def all_raise(action: Callable[[], object], kind: type[MarlRayError] = MarlRayError) -> str:
    """The line that every worker raises, the same on all, and soon."""
    begin = time.monotonic()
    try:
        action()
    except kind as error:
        line = str(error)
    else:
        raise AssertionError("nothing was raised")
    lines = all_gather_values(line)
    assert len(set(lines)) == 1, lines
    assert time.monotonic() - begin < SOON_S
    return line


@contextmanager
def short_of(
    rank: int, caller: ModuleType, module: ModuleType, name: str, count: int, error: Exception
) -> Iterator[None]:
    """Within the block, let a function of a module fail once after this many calls, as an allocator does.

    Only calls by the module `caller` on the worker `rank` count.
    """
    function, remaining = getattr(module, name), [count]

    def fails(*arguments: Any, **more: Any) -> Any:
        if dist.get_rank() == rank and sys._getframe(1).f_globals["__name__"] == caller.__name__:
            remaining[0] -= 1
            if remaining[0] == -1:
                raise error
        return function(*arguments, **more)

    setattr(module, name, fails)
    try:
        yield
    finally:
        setattr(module, name, function)


def of_first() -> str:
    """Worker 0 fails while the others wait for its value."""
    return all_raise(lambda: broadcast_from_rank0(lambda: Path("/nowhere/to/be/found").read_text()))


def loads(folders: list[str], parallel: dict[str, int]) -> list[str]:
    """Let the last worker's file end early, and then its device have no room for what it reads.

    All workers have opened their files by then.
    """
    rank = dist.get_rank()
    mesh = worker_mesh("cpu", 1, parallel.get("context", 1), parallel.get("tensor", 1))
    policies = [
        token_policy.build_token_policy(
            ModelConfig(path=path, context=32), GenerationConfig(max_tokens=4), 0, unread=True
        )
        for path in (folders[rank], folders[0])
    ]
    if rank == dist.get_world_size() - 1:
        (path,) = Path(folders[rank]).glob("*.safetensors")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 10)
    lines = [all_raise(lambda: shard(policies[0], mesh, False))]
    with short_of(1, stored_weights, torch, "empty", 3, FULL):
        return [*lines, all_raise(lambda: shard(policies[1], mesh, False))]


def exports(folder: str, model: str, failing: int) -> str:
    """One worker fails in the middle of a bundle whose weights come from the workers' shards."""
    engine = "team.speaker.generation.engine=toys.engines:Apart"
    run = build_run(
        texts.config(model, engine, "train.group_size=2", f"resources.workers={dist.get_world_size()}"), CPU
    )
    run.step()
    remaining, send = [5], saving.gather_to_rank0  # type: ignore[attr-defined]

    def breaks(tensor: torch.Tensor, group: Any) -> torch.Tensor | None:
        remaining[0] -= 1
        if remaining[0] == 0 and dist.get_rank() == failing:
            raise OSError("the disk does not answer")
        sent: torch.Tensor | None = send(tensor, group)
        return sent

    saving.gather_to_rank0 = breaks  # type: ignore[attr-defined]

    def save() -> None:
        run.save(local_stored_folder(Path(folder, "broken")))
        run.saver.wait()

    line = all_raise(save)
    saving.gather_to_rank0 = send  # type: ignore[attr-defined]
    run.step()
    run.save(local_stored_folder(Path(folder, "whole")))  # an error is raised once
    run.close()
    return line


def exports_frozen(folders: list[str], folder: str) -> str:
    """Worker 0's file of a model below adapters ends early while it writes the bundle."""
    speaker = f"team.speaker.model={{path: '{folders[dist.get_rank()]}', context: 32, lora: {{rank: 4}}}}"
    engine = "team.speaker.generation.engine=toys.engines:Apart"
    run = build_run(texts.config(speaker, engine, "resources.workers=2"), CPU)
    run.step()
    if dist.get_rank() == 0:
        (path,) = Path(folders[0]).glob("*.safetensors")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 10)

    def save() -> None:
        run.save(local_stored_folder(Path(folder, "broken")))
        run.saver.wait()

    line = all_raise(save)
    run.close()
    return line


def trains(family: str, overrides: list[list[str]]) -> str:
    """Start the run of a family (`runs` or `texts`) on each worker, with overrides of its own.

    The file of one of them is not there.
    """
    config = {"runs": runs.config, "texts": texts.config}[family](*overrides[dist.get_rank()], "resources.workers=2")
    return all_raise(lambda: train_alone(config))


def opens(folders: list[str]) -> list[str]:
    """Build the team where worker 1 has the files of another model, and then where it cannot open its shards.

    In the second case the worker cannot open the files to read its shards alone, and reads the whole model.
    """
    run_config = texts.config(f"team.speaker.model={{path: '{folders[dist.get_rank()]}', context: 32}}")
    lines = [all_raise(lambda: runs.team_of(run_config))]
    if dist.get_rank() == 1:
        token_policy.empty_model = lambda path, context: None  # type: ignore[attr-defined]
    first = texts.config(f"team.speaker.model={{path: '{folders[0]}', context: 32}}")
    return [*lines, all_raise(lambda: runs.team_of(first))]


def refuses(folder: str) -> str:
    """Worker 1's engine refuses the weights after an update, which is every worker's error."""
    speaker = f"team.speaker.model={{path: '{folder}', context: 32}}"
    engine = "team.speaker.generation.engine=toys.engines:Apart"
    run = build_run(texts.config(speaker, engine, "resources.workers=2"), CPU)
    run.step()
    if dist.get_rank() == 1:
        ready = Apart.update_weights

        def refuse(engine: Apart) -> None:
            ready(engine)
            raise EngineRefusedError("vLLM: no room")

        Apart.update_weights = refuse  # type: ignore[method-assign,assignment]
    line = all_raise(run.step, EngineRefusedError)
    run.abandon()
    return line


def gathers(folder: str, *overrides: str) -> dict[str, str]:
    """Let a worker have no room for weights that come from others, or its engine fail between two weights.

    There is no room for a bundle, for an engine that has them itself, and for the copy that samples, after an update
    and after a checkpoint was read.
    """
    gather_shards.MAX_GATHERED_BYTES = 1 << 14
    common = (*overrides, "train.group_size=2", f"resources.workers={dist.get_world_size()}")
    torch_config = texts.config(*common)
    apart_config = texts.config(*common, "team.speaker.generation.engine=toys.engines:Apart")
    lines: dict[str, str] = {}
    run = build_run(apart_config, CPU)
    run.step()

    def save() -> None:
        run.save(local_stored_folder(Path(folder, "broken")))
        run.saver.wait()

    with short_of(0, gather_shards, torch, "empty", 3, MemoryError("no room")):
        lines["bundle"] = all_raise(save)
    with short_of(1, gather_shards, gather_shards, "_join_parts", 2, FULL):
        lines["engine"] = all_raise(run.step)
    run.abandon()

    def three(plain: TokenPolicy, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(sampling_weights(plain, frozen), 3)
        raise RuntimeError("the engine is gone")

    if dist.get_rank() == 1:
        engines.sampling_weights = three  # type: ignore[attr-defined]
    lines["between two"] = all_raise(lambda: build_run(apart_config, CPU))
    run = build_run(torch_config, CPU)
    run.step()
    run.save(local_stored_folder(Path(folder, "whole")))
    with short_of(1, gather_shards, gather_shards, "_join_parts", 2, FULL):
        lines["update"] = all_raise(run.step)
    run.abandon()
    with short_of(1, gather_shards, gather_shards, "_join_parts", 2, FULL):
        start = RunStart([local_stored_folder(Path(folder, "whole"))])
        lines["checkpoint"] = all_raise(lambda: build_run(torch_config, CPU, start))
    return lines


def limits(free: list[int]) -> list[tuple[dict[str, int], bool]]:
    """Return the limits of passes, and whether weights stay gathered, on workers with so much free memory.

    The memory is that of their GPUs: a pass takes 10 and 4 more for each further row, all weights 30.
    """
    run = texts.config("train.micro_batch=3", f"resources.workers={len(free)}")
    learner = build_team(run, make_env(run.env, ()), worker_mesh("cpu"), False).learners["speaker"]
    learner.policy = replace(learner.policy, device=torch.device("cuda"))
    model = learner.policy.model
    model.sharded = replace(model.sharded, gathers_once=False, gathered_bytes=30)
    gpu_pass_limit.peak_bytes = lambda policy, rows, learn_entropy: 10.0 + 4 * (rows - 1)
    gpu_pass_limit.free_bytes = lambda policy: math.ceil(free[dist.get_rank()] / gpu_pass_limit.USABLE_MEMORY_SHARE)
    limited = gpu_pass_limit.measure_pass_limits({"speaker": learner})
    return all_gather_values((limited, model.sharded.gathers_once))
