"""The messages between an engine and vLLM's process: plain data."""

from dataclasses import dataclass

IPC = "ipc"
"""Name of vLLM's transfer of weights on one GPU."""
NCCL = "nccl"
"""Name of vLLM's transfer of weights from one GPU to others."""
SHARED_MEMORY = "marl_ray_shared"
"""Name of the transfer of weights through shared memory, among the backends of vLLM's weight transfer."""


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """The settings of a process of vLLM."""

    folder: str
    """A folder with the model's `config.json`; weights are transferred later."""
    dtype: str
    """`float32` or `bfloat16`."""
    context: int
    """Maximum number of tokens of a prompt and its response together."""
    processed: bool
    """True if log-probabilities are of the distribution after temperature, top-k and top-p, instead of the model's own."""
    adapter_rank: int = 0
    """Maximum rank of the adapters; 0 for a model without adapters."""
    adapters: int = 1
    """Maximum number of adapters whose responses may share a step."""
    transfer: str = SHARED_MEMORY
    """Backend of vLLM's weight transfer."""
    tensor_parallel: int = 1
    """Number of processes (on a GPU machine: of GPUs) that each hold a part of every layer."""
    memory_share: float = 0.5
    """Share of a GPU's memory that vLLM may take."""
    cache_gib: int = 1
    """Memory for keys and values on a CPU, in GiB."""


@dataclass(frozen=True)
class AdapterRoom:
    """The capacity of a process for adapters."""

    rank: int
    """Maximum rank."""
    adapters: int
    """Maximum number of adapters whose responses may share a step."""


@dataclass(frozen=True)
class VllmRequest:
    """A response to begin."""

    handle: int
    ids: tuple[int, ...]
    """The prompt's token ids."""
    temperature: float
    """0 takes the most likely token."""
    top_k: int
    """0 samples from all tokens."""
    top_p: float
    max_tokens: int
    ends: tuple[int, ...]
    """Tokens that end the response."""
    seed: int
    adapter: int = 0
    """Number under which the adapter was loaded; 0 for none."""
    top: int = 0
    """Number of the most likely tokens that are returned beside each token."""


@dataclass(frozen=True)
class SampledToken:
    """A token that vLLM has sampled."""

    handle: int
    id: int
    log_prob: float
    version: int
    """Version of the weights that sampled it."""
    top: tuple[tuple[int, float], ...] = ()
