"""Short training runs whose metrics are stored bit for bit.

`.venv/bin/python tests/support/golden.py` records them anew. A change of the code that is meant to leave all numbers as
they are leaves these files as they are. A change of the numbers records them anew, and its commit says why they moved.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from toy_runs import runs as toy_runs
from toys import texts as toy_texts

from marl_ray.config import RunConfig
from marl_ray.training.loop.callbacks import Metrics
from marl_ray.training.single_process import train_alone

FOLDER = Path(__file__).parents[1] / "fixtures" / "golden"
CPUINFO = Path("/proc/cpuinfo")


def actor_critic(algorithm: str, *overrides: str) -> RunConfig:
    """Four iterations of the countdown toy with two minibatches and two epochs."""
    return toy_runs.short(algorithm, "resources.threads_per_worker=1", *overrides)


def language(algorithm: str, *overrides: str) -> RunConfig:
    """Three iterations of eight answers by a language model of 0.2 million parameters."""
    return toy_texts.config(f"algorithm={algorithm}", "resources.threads_per_worker=1", *overrides)


LARGE = "team={shared: {network: {hidden: [256, 256]}}}"
"""A network for which torch takes the gradient steps, in micro-batches."""
STEERED = ("hyper.kl_coef=0.1", "hyper.kl_target=0.01", "hyper.entropy_target=0.5")
"""Coefficients that follow what they are steered to."""
FAMILIES: dict[str, dict[str, RunConfig]] = {
    "actor_critic": {
        "ppo": actor_critic("ppo", *STEERED, "hyper.lr_decay=true"),
        "mappo_in_micro_batches": actor_critic("mappo", "train.micro_batch=1", LARGE),
        "happo_two_policies": actor_critic("happo", toy_runs.TWO_POLICIES),
        "grpo": actor_critic("grpo"),
        "mappo_lagrangian": actor_critic("mappo_lagrangian"),
        "p3o": actor_critic("p3o"),
        "macpo_two_policies": actor_critic("macpo", toy_runs.TWO_POLICIES),
        "direct_dapo": actor_critic("direct_dapo"),
    },
    "language": {
        "grpo": language("grpo", "hyper.kl_coef=0.1", "hyper.minibatches=2", "hyper.epochs=2"),
        "grpo_in_micro_batches": language("grpo", "train.micro_batch=3"),
        "gspo_two_policies": language("gspo", toy_texts.TWO_POLICIES, toy_texts.TWO_AGENTS),
        "ppo": language("ppo", "train.group_size=1", "hyper.epochs=2", "hyper.minibatches=2"),
    },
}
"""Family of policies -> name of a run -> its config."""


def machine() -> dict[str, str]:
    """Everything outside of this repository that the last bits of a float depend on.

    torch, and the MKL that it ships, choose their kernels by the vendor and the instruction set of the processor.
    """
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    vendor = next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "unknown")
    return {"torch": torch.__version__, "instructions": torch.backends.cpu.get_cpu_capability(), "vendor": vendor}


def curve(config: RunConfig) -> list[Metrics]:
    """The metrics of a run's iterations, without the speeds of this machine."""
    return toy_runs.timeless(train_alone(config))


def read_golden(family: str) -> dict[str, Any]:
    """The golden file of a family: `machine`, and `runs`, whose metrics are floats in hexadecimal."""
    loaded: dict[str, Any] = json.loads((FOLDER / f"{family}.json").read_text())
    return loaded


def record(family: str) -> None:
    """Write the golden file of a family anew."""
    runs = {
        name: [{key: float(value).hex() for key, value in row.items()} for row in curve(config)]
        for name, config in FAMILIES[family].items()
    }
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(), "runs": runs}, indent=1)
    (FOLDER / f"{family}.json").write_text(text + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        record(name)
