"""One engine of vLLM that writes the responses of several callers together."""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Completion, EngineLostError, Prompt
from marl_ray.policies.engines.host import EngineHost, HostTransfer, PackedTensor, unpack_tensor
from marl_ray.policies.engines.vllm.engine import VllmEngine, reports_processed, reports_trained
from marl_ray.policies.engines.vllm.process import messages
from marl_ray.policies.engines.vllm.process.decoder import VllmDecoder
from marl_ray.policies.engines.vllm.process.gpu_transfer import NcclGroup
from marl_ray.policies.language.lora import bare_name
from marl_ray.policies.language.sampling_copy import fill_with_zeros

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

BACKENDS = {HostTransfer.NCCL: messages.NCCL, HostTransfer.OBJECT_STORE: messages.SHARED_MEMORY}
"""The way that weights come to the host -> the backend of vLLM's weight transfer."""
WEIGHTS_S = 300.0
"""Seconds that a call waits for the version of the weights that it asks for."""


@dataclass
class _Call:
    """The responses that one caller waits for."""

    version: int
    """Version of the weights that write the responses."""
    prompts: Sequence[Prompt]
    seed: int
    """Seed of the responses' random numbers."""
    generation: GenerationConfig
    answer: "Future[list[Completion]]" = field(default_factory=Future)
    """The responses in the order of the prompts, or the error that ended the call."""
    again: bool = False
    """True once the responses are written a second time."""
    handles: list[int] = field(default_factory=list)
    """Numbers of the responses in vLLM's process, one for each prompt."""
    ids: dict[int, list[int]] = field(default_factory=dict)
    """Handle -> tokens that have been sampled."""
    log_probs: dict[int, list[float]] = field(default_factory=dict)
    """Handle -> natural log-probabilities of these tokens."""
    finish: dict[int, str] = field(default_factory=dict)
    """Handle -> vLLM's reason for the end of a response, `stop` or `length`; without those that are being written."""


