"""A worker that reads a model's weights from files.

It has a module of its own, which other processes import.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from toy_runs.runs import team_of
from toys.texts import config

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.language.sampling_copy import (
    WeightSnapshot,
    empty_copy,
    plain_copy,
    refresh,
    sampling_weights,
)
from marl_ray.policies.language.sharding.gather_shards import full_tensors, gather_to_rank0
from marl_ray.policies.language.sharding.hugging_face import write_model
from marl_ray.policies.language.sharding.shard import shard
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy
from marl_ray.training.collectives import worker_mesh

CPU = torch.device("cpu")


def build_policy(folder: str, unread: bool, **model: object) -> TokenPolicy:
    """The policy of a folder, with both kinds of critics."""
    settings = ModelConfig.model_validate({"path": folder, "context": 64} | model)
    return build_token_policy(settings, GenerationConfig(), 3, True, 1, unread=unread)


def read_alike(
    folder: str,
    models: list[dict[str, object]],
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    replicate: int = 1,
) -> None:
    """Shards and copies of weights that stay in files are those of a model that is read at once, before and after a step."""
    mesh = worker_mesh("cpu", replicate)
    for model in models:
        pairs = []
        for unread in (True, False):
            policy = build_policy(folder, unread, **model)
            assert (policy.unread is not None) == unread
            plain = plain_copy(policy, CPU)
            shard(policy, mesh, False)
            pairs.append((policy, plain))
        for _ in range(2):
            for first, other in zip(*pairs, strict=True):
                names = [[name for name, _ in policy.named_parameters()] for policy in (first, other)]
                assert names[0] == names[1]
                for a, b in zip(full_tensors(first.parameters()), full_tensors(other.parameters()), strict=True):
                    assert a.dtype == b.dtype and torch.equal(a, b)
            for policy, plain in pairs:
                policy.evaluate(*rows).log_probs.sum().backward()
                torch.optim.SGD(policy.actor_parameters(), 0.1).step()
                policy.zero_grad()
                refresh(plain, policy)


def refuse_together(folders: list[str]) -> str:
    """The error that each worker raises whose file is another one's; equal on all workers."""
    try:
        team_of(config(f"team.speaker.model={{path: '{folders[dist.get_rank()]}', context: 64}}"))
    except MarlRayError as error:
        lines: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(lines, str(error))
        assert len(set(lines)) == 1
        return str(error)
    raise AssertionError("nothing was refused")


def peaks(folder: str, unread: bool, samples: bool) -> list[int]:
    """Return each worker's peak of own memory (bytes) while it makes its trained weights.

    With `samples` it makes a copy that samples too. Mapped files are not counted: the system drops their pages when
    it needs room.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    warm = torch.nn.Linear(64, 64)
    dist.all_reduce(warm.weight.detach())

    def make() -> object:
        policy = build_token_policy(ModelConfig(path=folder), GenerationConfig(), 0, unread=unread)
        plain = plain_copy(policy, CPU) if samples else None
        shard(policy, mesh, False)
        return policy, plain

    peak = _peak(make)
    every: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(every, peak)
    return every


def loading_peaks(folder: str, out: str) -> dict[str, list[int]]:
    """Return each worker's peaks of own memory (bytes) where an engine has the weights.

    They are: to load, its shards included; to hand all weights to the engine; and to write them to `out`, from
    shards on CPU.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    warm = torch.nn.Linear(64, 64)
    dist.all_reduce(warm.weight.detach())
    copies: list[TokenPolicy] = []

    def load() -> None:
        policy = build_token_policy(ModelConfig(path=folder), GenerationConfig(), 0, unread=True)
        copies.append(empty_copy(policy, CPU))
        shard(policy, mesh, False)
        copies.append(policy)

    def hand_over() -> None:
        for _ in sampling_weights(copies[0]):
            pass

    def write() -> None:
        still, trained = WeightSnapshot(copies[0]), dict(copies[1].lm.named_parameters())

        def first(name: str) -> torch.Tensor | None:
            return gather_to_rank0(trained[name].detach(), dist.group.WORLD)

        if dist.get_rank() == 0:
            write_model(Path(out), still.policy.lm, still.shapes, still.read_merged(first), file_bytes=100_000_000)
        else:
            still.send(first)

    stage_peaks = {}
    for name, make in (("load", load), ("hand over", hand_over), ("write", write)):
        every: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(every, _peak(make))
        stage_peaks[name] = every
    return stage_peaks


def _peak(make: Callable[[], object]) -> int:
    before, highest, done = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            highest[0] = max(highest[0], _anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    made = make()
    highest[0] = max(highest[0], _anonymous())
    done.set()
    watcher.join(60)
    del made
    return highest[0] - before


def _anonymous() -> int:
    """Bytes of memory that this process alone has written."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
