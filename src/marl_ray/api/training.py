"""`marl_ray.train`: one run from a config to its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.api.calls import ConfigSource, cluster_of_call, data_of, named_arguments, ray_of_call, short_interrupt
from marl_ray.config import RunConfig
from marl_ray.runs.naming import parse_named

if TYPE_CHECKING:
    from marl_ray.api.teams import LoadedTeam
    from marl_ray.training.run_result import RunResult


@short_interrupt()
@named_arguments
def train(config: ConfigSource, **changes: object) -> "TrainedRun":
    """Train a team to its end and return the finished run.

    It shows a progress bar if `tracking.progress` is true. `config` is a YAML file or plain data. `changes` are
    sections or keys of it, such as `hyper={"lr": 3e-4}` or `name="mine"`; a config without a name gets one. The run
    takes the Ray that this process is connected to, the cluster of RAY_ADDRESS, or one of its own that ends with the
    call. A run of this name that was interrupted continues; one that is finished is returned as it is. Raises
    MarlRayError with one line for a mistake in the config, and with the cause if the run fails.
    """
    data, source = data_of(config, changes)
    run, _ = parse_named(data, (), source)
    return TrainedRun(run, check_and_train(run))


def check_and_train(run: RunConfig) -> "RunResult":
    """Check a run before any cluster starts, and train it to its end. Raises MarlRayError."""
    from marl_ray.ray_seams import count_local_cpus
    from marl_ray.training.driver import say_kept_checkpoint
    from marl_ray.training.driver import train as train_on_ray
    from marl_ray.training.machines.cluster_capacity import check_cpus
    from marl_ray.training.machines.interruption import interrupt_handler
    from marl_ray.training.run_checks import check_run
    from marl_ray.training.run_folder.run_log import RunLog
    from marl_ray.training.run_result import deliver_rest, read_finished_result

    finished = read_finished_result(run)
    if finished is not None:
        return deliver_rest(run, finished)
    cluster = cluster_of_call()
    if cluster is None:
        check_cpus(run, count_local_cpus())
    console = RunLog(run)
    # Also while the run is checked and Ray starts, which may take long.
    with interrupt_handler(lambda: say_kept_checkpoint(run, console)):
        with console.held_phase("checking the run"):
            agents = check_run(run)
        for line in shared_weights_lines(agents):
            console.phase(line)
        warning = environment_warning(run)
        if warning is not None:
            console.say(warning)
        console.phase("starting Ray" if cluster is None else f"connecting to {cluster}")
        with ray_of_call():
            return train_on_ray(run, console, own_ray=cluster is None)


def shared_weights_lines(agents: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each policy that several agents share; `agents` are those of each policy.

    Without `team` all agents share one policy, also with IPPO.
    """
    return [
        f"{', '.join(members)} share the weights of policy {name!r}; `team` gives agents policies of their own"
        for name, members in agents.items()
        if len(members) > 1
    ]


def environment_warning(run: RunConfig) -> str | None:
    """Return one sentence about the first fault of a user's own environment; None if there is none.

    Only faults that show within a few steps are seen.
    """
    if ":" not in run.env.id:
        return None
    from marl_ray.conformance.extensions.environment import first_fault

    fault = first_fault(run.env)
    if fault is None:
        return None
    where = f"warning: env.id {run.env.id}: {fault.name}: {fault.failure}"
    return f"{where}; `marl-ray check plugin environment {run.env.id}` shows every fault"


@dataclass(frozen=True)
class TrainedRun:
    """A finished run. A notebook shows its learning curve."""

    config: RunConfig
    result: "RunResult"
    """Its scores, and where its files are."""

    @property
    def name(self) -> str:
        """The run's name, and that of its folder under `config.storage`."""
        return self.result.name

    @property
    def bundle(self) -> str:
        """Folder or URI of the best bundle."""
        return self.result.bundle

    @property
    def model(self) -> str:
        """`models:/NAME/VERSION` of the best bundle in MLflow's registry; empty while MLflow has not registered it."""
        return self.result.model

    @property
    def score(self) -> float | None:
        """Mean return of the best bundle on episodes that did not choose it; None if nothing was played."""
        return self.result.best_return

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics in the order of training; `steps` counts environment steps.

        There is one for each epoch of a warm start, with `steps` 0, `warm_start/epoch` and no `iteration`, and one for
        each `iteration`, of which 0 is the evaluation before training. `pandas.DataFrame(run.metrics)` is a table of
        them.
        """
        from marl_ray.training.run_folder.metrics_file import read_metrics
        from marl_ray.training.run_folder.record import filesystem_of

        return read_metrics(*filesystem_of(self.config))

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The learning curve as (environment steps, mean return of an evaluation).

        The curve lacks the epochs of a warm start. The returns are those of training episodes if the run has no
        evaluations.
        """
        from marl_ray.training.run_folder.metrics_file import history_of

        rows = self.metrics
        return history_of(rows, "eval/return") or history_of(rows, "return")

    @property
    def picture(self) -> Path | None:
        """The learning curve as a PNG; None where the storage is not a local folder."""
        return self.result.curve

    def load(self) -> "LoadedTeam":
        """Return the best bundle, ready to act."""
        from marl_ray.api.teams import load

        return load(self.bundle)

    def __str__(self) -> str:
        return "\n".join([self._headline(), *(f"  {line}" for line in self.result.summary)])

    def __repr__(self) -> str:
        return f"<TrainedRun {self._headline()}>"

    def _headline(self) -> str:
        score = "no score" if self.score is None else f"score {self.score:.3f}"
        return f"{self.name}: {score}, {self.model or 'not registered yet'}"

    def _repr_png_(self) -> bytes | None:
        return self.picture.read_bytes() if self.picture is not None and self.picture.is_file() else None
