"""The process in which vLLM runs: `python -m marl_ray.policies.engines.vllm.process.server DESCRIPTOR`.

vLLM's engine core runs inside this process, so that no part of vLLM outlives it. A message is (name of a method,
arguments); an answer is (True, value) or (False, one line of an error).
"""

import ctypes
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from marl_ray.config.run.engines import VLLM_MAX_RANK
from marl_ray.policies.engines.vllm.process.messages import IPC, SampledToken, VllmRequest, VllmSettings

KERNEL_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, VLLM_MAX_RANK)
"""The greatest ranks for which vLLM has kernels."""
PROBE_REQUEST = VllmRequest(handle=-1, ids=(0,), temperature=0.0, top_k=0, top_p=1.0, max_tokens=2, ends=(), seed=0)
"""A response by the random weights that vLLM starts with."""
EXCLUDED_LOG_PROB = -9999.0
"""Log-probability of a token that cannot be drawn, as in OpenAI's API: JSON has no infinity."""
MAX_LINE = 400
"""Maximum number of characters of an error line; errors about vLLM's settings take several lines."""
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Numbers of Linux: the system call, its request for a part of the processor's state, and the tiles' part."""
WEIGHT_DOOR = "marl_ray.policies.engines.vllm.process.cpu_transfer.WeightDoor"


class Server:
    """vLLM's engine, its unfinished responses, and the version of the weights that write them."""

    def __init__(self) -> None:
        self._version = 0
        self._asleep = False
        self._adapters: dict[int, object] = {}
        self._written_by: dict[int, int] = {}
        """Response -> the version that writes it: that of its adapter if it has one, else that of the weights."""
        self._tops: dict[int, int] = {}
        """Response -> number of the most likely tokens that are returned beside each of its tokens."""

    def start(self, settings: VllmSettings) -> None:
        """Load vLLM with random weights, which `load` replaces, and write a response with them.

        Kernels that vLLM lacks are missed only then.
        """
        rank = settings.adapter_rank
        _allow_tiles()
        adapters: dict[str, Any] = {
            "enable_lora": True,
            "max_lora_rank": next(possible for possible in KERNEL_RANKS if possible >= rank),
            "max_loras": settings.adapters,
        }
        self._llm: Any = import_module("vllm").LLM(
            model=settings.folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=settings.dtype,
            max_model_len=settings.context,
            gpu_memory_utilization=settings.memory_share,
            enable_prefix_caching=True,
            enforce_eager=True,
            disable_log_stats=True,
            logprobs_mode="processed_logprobs" if settings.processed else "raw_logprobs",
            worker_extension_cls=WEIGHT_DOOR,
            weight_transfer_config={"backend": settings.transfer},
            enable_sleep_mode=settings.transfer == IPC,  # to give the memory back to a trainer on the same GPU
            tensor_parallel_size=settings.tensor_parallel,
            **(adapters if rank else {}),
        )
        self._engine: Any = self._llm.llm_engine
        self.add([PROBE_REQUEST])
        while self._written_by:
            self.step()

    def join(self, connection: dict[str, Any]) -> None:
        """Prepare the transfer of weights with the backend's own settings."""
        self._llm.collective_rpc("init_weight_transfer_engine", args=(connection,))

    def sleep(self) -> None:
        """Release the GPU's memory of weights and cache until the next `load`. On a CPU this releases nothing."""
        self._llm.sleep(level=2)
        self._asleep = True

    def load(self, version: int, update: dict[str, Any]) -> None:
        """Load the weights of `version`, which the transfer's backend finds by `update`. Raises as `begin_load` does."""
        self.begin_load(version)
        self.load_part(update)
        self.finish_load(version)

    def begin_load(self, version: int) -> None:
        """Begin to load the weights of `version`, which arrive in any number of parts.

        Raises RuntimeError for a version that is not newer, and while responses are being written, which would mix
        two versions.
        """
        if version <= self._version:
            raise RuntimeError(f"weights of version {version} arrived twice: version {self._version} is loaded")
        if self._engine.has_unfinished_requests():
            raise RuntimeError(f"weights of version {version} arrived while responses are being written")
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("start_weight_update")

    def load_part(self, update: dict[str, object]) -> None:
        """Load some of the weights."""
        self._llm.collective_rpc("update_weights", args=(update,))

    def finish_load(self, version: int) -> None:
        """Sample with the weights of `version` from now on: all parts have arrived.

        Raises RuntimeError if the cache of prompts, which is of the old weights, could not be emptied.
        """
        self._llm.collective_rpc("finish_weight_update")
        if self._asleep:  # the cache is allocated last, after the transfer has released its memory
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        # Otherwise prompts with the same beginning would reuse keys and values of the old weights.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the cache of prompts could not be emptied")
        self._version = version

    def load_adapter(self, number: int, folder: str) -> None:
        """Load adapter `number` (1 or more) from a folder written by peft; its responses are of version `number`.

        Raises RuntimeError if vLLM does not take the adapter.
        """
        request = import_module("vllm.lora.request").LoRARequest(f"adapter-{number}", number, folder)
        if not self._engine.add_lora(request):
            raise RuntimeError(f"vLLM did not take the adapter in {folder}")
        self._adapters[number] = request

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, and end the responses that it writes."""
        self.remove([handle for handle, version in self._written_by.items() if version == number])
        self._engine.remove_lora(number)
        del self._adapters[number]

    def add(self, requests: Sequence[VllmRequest]) -> None:
        """Begin the responses of these requests, by the current weights. Raises vLLM's own error for one that it refuses."""
        sampling = import_module("vllm.sampling_params")
        for request in requests:
            settings = sampling.SamplingParams(
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                max_tokens=request.max_tokens,
                stop_token_ids=list(request.ends),
                ignore_eos=True,  # `ends` includes the model's own end tokens
                detokenize=False,
                seed=request.seed,
                logprobs=request.top,
                output_kind=sampling.RequestOutputKind.DELTA,
            )
            self._engine.add_request(
                str(request.handle),
                {"prompt_token_ids": list(request.ids)},
                settings,
                lora_request=self._adapters[request.adapter] if request.adapter else None,
            )
            self._written_by[request.handle] = request.adapter or self._version
            self._tops[request.handle] = request.top

    def step(self) -> list[SampledToken]:
        """Return the next tokens of all responses."""
        sampled = []
        for output in self._engine.step():
            [answer] = output.outputs
            handle = int(output.request_id)
            for token, places in zip(answer.token_ids, answer.logprobs or (), strict=True):
                top = most_likely(places, self._tops[handle])
                sampled.append(SampledToken(handle, token, places[token].logprob, self._written_by[handle], top))
            if output.finished:
                self._forget(handle)
        return sampled

    def remove(self, handles: Sequence[int]) -> None:
        """End responses early; responses that have already ended are ignored."""
        self._engine.abort_request([str(handle) for handle in handles])
        for handle in handles:
            self._forget(handle)

    def _forget(self, handle: int) -> None:
        self._written_by.pop(handle, None)
        self._tops.pop(handle, None)


def most_likely(places: Mapping[int, Any], count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely tokens and their log-probabilities, the most likely first.

    `places` is vLLM's answer for one token: the `count` most likely tokens, and the sampled one, which may be among
    them. Tokens that top-k or top-p has ruled out get the log-probability EXCLUDED_LOG_PROB.
    """
    ranked = sorted((place.rank, token, place.logprob) for token, place in places.items())
    return tuple((token, max(log_prob, EXCLUDED_LOG_PROB)) for _, token, log_prob in ranked[:count])


def main() -> None:
    """Answer the calls of the parent process, one after another, until it closes the connection.

    The connection is the descriptor `sys.argv[1]`.
    """
    connection = Connection(int(sys.argv[1]))
    server = Server()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:  # the parent has closed the connection
            os._exit(0)
        try:
            answer = True, getattr(server, method)(*arguments)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_LINE]}"
        connection.send(answer)


def _allow_tiles() -> None:
    """Ask Linux for the tile registers of Intel's AMX, which vLLM's kernels for bfloat16 use where there are any.

    Without permission their first instruction ends the process (Linux, Documentation/arch/x86/xstate.rst). Other
    processors refuse, which changes nothing.
    """
    if sys.platform == "linux" and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)


if __name__ == "__main__":
    main()
