"""Choose the next task by the shares of tasks that were solved so far."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from pettingzoo import AECEnv

from marl_ray.errors import MarlRayError
from marl_ray.extensions import import_reference

Chooser = Callable[[int, Mapping[int, float], int], int]
"""A function (position, solved, tasks) -> index in [0, tasks) of the task to play. `position` counts the groups of the
run; `solved` maps the index of every task that was played to its running mean."""

STAGES = 10
"""Equally large parts into which `easiest_first` divides the tasks."""
PASSED_SHARE = 0.7
"""Mean solved share of the open tasks at which the next part opens."""
RECENT_VISITS = 5
"""Number of visits that a running mean remembers."""


class Curriculum:
    """A chooser, and the running mean of the share of episodes that solved each task."""

    def __init__(self, name: str, env: AECEnv, saved: Mapping[str, Sequence[float]]):
        """Begin the curriculum `name`, the value of `train.curriculum`.

        With `saved` the curriculum continues from what `state()` returned. Raises MarlRayError naming the key.
        """
        self.name = name
        self.tasks = getattr(env.unwrapped, "tasks", 0)
        if not isinstance(self.tasks, int) or self.tasks < 1:
            raise MarlRayError(
                f"train.curriculum={name}: expected an environment with `tasks`, the number of its tasks"
            )
        self.chooser = _make_easiest_first(env, self.tasks) if name == "easiest_first" else _import_chooser(name)
        self.visits = {int(index): int(visits) for index, (visits, _) in saved.items()}
        self.solved = {int(index): float(mean) for index, (_, mean) in saved.items()}

    def state(self) -> dict[str, list[float]]:
        """Return plain data for a checkpoint."""
        return {str(index): [self.visits[index], mean] for index, mean in self.solved.items()}

    def task(self, position: int) -> int:
        """Return the index of the task that the group at this position plays.

        Raises MarlRayError if the chooser returns no valid index.
        """
        index = self.chooser(position, self.solved, self.tasks)
        if not isinstance(index, int) or not 0 <= index < self.tasks:
            raise MarlRayError(
                f"train.curriculum={self.name}: chose {index!r}, expected a whole number in [0, {self.tasks})"
            )
        return index

    def add(self, outcomes: Iterable[tuple[int, float]]) -> None:
        """Add the (index, solved share) of groups that were played, in the order of their positions."""
        for index, share in outcomes:
            visits = self.visits[index] = self.visits.get(index, 0) + 1
            mean = self.solved.get(index, 0.0)
            self.solved[index] = mean + (share - mean) / min(visits, RECENT_VISITS)


def easiest_first(levels: Sequence[float]) -> Chooser:
    """Return the chooser of tasks in turn, from the easiest tenth by level on.

    A further tenth opens as soon as the open ones are solved. Solved means a mean of at least PASSED_SHARE over all open
    tasks, of which those that were never played count as unsolved. Open tasks stay open, so that the policy does not
    forget them, and are played in the order of the environment's index. This is a curriculum by competence (Bengio et
    al., ICML 2009).
    """
    order = sorted(range(len(levels)), key=lambda index: levels[index])
    stages = [sorted(order[: -(-stage * len(levels) // STAGES)]) for stage in range(1, STAGES + 1)]

    def choose(position: int, solved: Mapping[int, float], tasks: int) -> int:
        passed = (sum(solved.get(index, 0.0) for index in part) >= PASSED_SHARE * len(part) for part in stages)
        opened = next((part for part, enough in zip(stages, passed, strict=True) if not enough), stages[-1])
        return opened[position % len(opened)]

    return choose


def _make_easiest_first(env: AECEnv, tasks: int) -> Chooser:
    level = getattr(env.unwrapped, "level", None)
    if not callable(level):
        raise MarlRayError("train.curriculum=easiest_first: expected an environment with `level(index)`")
    return easiest_first([float(level(index)) for index in range(tasks)])


def _import_chooser(name: str) -> Chooser:
    if ":" not in name:
        raise MarlRayError(f"train.curriculum={name}: expected easiest_first or package.module:callable")
    try:
        chooser = import_reference(name)
    except MarlRayError as error:
        raise MarlRayError(f"train.curriculum: {error}") from error
    if not callable(chooser):
        raise MarlRayError(f"train.curriculum={name}: expected a callable chooser(position, solved, tasks)")
    typed: Chooser = chooser
    return typed
