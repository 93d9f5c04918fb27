"""The measurements of `accelerator.py` on one device: ceilings, sampling, a training step with its memory."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import Qwen2Config

from marl_ray.config import GenerationConfig, HyperParameters, ModelConfig, RunConfig, parse_config
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.engines.models.llama import LlamaModel
from marl_ray.policies.language.model_files import empty_lm
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.policies.language.sharding.hugging_face import write_model
from marl_ray.policies.language.sharding.stored_weights import tied_names
from marl_ray.policies.language.sharding.tensor_parallel import decoder_layers
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy
from marl_ray.training.collectives import worker_mesh
from marl_ray.training.learner.families import language_policies
from marl_ray.training.learner.optimizers import clip_gradients, optimizer_of
from marl_ray.training.team.memory_plan import memory_plan
from marl_ray.training.team.model_shapes import qwen_architecture

PROMPT, TOKENS, GROUP = 128, 128, 8
"""Sampling: tokens of a prompt and most of a response; responses to one prompt."""
PASSES = 2
"""Passes of a training step."""
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES = ("0.5b", "3b", "tiny")


class Ceilings(NamedTuple):
    """The most that the device was seen to do in a second."""

    bytes: float
    """Read and written by a copy."""
    operations: float
    """Done by a bfloat16 product."""


class SampledRow(NamedTuple):
    """Sampling of this many responses at once."""

    size: str
    responses: int
    tokens_per_second: float
    bandwidth_share: float


class StepSettings(NamedTuple):
    """The shape of a training step."""

    rows: int
    """Sequences of a pass, `train.micro_batch`."""
    context: int
    """Tokens of each."""
    tokens: int
    """Tokens of each that are trained."""
    checkpointing: bool
    offload: bool


class TrainedRow(NamedTuple):
    """A training step, as it was measured.

    A field is None where the device had no room for the step, and the peak also where the device counts no memory.
    """

    size: str
    settings: StepSettings
    parameters: int
    planned_bytes: int
    peak_bytes: int | None
    seconds: float | None
    tokens_per_second: float | None
    matrix_share: float | None
    """The model FLOPs utilisation of the whole step, the optimiser's part included."""


def seconds(device: torch.device, runs: int, work: Callable[[], Any]) -> float:
    """Return the median time of one call, the first one not counted."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(runs + 1):
        wait()
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def ceilings(device: torch.device, runs: int) -> Ceilings:
    large = device.type == "cuda"
    source = torch.empty(1 << (31 if large else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = 8192 if large else 512
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return Ceilings(
        2 * source.numel() / seconds(device, runs, lambda: target.copy_(source)),
        2 * side**3 / seconds(device, runs, lambda: left @ right),
    )


def save_model(folder: Path, size: str) -> str:
    """Write a model of random weights in bfloat16, weight by weight, and return its folder."""
    tiny = size == "tiny"
    shape = (
        Qwen2Config(**TINY, max_position_embeddings=32768, tie_word_embeddings=True)
        if tiny
        else qwen_architecture(size)
    )
    lm = empty_lm(shape).bfloat16()
    shapes = {names[0]: lm.get_parameter(names[0]) for names in tied_names(lm)}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        for name, parameter in shapes.items():
            value = torch.empty_like(parameter, device="cpu")
            # Scales of norms are one; all else is drawn as transformers does.
            yield name, value.fill_(1) if parameter.ndim == 1 else value.normal_(0, 0.02)

    write_model(folder, lm, shapes, weights())
    byte_tokenizer(1024).save_pretrained(folder)
    return str(folder)


def measure_sampling(size: str, path: str, device: torch.device, count: int, runs: int, limits: Ceilings) -> SampledRow:
    """Sample with the built-in engine in bfloat16."""
    config = ModelConfig(path=path, context=PROMPT + TOKENS, dtype="bf16")
    policy = plain_copy(build_token_policy(config, GenerationConfig(max_tokens=TOKENS), 0, unread=True), device)
    engine = make_engine(policy)
    prompts = [Prompt(tuple((7 * (n // GROUP) + k) % 251 for k in range(PROMPT)), n) for n in range(count)]
    lengths = [len(completion.ids) for completion in engine.generate(prompts, 0)]
    taken = seconds(device, runs, lambda: engine.generate(prompts, 0))
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    held = LlamaModel(policy.lm, config.context).shape.bytes_per_token
    cached = sum(PROMPT + place for length in lengths for place in range(length))
    read = max(lengths) * parameters * 2 + cached * held
    return SampledRow(size, count, sum(lengths) / taken, read / taken / limits.bytes)


def measure_training(
    size: str, path: str, device: torch.device, settings: StepSettings, runs: int, limits: Ceilings
) -> TrainedRow:
    """Take training steps, as the learner of a run on one worker does, and compare their memory with that run's plan."""
    run = _run_of(path, settings)
    planned = memory_plan(run, 1).total
    solver = run.team["solver"]
    assert solver.model is not None
    empty: dict[str, Any] = {"peak_bytes": None, "seconds": None, "tokens_per_second": None, "matrix_share": None}
    with _process_group(device):
        policy = build_token_policy(solver.model, solver.generation, 0, unread=True)
        flops = PASSES * step_flops(policy, settings)
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        try:
            step = _step_of(policy, device, settings, run.hyper_of("solver"))
            step()  # makes Adam's moments
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            taken = seconds(device, runs, step)
        except torch.OutOfMemoryError:
            return TrainedRow(size, settings, parameters, planned, **empty)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    tokens = PASSES * settings.rows * settings.context
    return TrainedRow(
        size, settings, parameters, planned, peak, taken, tokens / taken, flops / taken / limits.operations
    )


