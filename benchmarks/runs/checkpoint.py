"""Seconds for which a checkpoint holds the training up, against `torch.save` of the same state.

    .venv/bin/python -m benchmarks.runs.checkpoint             # about three minutes on two cores
    .venv/bin/python -m benchmarks.runs.checkpoint --repeats 2 # a quick look, which stores nothing

In turn, in the same run, after every step: each worker writes its own part of the state with `torch.save` and waits for
the others; the team plays a batch; the product begins a checkpoint; the team plays another batch, beside which the weights
are copied and the checkpoint is written; and the next update waits until they are copied. The checkpoint holds the training
up where it begins and where the update waits. The copy itself is timed apart, and both batches. Both write to the same disk.
The language model has random weights and one step of AdamW behind it.

Writes `benchmarks/results/checkpoint.{json,md}`.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, load_before, machine, store
from benchmarks.tables import median_range

SHAPE: dict[str, Any] = {"hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 12}
"""The shape of the language model: 64 million parameters."""
GOAL = 0.10
"""The share of a `torch.save` for which a checkpoint may hold the training up."""
REPEATS = 5
"""Least number of a large state's checkpoints whose result is stored."""
SMALL_REPEATS = 10
"""Checkpoints of the small state, which take milliseconds, for each of the large one."""
COLUMNS = {"torch.save": 1, "checkpoint": 2, "copy": 2, "alone": 1, "beside": 1, "with bundle": 2, "written": 1}
"""The times that are taken, in the order of the table, and the digits of their milliseconds."""
SMALL, LARGE = "actor-critic", "language model"


def config_of(kind: str, folder: Path, workers: int) -> Any:
    """Return the config of the run whose checkpoints are measured."""
    from marl_ray.config import RunConfig, load_config

    if kind == SMALL:
        return load_config(RunConfig, ROOT / "jobs/configs/multigrid_ippo.yaml", (f"resources.workers={workers}",))
    overrides = (
        *(f"team.solver.model={{path: {folder / 'model'}, context: 32}}", "warm_start=null", "train.env_copies=8"),
        *("train.group_size=4", "evaluation.tasks=4", f"resources.workers={workers}"),
    )
    return load_config(RunConfig, ROOT / "jobs/configs/math_grpo.yaml", overrides)


def make_model(folder: Path) -> int:
    """Write the language model and return its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from marl_ray.policies.language.tiny_models import byte_tokenizer

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            num_attention_heads=10,
            num_key_value_heads=5,
            tie_word_embeddings=True,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **SHAPE,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def time_action(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(kind: str, rank: int, workers: int, folder: Path, repeats: int) -> dict[str, Any]:
    """Return the seconds of this worker."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from marl_ray.training.checkpoints.learner_tensors import tensors_of
    from marl_ray.training.checkpoints.storage import local_stored_folder
    from marl_ray.training.loop.assembly import build_run

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=workers)
    config = config_of(kind, folder, workers)
    run = build_run(config, torch.device("cpu"))
    sizes: dict[str, int] = {}
    times: dict[str, list[float]] = {key: [] for key in COLUMNS}
    copies: list[float] = []
    take = run.saver.copy.take

    def time_take(*arguments: Any) -> Callable[[], None]:
        copy = take(*arguments)
        return lambda: copies.append(time_action(copy))

    run.saver.copy.take = time_take  # type: ignore[method-assign]

    def play() -> None:
        run.collector.collect(run.team.players(), run.state.iteration)

    for repeat in range(repeats + 1):
        if kind == SMALL:
            run.step()
        else:
            for learner in run.team.learners.values():
                for parameter in learner.policy.model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e-3)
                learner.policy.optimizer.step()
                learner.policy.optimizer.zero_grad()
        tensors = tensors_of(run.team.learners)
        local = {key: value.to_local() if isinstance(value, DTensor) else value for key, value in tensors.items()}
        plain = {name: learner.to_plain() for name, learner in run.team.learners.items()}
        path = folder / f"torch-{rank}.pt"

        state = [local, run.state, plain, run.collector.state()]

        def save(state: Any = state, path: Path = path) -> None:
            torch.save(state, path)
            dist.barrier()

        dist.barrier()
        synchronous = time_action(save)
        sizes["bytes"] = path.stat().st_size
        path.unlink()
        run.state.best_score = float("inf")
        alone = time_action(play)
        begun = time_action(partial(run.save, local_stored_folder(folder / f"checkpoint-{repeat}")))
        beside = time_action(play)
        waited = time_action(run.saver.wait_for_copy)
        written = begun + beside + waited + time_action(run.saver.wait)
        run.state.best_score = float("-inf")
        with_bundle = time_action(partial(run.save, local_stored_folder(folder / f"best-{repeat}")))
        run.saver.wait()
        values = (synchronous, begun + waited, copies[-2], alone, beside, with_bundle, written)
        for key, value in zip(times, values, strict=True):
            times[key].append(value)
        for name in ("checkpoint", "best"):  # whichever worker is first
            shutil.rmtree(folder / f"{name}-{repeat}", ignore_errors=True)
    run.close()
    dist.destroy_process_group()
    return {"rank": rank, **sizes, "first": {k: v[0] for k, v in times.items()}} | {k: v[1:] for k, v in times.items()}


