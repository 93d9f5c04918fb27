"""Shares of an accelerator's memory bandwidth and matrix rate that sampling and updates of a language model use.

    .venv/bin/python benchmarks/language_accelerator.py                       a GPU, 0.5 B parameters of random weights
    .venv/bin/python benchmarks/language_accelerator.py --device cpu --size tiny    the same code where there is none

The ceilings are measured in the same run: a copy of a large tensor, and a large bfloat16 product. Sampling reads all weights
and all keys and values at each step; an update computes 6 operations per parameter and token (Kaplan et al. 2020,
arXiv 2001.08361, section 2.1), attention left out. With `--store` it writes
`benchmarks/results/language_accelerator.{json,md}`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.engines.models.llama import LlamaModel
from marl_ray.policies.engines.sampler import Completion, Prompt, make_engine
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenPolicy

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
SIZES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
PROMPT, TOKENS, GROUP = 128, 128, 8


def seconds(device: torch.device, runs: int, work: Callable[[], Any]) -> float:
    """Median time of one call, the first one not counted."""

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


def ceilings(device: torch.device, runs: int) -> dict[str, float]:
    """Bytes per second of a copy (read and written) and operations per second of a bfloat16 product."""
    large = device.type == "cuda"
    source = torch.empty(1 << (31 if large else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = 8192 if large else 512
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {
        "bytes_per_second": 2 * source.numel() / seconds(device, runs, lambda: target.copy_(source)),
        "operations_per_second": 2 * side**3 / seconds(device, runs, lambda: left @ right),
    }


def make_policy(size: str, device: torch.device) -> TokenPolicy:
    torch.manual_seed(0)
    context = PROMPT + TOKENS
    with device:
        lm: Any = Qwen2ForCausalLM(
            Qwen2Config(**SIZES[size], max_position_embeddings=context, tie_word_embeddings=True)
        )
    config, generation = ModelConfig(preset="tiny-0.2m", context=context), GenerationConfig(max_tokens=TOKENS)
    return TokenPolicy(lm.to(torch.bfloat16), byte_tokenizer(context), config, generation)


def laid_out(prompts: list[Prompt], completions: list[Completion], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Prompts (all of one length), responses and their mask."""
    lengths = torch.tensor([[len(completion.ids)] for completion in completions])
    responses = torch.zeros(len(completions), int(lengths.max()), dtype=torch.long)
    for row, completion in enumerate(completions):
        responses[row, : len(completion.ids)] = torch.tensor(completion.ids)
    mask = torch.arange(responses.shape[1]) < lengths
    return torch.tensor([prompt.ids for prompt in prompts]).to(device), responses.to(device), mask.to(device)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    limits = ceilings(device, options.runs)
    policy = make_policy(options.size, device)
    engine = make_engine(policy)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    shape = LlamaModel(policy.lm, policy.config.context).shape
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-6, fused=True)
    rows = []
    for count in options.responses:
        prompts = [Prompt(tuple((7 * n // GROUP + k) % 251 for k in range(PROMPT)), n) for n in range(count)]
        completions = engine.generate(prompts, 0)
        sampling = seconds(device, options.runs, lambda given=prompts: engine.generate(given, 0))
        tokens = sum(len(completion.ids) for completion in completions)
        steps = max(len(completion.ids) for completion in completions)
        cached = sum((PROMPT + place) for completion in completions for place in range(len(completion.ids)))
        read = steps * parameters * 2 + cached * shape.bytes_per_token
        batch = laid_out(prompts, completions, device)

        def update(batch: tuple[torch.Tensor, ...] = batch) -> None:
            outputs = policy.evaluate(*batch, need_entropy=False)
            (-outputs.log_probs.sum() / batch[2].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

        updating = seconds(device, options.runs, update)
        computed = 6 * parameters * (count * PROMPT + tokens)
        rows.append(
            {
                "responses": count,
                "sampled_tokens_per_second": tokens / sampling,
                "bandwidth_share": read / sampling / limits["bytes_per_second"],
                "updated_tokens_per_second": (count * PROMPT + tokens) / updating,
                "matrix_share": computed / updating / limits["operations_per_second"],
            }
        )
        print(rows[-1], flush=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": version("torch"), "parameters": parameters, "ceilings": limits, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    limits = result["ceilings"]
    lines = [
        "# Language models on an accelerator",
        "",
        f"{result['parameters'] / 1e6:,.1f} million random parameters in bfloat16, prompts of {PROMPT} tokens, responses of",
        f"at most {TOKENS}, groups of {GROUP}; own engine. Ceilings of the same run:",
        f"{limits['bytes_per_second'] / 1e9:,.0f} GB/s, {limits['operations_per_second'] / 1e12:,.1f} TFLOP/s.",
        "",
        "| responses at once | sampled tokens/s | of the bandwidth | updated tokens/s | of the matrix rate |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        sampled, updated = row["sampled_tokens_per_second"], row["updated_tokens_per_second"]
        shares = row["bandwidth_share"], row["matrix_share"]
        lines.append(f"| {row['responses']} | {sampled:,.0f} | {shares[0]:.1%} | {updated:,.0f} | {shares[1]:.1%} |")
    machine = f"Machine: {result['device']}, torch {result['torch']}."
    return "\n".join([*lines, "", f"{machine} `benchmarks/language_accelerator.py` writes this file.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--responses", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--store", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args()
    result = measure(options)
    report = table(result)
    print(report)
    if options.store:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "language_accelerator.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "language_accelerator.md").write_text(report)


if __name__ == "__main__":
    main()