def step_flops(policy: TokenPolicy, settings: StepSettings) -> float:
    """Return the operations of a forward and a backward pass.

    They are 6 for each weight of a layer and token, and for each weight of the layer of logits and trained token
    (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), and of attention what is not masked (Chowdhery et al. 2022,
    arXiv 2204.02311, appendix B). What checkpointing computes again does not count.
    """
    blocks = decoder_layers(policy.lm)
    layers = sum(parameter.numel() for parameter in blocks.parameters())
    head: int = policy.lm.get_output_embeddings().weight.numel()
    attention: int = len(blocks) * policy.lm.config.hidden_size * settings.context
    return 6 * settings.rows * (settings.context * (layers + attention) + settings.tokens * head)


def _run_of(path: str, settings: StepSettings) -> RunConfig:
    """Return a run whose workers hold no copy that samples."""
    model = {
        "path": path,
        "context": settings.context,
        "activation_checkpointing": settings.checkpointing,
        "cpu_offload": settings.offload,
    }
    return parse_config(
        RunConfig,
        {
            "name": "accelerator",
            "algorithm": "grpo",
            "env": {"id": "math"},
            "team": {"solver": {"model": model, "generation": {"max_tokens": settings.tokens, "engine": "vllm"}}},
            "train": {"env_copies": 8, "group_size": 8, "micro_batch": settings.rows},
            "resources": {"mixed_precision": "bf16"},
        },
    )


def _step_of(
    policy: TokenPolicy, device: torch.device, settings: StepSettings, hyper: HyperParameters
) -> Callable[[], None]:
    models = language_policies.set_up(policy, worker_mesh(device.type), True, reference=False, engine_has_weights=True)
    model = models.trained
    optimizer = optimizer_of(hyper, [([model.lm], 1e-6)])
    prompts = torch.zeros(settings.rows, settings.context - settings.tokens, dtype=torch.int64, device=device)
    prompts[:, 0] = torch.arange(settings.rows)  # a pass reads equal prompts only once
    responses = torch.zeros(settings.rows, settings.tokens, dtype=torch.int64, device=device)
    mask = torch.ones_like(responses, dtype=torch.bool)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for number in range(PASSES):
            language_policies.begin_pass(model, last=number == PASSES - 1)
            outputs = model.evaluate(prompts, responses, mask, learn_entropy=False)
            (-outputs.log_probs.sum() / (PASSES * mask.sum())).backward()
        language_policies.end_passes(model)
        clip_gradients([model.lm], hyper.max_grad_norm)
        optimizer.step()

    return step


@contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    """Make this process alone the workers of a run."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
            if device.type == "cuda":
                torch.cuda.empty_cache()
