"""TRL's GRPO on a model folder: prints one JSON object with what each step took.

Runs in a Python environment of its own (see `benchmarks/language/throughput.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"cache_implementation": "static"},
    "continuous": {"use_transformers_continuous_batching": True},
    "bf16": {"bf16": True},
    "bf16-weights": {"bf16": True},
}
"""GRPOConfig's; the model of `bf16-weights` is also kept in bfloat16."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="folder in Hugging Face format")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of texts")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="responses per step")
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--setting", choices=tuple(SETTINGS), default="plain")
    options = parser.parse_args()

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    counted: list[int] = []
    marks: list[tuple[float, float]] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        counted.append(sum(len(ids) for ids in completion_ids))
        return [sum(character.isalnum() for character in text) / max(1, len(text)) for text in completions]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not marks:
                marks.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    texts = json.loads(options.prompts.read_text())
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            num_generations=options.group,
            max_completion_length=options.tokens,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            loss_type="grpo",
            max_grad_norm=1.0,
            use_cpu=True,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **{"bf16": False} | SETTINGS[options.setting],
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                options.model, dtype=torch.bfloat16 if options.setting == "bf16-weights" else torch.float32
            ),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            callbacks=[Clock()],
        )
        trainer.train()
    # From end to end, so that what stands between two steps is counted; the first step is left out.
    steps = [
        {"seconds": after[0] - before[0], "cpu": after[1] - before[1], "tokens": tokens}
        for (before, after), tokens in zip(itertools.pairwise(marks[1:]), counted[1:], strict=True)
    ]
    print(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
