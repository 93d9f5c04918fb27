"""Language models of random weights on a GPU: sampling, training steps, and their memory against the plan.

    .venv/bin/python -m benchmarks.language.accelerator --store  one GPU of 80 GB: 0.5 B and 3 B parameters
    .venv/bin/python -m benchmarks.language.accelerator --device cpu --sizes tiny --context 64 --tokens 16 \
        --responses 8

The second line runs the same code where there is no GPU. The ceilings are measured in the same run: a copy of a large
tensor, and a large bfloat16 product. Sampling, of the first size, reads all weights and all keys and values at each step. A
training step is the learner's: weights in files are read by their shards, spread by FSDP2 over the one GPU, and a step of
AdamW follows two passes in bfloat16. The plan beside it is that of `marl-ray plan` for the same config. With
`--store [FOLDER]` it writes `language_accelerator.{json,md}`, into `benchmarks/results` unless a folder is given.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.language.device_measurements import (
    GROUP,
    PROMPT,
    SIZES,
    TOKENS,
    Ceilings,
    SampledRow,
    StepSettings,
    TrainedRow,
    ceilings,
    measure_sampling,
    measure_training,
    save_model,
)
from benchmarks.records import RESULTS, machine
from marl_ray.temporary_folders import temporary_folder

GIB = 1 << 30
"""Bytes."""
CASES = {
    "0.5b": ((False, False), (True, False), (True, True)),
    "3b": ((True, False), (True, True)),
    "tiny": ((False, False), (True, True)),
}
"""Size -> (activation checkpointing, offload) of its training steps. Without checkpointing 3 B do not fit into 80 GB."""
MFU_GOAL, MEMORY_GOAL = 0.45, 0.10
"""At least so much of the matrix rate in a step of 0.5 B parameters; a peak no further from the plan than this."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    limits = ceilings(device, options.runs)
    sampled_rows: list[SampledRow] = []
    trained_rows: list[TrainedRow] = []
    with temporary_folder("accelerator") as folder:
        for size in options.sizes:
            path = save_model(folder / size, size)
            if size == options.sizes[0]:
                for count in options.responses:
                    sampled_rows.append(measure_sampling(size, path, device, count, options.runs, limits))
                    print(sampled_rows[-1], flush=True)
            for checkpointing, offload in CASES[size]:
                shape = StepSettings(options.rows, options.context, options.tokens, checkpointing, offload)
                trained_rows.append(measure_training(size, path, device, shape, options.runs, limits))
                print(trained_rows[-1], flush=True)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "machine": machine("torch", "transformers"),
        "ceilings": limits._asdict(),
        "sampled": [row._asdict() for row in sampled_rows],
        "trained": [row._asdict() | {"settings": row.settings._asdict()} for row in trained_rows],
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    limits = Ceilings(**result["ceilings"])
    lines = [
        "# Language models on an accelerator",
        "",
        f"Random weights of the shapes of Qwen2.5. Ceilings of the same run: {limits.bytes / 1e9:,.0f} GB/s, "
        f"{limits.operations / 1e12:,.1f} TFLOP/s in bfloat16.",
        "",
        f"Sampling by the built-in engine: prompts of {PROMPT} tokens, responses of at most {TOKENS}, groups of {GROUP}.",
        "",
        "| model | responses at once | tokens/s | of the bandwidth |",
        "|---|---|---|---|",
    ]
    for fields in result["sampled"]:
        row = SampledRow(**fields)
        lines.append(f"| {row.size} | {row.responses} | {row.tokens_per_second:,.0f} | {row.bandwidth_share:.1%} |")
    lines += [
        "",
        "A training step of two passes and AdamW. The goals are a peak within "
        f"{MEMORY_GOAL:.0%} of the plan, and {MFU_GOAL:.0%} of the matrix rate at 0.5b.",
        "",
        "| model | pass | checkpointing | offload | plan, GiB | peak, GiB | peak / plan | tokens/s | of the matrix rate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        _line(TrainedRow(**fields | {"settings": StepSettings(**fields["settings"])})) for fields in result["trained"]
    ]
    about = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"Machine: {result['device']}, {about}. `benchmarks/language/accelerator.py` writes this file.",
            "",
        ]
    )


def _line(row: TrainedRow) -> str:
    settings = row.settings
    switches = ("yes" if on else "no" for on in (settings.checkpointing, settings.offload))
    peak = (
        ("not counted" if row.seconds else "out of memory", "")
        if row.peak_bytes is None
        else (
            f"{row.peak_bytes / GIB:,.2f}",
            f"{row.peak_bytes / row.planned_bytes:.2f}",
        )
    )
    speed = ("", "") if row.seconds is None else (f"{row.tokens_per_second:,.0f}", f"{row.matrix_share:.1%}")
    cells = (
        row.size,
        f"{settings.rows} x {settings.context}, {settings.tokens} trained",
        *switches,
        f"{row.planned_bytes / GIB:,.2f}",
        *peak,
        *speed,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["0.5b", "3b"])
    parser.add_argument("--responses", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rows", type=int, default=4, help="sequences of a pass")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sequence that are trained")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--store", type=Path, nargs="?", const=RESULTS, help="write the result, to this folder")
    options = parser.parse_args()
    result = measure(options)
    report = table(result)
    print(report)
    if options.store:
        options.store.mkdir(parents=True, exist_ok=True)
        (options.store / "language_accelerator.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.store / "language_accelerator.md").write_text(report)


if __name__ == "__main__":
    main()
