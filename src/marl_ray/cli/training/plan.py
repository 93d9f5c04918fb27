"""`marl-ray plan`."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from marl_ray.cli.documents.output import Json, plain, show
from marl_ray.cli.options import Overrides, RunFile

if TYPE_CHECKING:
    from marl_ray.config import RunConfig
    from marl_ray.training.team.memory_plan import MemoryPlan

GIB = 1 << 30
DEFAULT_GPU_COUNTS = [2**power for power in range(7)]
"""Numbers of GPUs that are computed when none is given."""
COLUMNS = ("gpus", "weights", "gradients", "optimizer", "gathered", "activations", "reference", "sampling", "total")


def plan_memory(
    config: RunFile,
    overrides: Overrides = None,
    gpus: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of GPUs; may be given again. By default 1, 2, 4 ... 64.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Estimate the GPU memory that a language run needs.

    It needs neither a GPU nor weights: a step is computed with tensors that have no numbers, in seconds to a minute for
    each number of GPUs. Rows are in GiB. Keys and values of the engine, fragmentation and CUDA itself come besides.
    """
    from marl_ray.runs.naming import load_named
    from marl_ray.training.team.memory_plan import memory_plan

    run, _ = load_named(config, overrides or ())
    parts = run.resources.parallel.values()
    counts = gpus or [count for count in DEFAULT_GPU_COUNTS if all(count % part == 0 for part in parts)]
    plans = (memory_plan(run, count) for count in counts)
    if as_json:
        document = {"rows": passes_of_run(run), "plans": [plain(each) | {"total": each.total} for each in plans]}
        show(as_json, document, ())
        return
    show(as_json, None, plan_lines(run, plans))


def passes_of_run(run: "RunConfig") -> dict[str, int]:
    """Return policy -> sequences of a pass."""
    from marl_ray.training.team.memory_plan import pass_of

    return {name: pass_of(run, name).rows for name, policy in run.team.items() if not policy.frozen}


def plan_lines(run: "RunConfig", plans: "Iterator[MemoryPlan]") -> Iterator[str]:
    """Yield a line for each pass, and the table, row by row as it is computed."""
    first = next(plans)  # raises an error for what cannot be computed, before there are lines
    for name, rows in passes_of_run(run).items():
        model, tokens = run.team[name].model, run.team[name].generation.max_tokens
        assert model is not None
        yield f"team.{name}: passes of {rows} x {model.context} tokens, {tokens} of each trained"
    yield "  ".join(f"{column:>11}" for column in COLUMNS)
    for each in itertools.chain([first], plans):
        cells = [f"{each.gpus:>11}", *(f"{getattr(each, column) / GIB:>11.1f}" for column in COLUMNS[1:])]
        yield "  ".join(cells)
        if each.main_memory:
            yield f"{'':>11}  {each.main_memory / GIB:.1f} GiB of each worker's main memory"
