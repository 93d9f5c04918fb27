"""The memory of a training step of Qwen2.5 on 1 to 64 GPUs, computed without a GPU.

    .venv/bin/python benchmarks/memory_plan.py                       # about 10 minutes of one core

The step is that of `marl-ray plan`: GRPO in bfloat16 with activation checkpointing, passes of 4 x 4,096 tokens, of which
1,024 of each sequence are trained; all weights are trained, or adapters of rank 32. Writes
`benchmarks/results/memory_plan.{json,md}`. The numbers are counted, so they are the same on every machine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from marl_ray.config import RunConfig, parse_config
from marl_ray.training.team.memory_plan import MemoryPlan, memory_plan

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
SIZES = ("3B", "7B", "32B", "72B")
GPUS = (1, 2, 4, 8, 16, 32, 64)
TRAINED: Mapping[str, Mapping[str, Any]] = {"all weights": {}, "adapters": {"lora": {"rank": 32, "alpha": 64}}}
GIB = 1 << 30


def run_of(size: str, more: Mapping[str, Any]) -> RunConfig:
    model = {"path": f"Qwen/Qwen2.5-{size}-Instruct", "context": 4096, "activation_checkpointing": True, **more}
    return parse_config(
        RunConfig,
        {
            "name": "plan",
            "algorithm": "grpo",
            "env": {"id": "math"},
            "team": {"solver": {"model": model, "generation": {"max_tokens": 1024}}},
            "train": {"env_copies": 64, "group_size": 8, "micro_batch": 4},
        },
    )


def table(plans: Mapping[str, Mapping[str, Sequence[MemoryPlan]]]) -> Iterator[str]:
    yield "# Memory of a training step"
    yield ""
    yield "GiB of one GPU at the greatest moment of a step, without the copy that samples: the last column, complete on each"
    yield "GPU. Counted from tensors without numbers; no GPU has confirmed them. `benchmarks/memory_plan.py` says of"
    yield "what step."
    for trained, sizes in plans.items():
        yield f"\n## {trained[0].upper()}{trained[1:]} trained\n"
        yield f"| Qwen2.5 | {' | '.join(f'{gpus} GPUs' if gpus > 1 else '1 GPU' for gpus in GPUS)} | copy that samples |"
        yield f"|---|{'---|' * (len(GPUS) + 1)}"
        for size, own in sizes.items():
            cells = [f"{(each.total - each.sampling) / GIB:,.1f}" for each in own]
            yield f"| {size} | {' | '.join(cells)} | {own[0].sampling / GIB:.1f} |"


def main() -> None:
    plans: dict[str, dict[str, list[MemoryPlan]]] = {}
    for trained, more in TRAINED.items():
        for size in SIZES:
            run = run_of(size, more)
            plans.setdefault(trained, {})[size] = [memory_plan(run, gpus) for gpus in GPUS]
            print(trained, size, *(f"{each.total / GIB:.1f}" for each in plans[trained][size]), flush=True)
    rows = [
        {"trained": trained, "model": f"Qwen2.5-{size}", **asdict(each), "total": each.total}
        for trained, sizes in plans.items()
        for size, own in sizes.items()
        for each in own
    ]
    (RESULTS / "memory_plan.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "memory_plan.md").write_text("\n".join(table(plans)) + "\n")


if __name__ == "__main__":
    main()
