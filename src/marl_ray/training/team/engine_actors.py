"""Engines in actors of Ray, which sample for all workers of a run on resources of their own.

Worker 0 makes the actors and hands each version of the weights to them: from its GPU by NCCL, or, on a CPU and for
adapters, through Ray's object store, where all actors of a machine read one copy. The actors end with worker 0, so a
new group of workers never meets the weights of the previous one.
"""

import contextlib
import copy
import secrets
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from marl_ray.config import RunConfig, engine_spec
from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError, describe_error, one_line
from marl_ray.policies.engines.base import (
    Completion,
    Engine,
    EngineLostError,
    EngineRefusedError,
    Prompt,
    Token,
    checked_generation,
    tokens_of,
)
from marl_ray.policies.engines.decoding.trained_log_probs import with_trained_log_probs
from marl_ray.policies.engines.host import HostTransfer, PackedTensor, WeightGroup, engine_host, pack_tensor
from marl_ray.policies.language.sampling_copy import detach_copy, group_into_parts, sampled_weights, sampling_weights
from marl_ray.policies.language.token_policy import TokenPolicy
from marl_ray.training.collectives import broadcast_from_rank0, rank_and_world_size

PLACE_S = 300.0
"""Seconds that an actor waits for resources of the cluster."""
ANSWER_S = 300.0
"""Seconds that an actor may take to answer, or to write its next token."""
CLOSE_S = 15.0
"""Seconds that an actor may take to end."""
GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that an engine takes, which has the GPU for itself."""
CPU_MEMORY_SHARE = 0.5
"""Share of the memory that an engine may take on a machine without a GPU."""


class EngineActors(Engine):
    """The actors of one policy.

    Every worker makes an `EngineActors`, and all call `update_weights` and `close` together.
    """

    def __init__(self, config: RunConfig, name: str, policy: TokenPolicy) -> None:
        """Start the actors of the engine of policy `name` of the team.

        Raises EngineLostError if the actors get no resources, and EngineRefusedError if the engine does not start.
        """
        import ray

        self._config, self._policy = config, policy
        self._where = f"resources.engines: engine of policy {name}"
        self._rank, _ = rank_and_world_size()
        self._own_actors: list[Any] = []
        """The actors, which only worker 0 made and must end; empty on other workers."""
        self._actors = self._own_actors
        # Adapters are small, and reach the engine as files.
        has_nccl = policy.device.type == "cuda" and policy.config.lora is None
        self._transfer = HostTransfer.NCCL if has_nccl else HostTransfer.OBJECT_STORE
        self._group: WeightGroup | None = None
        """The group that the engines' GPUs have joined."""
        self._sent_state = {} if policy.source is not None else _write_counters(policy)
        """The state of the weights that the actors have; empty before the first, if they do not begin with them."""
        labels, error = broadcast_from_rank0(lambda: self._make_actors(name))
        if error is not None:
            self.close()
            raise error
        self._actors = self._own_actors or [ray.get_actor(label) for label in labels]

    @override
    def update_weights(self) -> None:
        policy, state = self._policy, _write_counters(self._policy)
        if policy.source is not None:
            if self._sent_state != state:
                self._send_missing(first=not self._sent_state)
        elif (
            self._rank == 0
            and self._transfer is HostTransfer.NCCL
            and (state != self._sent_state or self._group is None)
        ):
            self._broadcast(sampling_weights(policy))
        elif self._rank == 0 and state != self._sent_state:
            self._send_held({key for key, value in state.items() if value != self._sent_state.get(key)})
        self._sent_state = state

    def _send_missing(self, first: bool) -> None:
        """Hand over the weights that the empty copy does not hold, a part of them at a time.

        All workers gather the trained ones; the others never change, and worker 0 reads them from their files
        the `first` time.
        """
        import ray

        policy, has_frozen = self._policy, self._rank == 0 and (first or self._transfer is HostTransfer.NCCL)
        weights = sampling_weights(policy, frozen=has_frozen)
        if self._rank != 0:
            for _ in weights:
                pass
        elif self._transfer is HostTransfer.NCCL:
            self._broadcast(weights)
        else:
            for part in group_into_parts(weights):
                stored = ray.put({name: pack_tensor(tensor) for name, tensor in part.items()})
                self._collect_results(
                    [actor.load.remote(policy.version, stored, False) for actor in self._actors], "load"
                )
            self._send_held({name for name, parameter in policy.lm.named_parameters() if not parameter.is_meta})

    def _send_held(self, names: Collection[str]) -> None:
        """Hand over weights that this worker holds, by their names; with them the version is complete."""
        import ray

        stored = ray.put(
            {name: pack_tensor(parameter) for name, parameter in self._policy.lm.named_parameters() if name in names}
        )
        self._collect_results([actor.load.remote(self._policy.version, stored) for actor in self._actors], "load")

    def _broadcast(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send all weights from this GPU to those of the engines."""
        import ray

        if self._group is None:
            need, host = self._config.resources, engine_host(self._policy.generation.engine)
            address = ray.util.get_node_ip_address()
            group = host.weight_group(address, _free_port(), need.engines, need.tensor_parallel)
            joining = [actor.join.remote(group.member(number)) for number, actor in enumerate(self._actors)]
            group.join()
            self._group = group
            self._collect_results(joining, "join")
        update = self._group.update(sampled_weights(self._policy))
        taking = [actor.receive_weights.remote(self._policy.version, update) for actor in self._actors]
        self._group.send(weights)
        self._collect_results(taking, "receive_weights")
        torch.cuda.synchronize()

    @override
    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        generation = checked_generation(self._policy, prompts, generation)
        count = len(self._actors)
        calls = []
        for number in range(count):  # neighbours are of one group, so an engine reads their common prompt once
            part = list(prompts[number * len(prompts) // count : (number + 1) * len(prompts) // count])
            if part:
                # Each worker begins with another engine, so that small batches do not all go to the first one.
                actor = self._actors[(number + self._rank) % count]
                calls.append(actor.generate.remote(self._policy.version, part, seed, generation))
        written = [completion for part in self._collect_results(calls, "generate") for completion in part]
        trained = engine_host(self._policy.generation.engine).reports_trained(self._policy.generation, generation)
        return written if trained else with_trained_log_probs(self._policy, prompts, written)

    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        """Yield all tokens at once, after the last one has been sampled."""
        yield from tokens_of(self.generate([prompt], seed, generation)[0])

    @override
    def close(self) -> None:
        import ray

        ending = [actor.close.remote() for actor in self._own_actors]
        with contextlib.suppress(Exception):  # the actors end here, whatever state they are in
            ray.get(ending, timeout=CLOSE_S)
        for actor in self._own_actors:
            ray.kill(actor)
        self._own_actors.clear()

    def _make_actors(self, name: str) -> tuple[list[str], MarlRayError | None]:
        """Make the actors on worker 0.

        Returns their names, and the error that all workers raise if the actors cannot be made.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        need, empty = self._config.resources, self._policy.source is not None
        policy = detach_copy(self._policy) if empty else copy.deepcopy(self._policy).to("cpu")
        if empty or self._transfer is HostTransfer.NCCL:
            policy.version = -1  # every version has to come
        gpus = need.tensor_parallel if self._policy.device.type == "cuda" else 0
        labels = [
            f"{self._config.name} {name} engine {number} {secrets.token_hex(4)}" for number in range(need.engines)
        ]
        options: Any = {
            "num_cpus": need.cpus_per_worker * need.tensor_parallel,
            "num_gpus": gpus,
            "max_restarts": 0,
            # Each worker makes one call at a time; `progress` and `close` are further calls.
            "max_concurrency": need.workers + 2,
            # Ray Train's own placement group has room only for its workers. None, contrary to its type, means no group.
            "scheduling_strategy": PlacementGroupSchedulingStrategy(cast(Any, None)),
        }
        host, stored, spec = ray.remote(EngineActor), ray.put(policy), engine_spec(policy.generation.engine)
        for label in labels:
            made = host.options(name=label, **options)
            self._own_actors.append(made.remote(stored, need.tensor_parallel, need.threads_per_worker, self._transfer))
        try:
            try:
                ray.get([actor.machine_name.remote() for actor in self._own_actors], timeout=PLACE_S)
            except ray.exceptions.GetTimeoutError:
                resources = f"{options['num_cpus']:g} CPUs" + (f" and {gpus} GPUs" if gpus else "")
                reason = f"no place with {resources} on one node was free within {PLACE_S:g} s"
                return labels, EngineLostError(f"{self._where}: {reason}")
            self._collect_results(
                [actor.start.remote() for actor in self._own_actors], "start", max(ANSWER_S, spec.start_s)
            )
        except MarlRayError as error:
            return labels, error
        except Exception as error:
            return labels, EngineLostError(f"{self._where}: {describe_error(error)}")
        return labels, None

    def _collect_results(self, calls: list[Any], method: str, quiet_s: float = ANSWER_S) -> list[Any]:
        """Return the results of calls, one for each actor, as long as the actors write tokens.

        Raises EngineLostError if an actor has died, does not answer for `quiet_s`, or writes no token for that time, and
        EngineRefusedError if the engine has refused.
        """
        import ray

        written, since = -1, time.monotonic()
        while True:
            try:
                return list(ray.get(calls, timeout=quiet_s / 4))
            except ray.exceptions.GetTimeoutError:
                try:
                    now = sum(ray.get([actor.progress.remote() for actor in self._actors], timeout=quiet_s / 4))
                except Exception:
                    now = written  # the next `get` finds out whether the actor is dead
                if now != written:
                    written, since = now, time.monotonic()
                elif time.monotonic() - since > quiet_s:
                    raise EngineLostError(f"{self._where}: no answer to `{method}` in {quiet_s:g} s") from None
            except ray.exceptions.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, BaseException) else error
                kind = EngineRefusedError if isinstance(cause, EngineRefusedError) else EngineLostError
                text = str(cause) if isinstance(cause, MarlRayError) else describe_error(cause)
                raise kind(f"{self._where}: {text}") from error
            except ray.exceptions.RayError as error:
                raise EngineLostError(f"{self._where}: it died in `{method}`: {one_line(error)}") from error


