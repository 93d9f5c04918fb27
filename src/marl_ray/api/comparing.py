"""`marl_ray.compare`: runs in one plot and a table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.api.calls import named_arguments, short_repr
from marl_ray.errors import FieldError, one_line_without
from marl_ray.json_types import JsonObject

if TYPE_CHECKING:
    from marl_ray.api.training import TrainedRun
    from marl_ray.runs.comparison import SeedGroup


@dataclass(frozen=True)
class RunComparison:
    """Runs by one metric, the best score first. A notebook shows their curves."""

    metric: str
    groups: "list[SeedGroup]"
    """Runs that differ in their seed alone are one group: its `runs` with their curves, its `score` with its interval, and
    the `differences` of its config from the other groups."""
    title: str
    """The environment."""

    @property
    def rows(self) -> list[JsonObject]:
        """A row for each run: `pandas.DataFrame(comparison.rows)` is a table of them."""
        return [row for group in self.groups for row in _rows(group)]

    @named_arguments
    def plot(self, out: str | Path) -> Path:
        """Draw the curves into the PNG `out`, and return its path. Raises FieldError if it cannot be written."""
        from marl_ray.runs.plot import plot_comparison

        if not Path(out).parent.is_dir():
            raise FieldError("out", f"{str(out)!r} cannot be written: there is no folder {str(Path(out).parent)!r}")
        try:
            return plot_comparison(self.groups, Path(out), self.title)
        except OSError as error:
            raise FieldError("out", f"{str(out)!r} cannot be written: {one_line_without(error, out)}") from error

    def __str__(self) -> str:
        from marl_ray.runs.plot import group_line

        return "\n".join(map(group_line, self.groups))

    def __repr__(self) -> str:
        return f"<RunComparison {self.metric} of {', '.join(group.label for group in self.groups)}>"

    def _repr_png_(self) -> bytes:
        from marl_ray.temporary_folders import temporary_folder

        with temporary_folder("picture") as folder:
            return self.plot(folder / "comparison.png").read_bytes()


@named_arguments
def compare(
    runs: "Sequence[str | Path | TrainedRun]", *, storage: str | Path = "runs", metric: str | None = None
) -> RunComparison:
    """Compare runs of one environment, as `marl-ray runs compare` does.

    `runs` are results of `marl_ray.train`, names under `storage`, or folders; `metric` is one of `metrics.jsonl`, by
    default `eval/return`, or else `return`. Raises MarlRayError for a run that is missing, that plays another
    environment, or that does not have the metric, and a FieldError that names an argument of a wrong type.
    """
    from marl_ray.api.training import TrainedRun
    from marl_ray.runs.comparison import group_by_seed
    from marl_ray.runs.stored import find_run

    is_list = isinstance(runs, Sequence) and not isinstance(runs, str)
    if not is_list or not runs or not all(isinstance(run, str | Path | TrainedRun) for run in runs):
        raise FieldError("runs", f"expected a list of names, folders or trained runs, got {short_repr(runs)}")
    if not isinstance(storage, str | Path):
        raise FieldError("storage", f"expected a folder or a URI, got {short_repr(storage)}")
    if not isinstance(metric, str | None):
        raise FieldError("metric", f"expected the name of a metric, got {short_repr(metric)}")
    places = [
        (run.name, run.config.storage) if isinstance(run, TrainedRun) else (str(run), str(storage)) for run in runs
    ]
    stored_runs = [find_run(name, run_storage) for name, run_storage in places]
    groups = group_by_seed(stored_runs, metric)
    return RunComparison(groups[0].runs[0].metric, groups, stored_runs[0].config["env"]["id"])


def _rows(group: "SeedGroup") -> Iterator[dict[str, object]]:
    for run in group.runs:
        row = {"run": run.name, "algorithm": run.algorithm, "seed": run.seed, "steps": run.points[-1][0]}
        score = run.score
        row |= (
            {"score": None, "low": None, "high": None}
            if score is None
            else {"score": score.value, "low": score.low, "high": score.high}
        )
        yield row | {key: value for key, value in group.differences.items() if key not in row}
