"""Language models: tokens per second of sampling and update, against TRL's GRPO.

    .venv/bin/python -m benchmarks.language.throughput
    .venv/bin/python -m benchmarks.language.throughput --parts engines --store  the engines alone; the rest stays as stored

It also measures where our time goes, two workers, and the engines that sample. One step is 8 prompts x 8 responses of
at most 64 tokens, and one gradient step on them. Both sides begin with the same weights of a model without a download
and compute in the same precision. Writes `benchmarks/results/language.{json,md}` with `--store`. TRL gets a Python
environment of its own, made on the first run; the engines run in `.venv-vllm`, which `make test-vllm` makes.
`benchmarks/language/accelerator.py` is the part for a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.language.tables import table
from benchmarks.records import RESULTS, ROOT, load_before, machine

PEER = ROOT / "benchmarks/peers/trl_grpo.py"
ENGINE = "benchmarks.language.engines"
PACKAGES = ("trl==1.16.0", "torch==2.13.0", "datasets")
PRESETS = ("tiny-1m", "tiny-6m")
PROMPTS, GROUP, TOKENS, LR = 8, 8, 64, 1e-5
"""Prompts of a batch, responses to each, tokens of a response, and the learning rate of both libraries."""
MICRO_BATCH = 32
"""Responses that share a pass of our update: few enough for the processor's caches; never changes results."""
WARM_UP = 2
"""First steps that are not counted."""
PHASES = ("sampling", "evaluation", "update", "refresh", "other")
"""Responses; forward passes that are trained on; backward, Adam and advantages; weights into the sampling copy."""
SETTINGS = {"fp32": ("plain", "static", "continuous"), "bf16": ("bf16", "bf16-weights")}
"""Set-ups of TRL in each precision; the fastest is the peer."""
ENGINES = ("torch", "vllm")
LIMIT = 900
"""Seconds that one measurement may take."""


def texts(steps: int) -> list[str]:
    """Return prompts of 20 to 60 characters."""
    kinds = (
        "Add {} and {}.",
        "What is {} times {}? Show your work.",
        "Sort the numbers {} and {}, the largest one first.",
    )
    return [kinds[n % 3].format(17 * n % 97, 29 * n % 89) for n in range(PROMPTS * steps)]


# ---- our side, in a process of its own -------------------------------------------------------------------------------