class VllmHost(EngineHost):
    """A copy of a policy, vLLM with its weights, and a thread that writes the responses of all calls in one batch.

    The methods may be called from several threads at once. vLLM's process is replaced once per call, as
    in `VllmEngine`.
    """

    def __init__(
        self,
        policy: "TokenPolicy",
        tensor_parallel: int = 1,
        memory_share: float = 0.5,
        transfer: HostTransfer = HostTransfer.OBJECT_STORE,
    ) -> None:
        """Own `policy` from now on; its weights count as version `policy.version`.

        With the transfer NCCL these weights are not read, and all versions arrive through `receive_weights`. Weights on the
        meta device are zeros until they are loaded.
        """
        if transfer is HostTransfer.OBJECT_STORE:
            fill_with_zeros(policy)
        self.policy = policy
        self.engine = VllmEngine(
            policy, tensor_parallel=tensor_parallel, memory_share=memory_share, transfer=BACKENDS[transfer]
        )
        self._loaded = threading.Condition()
        self._jobs: queue.SimpleQueue[_Call | Future[object] | None] = queue.SimpleQueue()
        self._open = 0
        """Number of calls that have not returned."""
        self._calls: list[_Call] = []
        """Calls whose responses are being written; only the thread uses the list."""
        self._tokens = 0
        self._thread = threading.Thread(target=self._work, name="vllm-host", daemon=True)
        self._thread.start()

    @staticmethod
    @override
    def weight_group(address: str, port: int, engines: int, tensor_parallel: int) -> NcclGroup:
        return NcclGroup(address, port, engines, tensor_parallel)

    @staticmethod
    @override
    def reports_trained(trained: GenerationConfig, generation: GenerationConfig) -> bool:
        return reports_trained(reports_processed(trained), generation)

    @override
    def load(self, version: int, weights: Mapping[str, PackedTensor], complete: bool = True) -> None:
        with self._newer(version, complete):
            named = list(self.policy.lm.named_parameters(remove_duplicate=False))
            parameters = {bare_name(name): value for name, value in named} | dict(named)
            for name, value in weights.items():
                parameter = parameters.get(name)
                if parameter is None or (parameter.dtype, tuple(parameter.shape)) != (value.dtype, value.shape):
                    expected = "no such tensor" if parameter is None else f"{parameter.dtype} {list(parameter.shape)}"
                    raise MarlRayError(f"weights: {name}: expected {expected}, got {value.dtype} {list(value.shape)}")
            with torch.no_grad():
                for name, value in weights.items():
                    parameters[name].copy_(unpack_tensor(value))

    @override
    def join(self, connection: dict[str, Any]) -> None:
        self.engine.join(connection)

    @override
    def receive_weights(self, version: int, update: dict[str, Any]) -> None:
        with self._newer(version):
            self.engine.receive_weights(update)

    @contextmanager
    def _newer(self, version: int, complete: bool = True) -> Iterator[None]:
        """Set the version of the weights to `version` after this block, if they are `complete` then."""
        with self._loaded:
            held = self.policy.version
            if version <= held:
                raise MarlRayError(f"weights of version {version} arrived twice: version {held} is loaded")
            if self._open:
                raise MarlRayError(f"weights of version {version} arrived while responses are being written")
            yield
            if complete:
                self.policy.version = version
                self._loaded.notify_all()

    def generate(
        self, version: int, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig
    ) -> list[Completion]:
        """Return the responses of `VllmEngine.generate` by the weights of `version`, after waiting for these.

        Log-probabilities are those that vLLM reports. Raises MarlRayError if newer weights are loaded. Raises
        EngineLostError if the version does not arrive within WEIGHTS_S.
        """
        call = _Call(version, prompts, seed, generation)
        with self._loaded:
            if not self._loaded.wait_for(lambda: self.policy.version >= version, WEIGHTS_S):
                raise EngineLostError(f"weights of version {version} have not come for {WEIGHTS_S:g} s")
            if self.policy.version != version:
                raise MarlRayError(f"expected weights of version {version}, but {self.policy.version} are loaded")
            self._open += 1
            self._jobs.put(call)
        try:
            return call.answer.result()
        finally:
            with self._loaded:
                self._open -= 1

    @override
    def progress(self) -> int:
        return self._tokens

    def start(self) -> None:
        """Start vLLM's process, so that the first call need not wait for it."""
        done: Future[Any] = Future()
        self._jobs.put(done)
        done.result()

    def close(self) -> None:
        """End the thread and vLLM's process."""
        self._jobs.put(None)
        self._thread.join()
        self.engine.close()

    def _work(self) -> None:
        decoder: VllmDecoder | None = None
        while True:
            try:
                job = self._jobs.get(block=not self._calls)
            except queue.Empty:
                decoder = self._step(decoder)
                continue
            if job is None:
                for call in self._calls:
                    call.answer.set_exception(EngineLostError("the engine was closed"))
                return
            if isinstance(job, _Call):
                self._calls.append(job)
                decoder = self._begin(decoder, [job])
            else:
                try:
                    self.engine.decoder()
                    job.set_result(None)
                except BaseException as error:
                    job.set_exception(error)

    def _begin(self, decoder: VllmDecoder | None, calls: Sequence[_Call]) -> VllmDecoder | None:
        """Begin the responses of `calls`. Returns the decoder that writes them, or None if they cannot be written."""
        try:
            if decoder is None or not len(decoder):
                decoder = self.engine.decoder()
            for call in calls:
                call.handles = decoder.add(call.prompts, call.seed, call.generation)
                call.ids = {handle: [] for handle in call.handles}
                call.log_probs = {handle: [] for handle in call.handles}
                call.finish = {}
            return decoder
        except BaseException as error:
            return self._recover(error)

    def _step(self, decoder: VllmDecoder | None) -> VllmDecoder | None:
        assert decoder is not None
        by_handle = {handle: call for call in self._calls for handle in call.handles}
        try:
            for token in decoder.step():
                call = by_handle[token.handle]
                call.ids[token.handle].append(token.id)
                call.log_probs[token.handle].append(token.log_prob)
                self._tokens += 1
                if token.finish is not None:
                    call.finish[token.handle] = token.finish
        except BaseException as error:
            return self._recover(error)
        for call in [call for call in self._calls if len(call.finish) == len(call.prompts)]:
            self._calls.remove(call)
            call.answer.set_result(self._completions(call))
        return decoder

    def _completions(self, call: _Call) -> list[Completion]:
        return [
            Completion(call.ids[handle], call.log_probs[handle], call.finish[handle] == "stop", call.version)
            for handle in call.handles
        ]

    def _recover(self, error: BaseException) -> VllmDecoder | None:
        """Write the responses again after the first loss of a process; after another error, fail the calls.

        Returns None if no call is left.
        """
        self.engine.close()  # else the process would continue writing responses that nobody reads
        once_more = [call for call in self._calls if isinstance(error, EngineLostError) and not call.again]
        for call in self._calls:
            if call not in once_more:
                call.answer.set_exception(error)
            call.again = True
        self._calls = once_more
        return self._begin(None, once_more) if once_more else None