class EngineActor:
    """The class of the actors: a host, and the name of its machine."""

    def __init__(self, policy: TokenPolicy, tensor_parallel: int, threads: int, transfer: HostTransfer) -> None:
        torch.set_num_threads(threads)
        self._host = engine_host(policy.generation.engine)(
            policy,
            tensor_parallel,
            GPU_MEMORY_SHARE if torch.cuda.is_available() else CPU_MEMORY_SHARE,
            transfer,
        )

    def machine_name(self) -> str:
        """Return the name of the machine on which the actor runs."""
        return socket.gethostname()

    def start(self) -> None:
        """Start the host; returns when it can write. Raises what `EngineHost.start` raises."""
        self._host.start()

    def load(self, version: int, weights: dict[str, PackedTensor], complete: bool = True) -> None:
        """Load weights as `EngineHost.load` does, and raise its errors."""
        self._host.load(version, weights, complete)

    def join(self, connection: dict[str, Any]) -> None:
        """Join the NCCL group of the weights, which returns when the trainer and all engines have joined."""
        self._host.join(connection)

    def receive_weights(self, version: int, update: dict[str, Any]) -> None:
        """Receive weights from the group as `EngineHost.receive_weights` does, and raise its errors."""
        self._host.receive_weights(version, update)

    def generate(
        self, version: int, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig
    ) -> list[Completion]:
        """Return the responses of the host by weights of `version`.

        Raises what `EngineHost.generate` raises.
        """
        return self._host.generate(version, prompts, seed, generation)

    def progress(self) -> int:
        """Return the number of tokens that the host has written so far, also while it writes."""
        return self._host.progress()

    def close(self) -> None:
        """Close the host, whose processes end. The actor itself stays until it is killed."""
        self._host.close()


def _free_port() -> int:
    """Return a TCP port of this machine that nothing uses now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _write_counters(policy: TokenPolicy) -> dict[str, tuple[int, int]]:
    """Return parameter -> its address and write counter, which change with every write to it.

    For a parameter that an empty copy does not hold, the counter is the version.
    """
    return {
        name: (0, policy.version) if parameter.is_meta else (parameter.data_ptr(), parameter._version)
        for name, parameter in policy.lm.named_parameters()
    }
