"""The engine `vllm`: vLLM in its own process, which gets the policy's weights after each change."""

import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from marl_ray.config.run.engines import ENGINES
from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError, install_hint
from marl_ray.policies.engines.base import (
    Completion,
    Engine,
    EngineLostError,
    Prompt,
    Token,
    checked_generation,
    tokens_of,
)
from marl_ray.policies.engines.decoding.trained_log_probs import with_trained_log_probs
from marl_ray.policies.engines.models.architectures import check_architecture
from marl_ray.policies.engines.vllm.process.child import VllmProcess
from marl_ray.policies.engines.vllm.process.decoder import VllmDecoder
from marl_ray.policies.engines.vllm.process.messages import IPC, SHARED_MEMORY, AdapterRoom, VllmSettings
from marl_ray.policies.engines.vllm.weight_transfers import TRANSFERS
from marl_ray.policies.language.lora import save_adapters
from marl_ray.temporary_folders import object_folder

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

SHARED_GPU_MEMORY_SHARE = 0.5
"""Share of a GPU's memory that vLLM takes beside a worker's model."""


class VllmEngine(Engine):
    """Samples by vLLM with the policy's weights, and hands over those that have changed before.

    Each response has a random generator of its own, seeded from (seed, stream). So it does not depend on the batch, but
    it is not the response that the torch engine gives. Log-probabilities are vLLM's own if vLLM reports those of the
    whole distribution at the generation's temperature; otherwise the policy computes them in a full pass.

    A process that dies or does not answer is replaced once per call, and writes all responses of the call again.

    From an empty copy the weights are taken in `update_weights`, one after another: on a CPU into the memory that vLLM
    reads, on a GPU by vLLM itself, and then they are lost with its process.
    """

    spec = ENGINES["vllm"]

    @staticmethod
    @override
    def has_weights(generation: GenerationConfig) -> bool:
        return reports_trained(reports_processed(generation), generation)

    def __init__(
        self,
        policy: "TokenPolicy",
        processed: bool | None = None,
        tensor_parallel: int = 1,
        memory_share: float = SHARED_GPU_MEMORY_SHARE,
        transfer: str | None = None,
        room: AdapterRoom | None = None,
    ) -> None:
        """Raise MarlRayError if the package is missing, or for an architecture that is not verified for vLLM.

        processed: True if vLLM reports log-probabilities after temperature, top-k and top-p, instead of the model's own.
        tensor_parallel: GPUs over which vLLM spreads the model, 1.
        memory_share: the share of a GPU's memory that vLLM takes.
        transfer: `ipc` for a policy on a GPU that vLLM shares with the trainer; `nccl` if weights arrive through
            `receive_weights`; or SHARED_MEMORY. The default is `ipc` on a GPU and SHARED_MEMORY on a CPU.
        room: the process gets the weights without the policy's adapter, and the caller loads adapters.
        """
        if find_spec("vllm") is None:
            raise MarlRayError(f"generation.engine=vllm: expected the package vllm; {install_hint('vllm')}")
        config = policy.config
        check_architecture(policy.lm.config, "vllm", config.context, f"model.path {config.path!r}")
        self._policy, self._room = policy, room
        self._processed = reports_processed(policy.generation) if processed is None else processed
        self.transfer = TRANSFERS[transfer or (IPC if policy.device.type == "cuda" else SHARED_MEMORY)](policy)
        """The way in which weights come to the process."""
        self._folder = object_folder("vllm")
        policy.lm.config.save_pretrained(self._folder.name)
        self._process: VllmProcess | None = None
        self._tensor_parallel, self._memory_share = tensor_parallel, memory_share
        self.sleeps = self.transfer.shares_gpu
        """True if the process gives its memory back between batches, because the trainer shares its GPU."""
        self._adapter = 0
        """The version of the adapters that the process has; 0 for none."""
        self.version = 0
        """The version of the weights that the process has; counts every hand-over."""
        self._held: object = None
        """The state of the policy's weights at the last hand-over; None if the process has none of them."""

    @property
    def process(self) -> VllmProcess | None:
        """The process, or None before it has started."""
        return self._process

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def decoder(self) -> VllmDecoder:
        """Return an empty decoder for the policy's current weights, which must not change while the decoder writes."""
        process, policy = self.follow(), self._policy
        return VllmDecoder(process, policy.tokenizer, policy.end_tokens, self.version, self._adapter)

    @override
    def start(self) -> None:
        begin = self._running if self._policy.source is not None else self.follow
        try:
            begin()
        except EngineLostError:  # another process may work
            begin()

    @override
    def update_weights(self) -> None:
        policy, version = self._policy, self.version + 1
        if policy.source is None or self.transfer.connection is None:
            return
        adapted = policy.config.lora is not None  # its other weights never change
        is_changed = self._held is None or (not adapted and self._held != _state(policy))
        if is_changed and self.transfer.take(self._running, version):
            # An adapter is still to come, and `follow` brings it.
            self.version, self._held = version, () if adapted else _state(policy)
        self.follow()

    @override
    def sleep(self) -> None:
        if self.sleeps and self._held is not None and self._process is not None and not self._process.lost:
            self._process.ask("sleep")
            self._held = None

    def join(self, connection: dict[str, Any]) -> None:
        """Let the process join a group through which it will receive weights."""
        self.follow().ask("join", connection)

    def receive_weights(self, update: dict[str, Any]) -> None:
        """Let the process receive the weights that its group sends now.

        From then on they count as the policy's.
        """
        process = self.follow()
        self.version += 1
        process.ask("load", self.version, update)

    @override
    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        generation = checked_generation(self._policy, prompts, generation)
        if not prompts:
            return []
        try:
            ids, log_probs, ended = self.generate_once(prompts, seed, generation)
        except EngineLostError:
            ids, log_probs, ended = self.generate_once(prompts, seed, generation)
        version = self._policy.version
        written = [Completion(*parts, version) for parts in zip(ids, log_probs, ended, strict=True)]
        trained = reports_trained(self._processed, generation)
        return written if trained else with_trained_log_probs(self._policy, prompts, written)

    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        """Yield all tokens at once, after the last one has been sampled."""
        [completion] = self.generate([prompt], seed, generation)
        yield from tokens_of(completion)

    def generate_once(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig
    ) -> tuple[list[list[int]], list[list[float]], list[bool]]:
        """Write responses by the present process.

        Returns their ids, their log-probabilities as vLLM reports them, and whether each has ended by itself. Raises
        EngineLostError where `generate` starts another process.
        """
        ids: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        try:
            decoder = self.decoder()
            rows = {handle: row for row, handle in enumerate(decoder.add(prompts, seed, generation))}
            while len(decoder):
                for token in decoder.step():
                    row = rows[token.handle]
                    ids[row].append(token.id)
                    log_probs[row].append(token.log_prob)
                    ended[row] = token.finish == "stop"
        except BaseException:
            self.close()  # else the process would continue writing responses that nobody reads
            raise
        return ids, log_probs, ended

    def follow(self) -> VllmProcess:
        """Bring the process up to date with the policy's weights and return it."""
        process, state = self._running(), _state(self._policy)
        if self._held == state:
            return process
        version, adapted = self.version + 1, self._policy.config.lora is not None and self._room is None
        if (self._held is None or not adapted) and not self.transfer.send(process, version):
            return process
        if adapted:
            if self._adapter:
                process.ask("drop_adapter", self._adapter)
            with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
                assert self._policy.config.lora is not None
                save_adapters(self._policy.lm, self._policy.config.lora, None, Path(folder))
                process.ask("load_adapter", version, folder)
            self._adapter = version
        self.version, self._held = version, state
        return process

    def _running(self) -> VllmProcess:
        """Return the process, which is started if there is none."""
        process = self._process
        if process is None or process.lost:
            if self.version and not self.transfer.is_repeatable:
                raise EngineLostError("generation.engine=vllm: its weights were lost with its process")
            process = self._process = VllmProcess(self.settings(), torch.get_num_threads())
            self._held, self._adapter = None, 0
            if self.transfer.connection is not None:
                process.ask("join", self.transfer.connection)
        return process

    def settings(self) -> VllmSettings:
        """Return the settings with which a process starts."""
        policy = self._policy
        lora = policy.config.lora
        room = self._room or AdapterRoom(lora.rank if lora is not None else 0, 1)
        return VllmSettings(
            folder=self._folder.name,
            dtype=str(policy.lm.dtype).removeprefix("torch."),
            context=policy.config.context,
            processed=self._processed,
            adapter_rank=room.rank,
            adapters=room.adapters,
            transfer=self.transfer.backend,
            tensor_parallel=self._tensor_parallel,
            memory_share=self._memory_share,
        )


def reports_processed(generation: GenerationConfig) -> bool:
    """Return True if a policy's vLLM reports log-probabilities after temperature, top-k and top-p.

    The caller of vLLM may decide otherwise.
    """
    return generation.temperature != 1


def reports_trained(processed: bool, generation: GenerationConfig) -> bool:
    """Return True if vLLM reports the log-probabilities that are trained on; `processed` as in `VllmEngine`."""
    return (generation.top_k == 0 and generation.top_p == 1) if processed else generation.temperature == 1


def _state(policy: "TokenPolicy") -> list[tuple[int, int]]:
    """Return the address and write counter of each weight.

    The result changes with every write to the weights, and to those that an empty copy does not hold.
    """
    counters = [
        (parameter.data_ptr(), parameter._version) for parameter in policy.lm.parameters() if not parameter.is_meta
    ]
    return [(0, policy.version), *counters] if policy.source is not None else counters