def work(kind: str, rank: int, workers: int, folder: Path, repeats: int, answers: Any) -> None:
    answers.put(measure(kind, rank, workers, folder, repeats))


def compare(kind: str, workers: int, repeats: int, scratch: Path | None) -> dict[str, Any]:
    """Return rank 0's seconds with this many workers."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="marl-ray-benchmark-", dir=scratch) as name:
        folder = Path(name)
        parameters = make_model(folder / "model") if kind == LARGE else None
        answers = context.SimpleQueue()
        processes = [
            context.Process(target=work, args=(kind, rank, workers, folder, repeats, answers))
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(900)
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{kind}: exit statuses {[process.exitcode for process in processes]}")
        first: dict[str, Any] = min((answers.get() for _ in processes), key=lambda answer: answer["rank"])
    ratio = statistics.median(first["checkpoint"]) / statistics.median(first["torch.save"])
    return {"kind": kind, "workers": workers, "parameters": parameters, "ratio": ratio} | first


def line(result: dict[str, Any]) -> str:
    size = f"{result['bytes'] / 1e6:,.1f} MB"
    cells = [median_range([1e3 * s for s in result[key]], digits) for key, digits in COLUMNS.items()]
    return f"| {result['kind']} | {result['workers']} | {size} | {' | '.join(cells)} | {result['ratio']:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help="checkpoints of the language model; of the other ten times as many"
    )
    parser.add_argument("--scratch", type=Path, help="folder to write to, of the disk that is measured")
    options = parser.parse_args()
    load = load_before()
    results = []
    for kind in (SMALL, LARGE):
        for workers in (1, 2):
            repeats = options.repeats * (SMALL_REPEATS if kind == SMALL else 1)
            results.append(compare(kind, workers, repeats, options.scratch))
            print(line(results[-1]), flush=True)
    million = next(result["parameters"] for result in results if result["parameters"]) / 1e6
    table = [
        f"Milliseconds, median (least-most) of {options.repeats} checkpoints of the language model and "
        f"{options.repeats * SMALL_REPEATS} of the actor-critic; {os.cpu_count()} CPUs, one thread per worker (load "
        f"before: {load:.1f}). The language model has {million:.0f} million parameters; the size is that of one worker's "
        f"part. Goal: a checkpoint holds the training up for at most {GOAL:.0%} of `torch.save`.",
        "",
        "| state | workers | size | torch.save | held up by a checkpoint | copying the weights | a batch played alone "
        "| beside a checkpoint | beginning one with a bundle | complete after | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *map(line, results),
    ]
    text = "\n".join(table) + "\n"
    if options.repeats >= REPEATS:
        result = {"machine": machine("ray", "torch"), "load_before": load, "goal": GOAL, "results": results}
        store("checkpoint", result, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
