"""The memory of a training step of Qwen2.5 on 1 to 64 GPUs, computed without a GPU.

    .venv/bin/python -m benchmarks.language.memory_plan                       # about 10 minutes of one core

The step is that of `marl-ray plan`: GRPO in bfloat16 with activation checkpointing, passes of 4 x 4,096 tokens,
of which 1,024 of each sequence are trained; all weights are trained, and vLLM samples. Writes
`benchmarks/results/memory_plan.{json,md}`. The numbers are counted, so they are the same on every machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from benchmarks.records import machine, store
from marl_ray.config import RunConfig, parse_config
from marl_ray.training.team.memory_plan import MemoryPlan, memory_plan

SIZES = ("3B", "7B", "32B", "72B")
GPUS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that share the step."""
GIB = 1 << 30
"""Bytes."""


def run_of(size: str) -> RunConfig:
    model = {"path": f"Qwen/Qwen2.5-{size}-Instruct", "context": 4096, "activation_checkpointing": True}
    return parse_config(
        RunConfig,
        {
            "name": "plan",
            "algorithm": "grpo",
            "env": {"id": "math"},
            "team": {"solver": {"model": model, "generation": {"max_tokens": 1024, "engine": "vllm"}}},
            "train": {"env_copies": 64, "group_size": 8, "micro_batch": 4},
        },
    )


def table(plans: Mapping[str, Sequence[MemoryPlan]]) -> Iterator[str]:
    yield "# Memory of a training step"
    yield ""
    yield "GiB of one GPU at the greatest moment of a step that trains all weights, from which vLLM samples. Where `torch`"
    yield "samples, a complete copy on each GPU comes besides: the last column. Counted from tensors without numbers; no GPU"
    yield "has confirmed them. `benchmarks/language/memory_plan.py` says of what step."
    yield ""
    yield f"| Qwen2.5 | {' | '.join(f'{gpus} GPUs' if gpus > 1 else '1 GPU' for gpus in GPUS)} | copy for `torch` |"
    yield f"|---|{'---|' * (len(GPUS) + 1)}"
    for size, size_plans in plans.items():
        cells = [f"{each.total / GIB:,.1f}" for each in size_plans]
        copy = size_plans[0].weights / 2  # of all weights on one GPU in float32; the copy has half of the digits
        yield f"| {size} | {' | '.join(cells)} | {copy / GIB:.1f} |"


def main() -> None:
    plans: dict[str, list[MemoryPlan]] = {}
    for size in SIZES:
        run = run_of(size)
        plans[size] = [memory_plan(run, gpus) for gpus in GPUS]
        print(size, *(f"{each.total / GIB:.1f}" for each in plans[size]), flush=True)
    rows = [
        {"model": f"Qwen2.5-{size}", **asdict(each), "total": each.total}
        for size, size_plans in plans.items()
        for each in size_plans
    ]
    result = {"machine": machine("marl-ray", "torch", "transformers"), "rows": rows}
    store("memory_plan", result, "\n".join(table(plans)) + "\n")


if __name__ == "__main__":
    main()
