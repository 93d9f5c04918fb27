"""`marl-ray plan`: the GPU memory that a language run needs."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from marl_ray.cli.documents.output import Json, as_plain_data, show
from marl_ray.cli.options import Overrides, RunFile

if TYPE_CHECKING:
    from marl_ray.config import RunConfig
    from marl_ray.training.team.memory_plan import MemoryPlan

GIB = 1 << 30
"""Bytes of a GiB, the unit of the table."""
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
        document = {
            "rows": rows_of_passes(run),
            "plans": [as_plain_data(plan) | {"total": plan.total} for plan in plans],
        }
        show(as_json, document, ())
        return
    show(as_json, None, plan_lines(run, plans))


def rows_of_passes(run: "RunConfig") -> dict[str, int]:
    """Return policy -> number of sequences of a pass, for the policies that learn."""
    from marl_ray.training.team.memory_plan import pass_of

    return {name: pass_of(run, name).rows for name, policy in run.team.items() if not policy.frozen}


def plan_lines(run: "RunConfig", plans: "Iterator[MemoryPlan]") -> Iterator[str]:
    """Yield a line for each pass, and the table, row by row as it is computed."""
    first = next(plans)  # if it cannot be computed, the error comes before any line
    for name, rows in rows_of_passes(run).items():
        model, tokens = run.team[name].model, run.team[name].generation.max_tokens
        assert model is not None
        yield f"team.{name}: passes of {rows} x {model.context} tokens, {tokens} of each trained"
    yield "  ".join(f"{column:>11}" for column in COLUMNS)
    for plan in itertools.chain([first], plans):
        cells = [f"{plan.gpus:>11}", *(f"{getattr(plan, column) / GIB:>11.1f}" for column in COLUMNS[1:])]
        yield "  ".join(cells)
        if plan.main_memory:
            yield f"{'':>11}  {plan.main_memory / GIB:.1f} GiB of each worker's main memory"