class Clock:
    """Wall and CPU seconds by phase."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            total = self.spent.setdefault(phase, [0.0, 0.0])
            total[0] += time.perf_counter() - wall
            total[1] += time.process_time() - cpu

    def time_calls(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            with self(phase):
                return function(*arguments, **named)

        return run


def train(options: argparse.Namespace) -> None:
    """Train like a worker of a run does, and print a JSON object with what each step took."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from marl_ray.algorithms import algorithm_of
    from marl_ray.algorithms.advantages.value_norm import ValueNorm
    from marl_ray.config import HyperParameters
    from marl_ray.config.run.model import GenerationConfig, ModelConfig
    from marl_ray.policies.engines.base import Prompt
    from marl_ray.policies.engines.choice import make_engine
    from marl_ray.policies.language.token_policy import build_token_policy
    from marl_ray.rollout.text.episode import EpisodeTurn
    from marl_ray.rollout.text.responses import ResponseRow, TokenPlayer, to_trajectories
    from marl_ray.training.costs import CostStats
    from marl_ray.training.learner.policy_update import Learner
    from marl_ray.training.learner.trained_policy import LearnerSettings

    torch.set_num_threads(options.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{options.meeting}", rank=options.rank, world_size=options.workers)
    model = ModelConfig(preset=options.preset, dtype=options.precision)
    policy = build_token_policy(model, GenerationConfig(max_tokens=TOKENS), seed=0)
    changes = {"lr": LR, "epochs": 1, "minibatches": 1, "kl_coef": 0.0, "entropy_coef": 0.0}
    hyper = HyperParameters.model_validate({**algorithm_of("grpo").spec.defaults, **changes})
    settings = LearnerSettings(
        algorithm="grpo",
        hyper=hyper,
        mixed_precision=options.precision == "bf16",
        horizon=TOKENS,
        has_whole_episodes=True,
        micro_batch=options.micro_batch,
    )
    learner = Learner(policy, init_device_mesh("cpu", (options.workers,)), settings)
    learner.policy.refresh_rollout_model()
    sampler: Any = learner.policy.rollout_model
    engine, tokenizer = make_engine(sampler), sampler.tokenizer
    player = TokenPlayer(sampler, engine, ["agent"], ValueNorm())
    clock, steps, difference = Clock(), [], 0.0
    learner.policy.model.evaluate = clock.time_calls("evaluation", learner.policy.model.evaluate)
    family = learner.policy.family
    family.refresh_rollout = clock.time_calls("refresh", family.refresh_rollout)  # type: ignore[method-assign]
    every = texts(options.steps)
    shared = PROMPTS // options.share
    for step in range(options.steps):
        clock.spent.clear()
        dist.barrier()
        with clock("whole"):
            own_rows = range(step * PROMPTS + options.rank, step * PROMPTS + shared, options.workers)
            ids = {number: tuple(tokenizer.encode(every[number])) for number in own_rows}
            prompts = [Prompt(ids[number], number * GROUP + member) for number in own_rows for member in range(GROUP)]
            with clock("sampling"):
                completions = engine.generate(prompts, seed=0)
            rows = []
            for prompt, completion in zip(prompts, completions, strict=True):
                text = tokenizer.decode(completion.ids, skip_special_tokens=True)
                score = sum(character.isalnum() for character in text) / max(1, len(text))
                turn = EpisodeTurn("agent", 0, list(prompt.ids), completion, text, score, np.zeros(0))
                rows.append(ResponseRow(turn, prompt.stream, prompt.stream // GROUP, False))
            batch = to_trajectories(player, rows, 0)
            if step == 0:
                with torch.no_grad():
                    full = sampler.evaluate(batch.prompts, batch.actions, batch.mask).log_probs
                difference = float((full - batch.log_probs).abs().max())
            with clock("learner"):
                learner.update(batch, 0, step, CostStats(None, 0))
        spent = clock.spent
        inner = [spent[phase] for phase in ("evaluation", "refresh")]
        spent["update"] = [spent["learner"][k] - sum(part[k] for part in inner) for k in (0, 1)]
        spent["other"] = [spent["whole"][k] - spent["sampling"][k] - spent["learner"][k] for k in (0, 1)]
        steps.append(
            {
                "seconds": spent["whole"][0],
                "cpu": spent["whole"][1],
                "tokens": sum(len(completion.ids) for completion in completions),
                "phases": {phase: spent[phase] for phase in PHASES},
            }
        )
    dist.destroy_process_group()
    print(json.dumps({"steps": steps[1:], "log_prob_difference": difference}))


# ---- measuring -------------------------------------------------------------------------------------------------------


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the JSON object on the last line that a process prints."""
    try:
        out, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise SystemExit(f"{process.args!r} took longer than {LIMIT} s") from error
    if process.returncode:
        raise SystemExit(f"{process.args!r} failed:\n{errors[-3000:]}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def measure_own(
    preset: str, precision: str, steps: int, threads: int, workers: int = 1, apart: int = 1
) -> dict[str, Any]:
    """Return the rates of one run; of several workers the slowest one counts, and tokens are added up.

    `apart` runs at the same time share the batch, and nothing else.
    """
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
        shared = [
            sys.executable,
            "-m",
            "benchmarks.language.throughput",
            "--train",
            preset,
            f"--steps={steps}",
            f"--threads={threads}",
        ]
        shared += [f"--precision={precision}", f"--workers={workers}", f"--share={apart}"]
        runs = [(f"--rank={rank}", f"--meeting={folder}/{run}") for run in range(apart) for rank in range(workers)]
        processes = [start([*shared, *part]) for part in runs]
        parts = [result_of(process) for process in processes]
    merged = [
        {
            "seconds": max(part["seconds"] for part in together),
            "cpu": max(part["cpu"] for part in together),
            "tokens": sum(part["tokens"] for part in together),
            "phases": together[0]["phases"],
        }
        for together in zip(*(part["steps"] for part in parts), strict=True)
    ]
    return rates(merged) | {"log_prob_difference": max(part["log_prob_difference"] for part in parts)}


def measure_trl(python: Path, model: Path, steps: int, threads: int, setting: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as prompts:
        json.dump(texts(steps), prompts)
        prompts.flush()
        sizes = [f"--steps={steps}", f"--threads={threads}", f"--batch={PROMPTS * GROUP}", f"--group={GROUP}"]
        sizes += [f"--tokens={TOKENS}", f"--lr={LR}", f"--setting={setting}"]
        return rates(
            result_of(start([str(python), str(PEER), f"--model={model}", f"--prompts={prompts.name}", *sizes]))["steps"]
        )


def rates(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the steps that count.

    CPU time is what a process used, which neighbours disturb less than the clock.
    """
    counted = steps[WARM_UP - 1 :]  # both sides leave the first one out by themselves
    measured: dict[str, Any] = {
        "tokens_per_second": statistics.median(step["tokens"] / step["seconds"] for step in counted),
        "tokens_per_cpu_second": statistics.median(step["tokens"] / step["cpu"] for step in counted),
        "steps": counted,
        "load_before": load_before(),
    }
    if "phases" in counted[0]:
        measured["phases"] = {
            phase: [
                statistics.median(step["phases"][phase][k] / step["tokens"] * 1e6 for step in counted) for k in (0, 1)
            ]
            for phase in PHASES
        }
    return measured


def trl_python(folder: Path) -> Path:
    """Return the interpreter of TRL's environment, and make it if it is not there."""
    python = folder / "bin/python"
    if not (folder / ".installed").exists():
        print(f"installing TRL into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "pip==26.3"], check=True)
        constraints = ROOT / "constraints.txt"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", constraints, *PACKAGES], check=True)
        (folder / ".installed").touch()
    return python


def save_model(preset: str, folder: Path) -> None:
    """Save the weights that our side begins with, in Hugging Face format."""
    from marl_ray.config.run.model import GenerationConfig, ModelConfig
    from marl_ray.policies.language.token_policy import build_token_policy

    policy = build_token_policy(ModelConfig.model_validate({"preset": preset}), GenerationConfig(), seed=0)
    policy.lm.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def measure_training(options: argparse.Namespace) -> dict[str, Any]:
    """Choose TRL's best setting per model and precision, then measure all in turn, several times."""
    python = trl_python(options.trl_venv)
    models: dict[str, Any] = {}
    for preset in options.presets:
        with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-") as folder:
            save_model(preset, Path(folder))

            def trl(setting: str, steps: int, model: Path = Path(folder)) -> dict[str, Any]:
                return measure_trl(python, model, steps, options.threads, setting)

            figures: dict[str, dict[str, Any]] = {}
            best: dict[str, str] = {}
            for precision in options.precisions:
                by_setting = {setting: trl(setting, options.search_steps) for setting in SETTINGS[precision]}
                best[precision], _ = max(by_setting.items(), key=lambda item: item[1]["tokens_per_cpu_second"])
                figures |= by_setting
            print(f"{preset}: TRL's fastest settings are {', '.join(best.values())}", flush=True)
            rounds = []
            for number in range(options.rounds):
                row: dict[str, Any] = {}
                for precision, setting in best.items():
                    row[f"ours {precision}"] = measure_own(preset, precision, options.steps, options.threads)
                    row[f"trl {precision}"] = trl(setting, options.steps)
                row["one"] = measure_own(preset, "fp32", options.steps, 1)
                row["two"] = measure_own(preset, "fp32", options.steps, 1, workers=2)
                row["apart"] = measure_own(preset, "fp32", options.steps, 1, apart=2)
                rounds.append(row)
                speeds = {key: round(part["tokens_per_second"]) for key, part in row.items()}
                print(f"{preset}, round {number + 1}: tokens/s {speeds}", flush=True)
            models[preset] = {"settings": figures, "best": best, "rounds": rounds}
    steps = {"prompts": PROMPTS, "responses": GROUP, "tokens": TOKENS, "phases": PHASES}
    about = machine("torch", "transformers") | {"trl": PACKAGES[0].partition("==")[2]}
    return {"machine": about, "threads": options.threads, "step": steps, "models": models}


def measure_engines(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each engine in turn on the same weights, several times."""
    python = options.vllm_venv / "bin/python"
    if not python.exists():
        raise SystemExit(f"--vllm-venv: expected an interpreter at {python}, which `make test-vllm` makes")
    load, versions, rows = load_before(), {}, []
    for preset in options.presets:
        for precision in options.precisions:
            by_engine: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
            for _ in range(options.rounds):
                for name, rounds in by_engine.items():
                    limits = [f"--calls={options.steps}", f"--threads={options.threads}"]
                    what = [f"--preset={preset}", f"--precision={precision}", f"--engine={name}"]
                    rounds.append(result_of(start([str(python), "-m", ENGINE, *what, *limits])))
                    versions = rounds[-1].pop("versions")
                    print(f"{preset}, {precision}, {name}: {rounds[-1]}", flush=True)
            rows += [
                {"preset": preset, "precision": precision, "engine": name, "rounds": rounds}
                for name, rounds in by_engine.items()
            ]
    about = machine("torch", "transformers") | versions
    sizes = {"prompts": PROMPTS, "responses": GROUP, "tokens": TOKENS, "calls": options.steps}
    return {"machine": about, "threads": options.threads, "load_before": load, **sizes, "rows": rows}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "training": measure_training,
    "engines": lambda options: {"engines": measure_engines(options)},
}


def measure(options: argparse.Namespace) -> None:
    """Measure the parts that are asked for; those that are not stay as they are stored."""
    path = RESULTS / "language.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    for part in options.parts:
        result |= PARTS[part](options)
    report = table(result)
    print(report)
    if options.store:
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--precisions", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which all are measured in turn")
    parser.add_argument("--steps", type=int, default=10, help="training steps, or calls of an engine, per measurement")
    parser.add_argument("--search-steps", type=int, default=5, help="the same while TRL's setting is chosen")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--vllm-venv", type=Path, default=ROOT / ".venv-vllm")
    parser.add_argument("--train", dest="preset", help=argparse.SUPPRESS)
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH, help="responses per pass of our update")
    parser.add_argument("--precision", choices=tuple(SETTINGS), default="fp32", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    train(options) if options.preset else measure(options)


if __name__ == "__main__":
    main()
