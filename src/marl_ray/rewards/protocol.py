"""Rewards of text environments: what a reward is, and how a config's choice of one becomes one."""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from marl_ray.errors import MarlRayError, describe_error
from marl_ray.extensions import REWARD, check_options, make_from_options
from marl_ray.json_types import JsonMapping

log = logging.getLogger(__name__)

METRICS_PARAMETER = "metrics"
"""The parameter that the environment fills in where a reward has it."""
FAILED_METRIC = "reward_failed"
"""The metric that counts answers which a user's reward could not pay."""
_MAX_SHOWN_CHARACTERS = 60
"""Characters of an answer that a line of the log quotes."""
_FIXED_PARAMETERS = ("prompt", "answer", "task")
ChosenReward = str | Mapping[str, JsonMapping | None]
"""`NAME`, or `{NAME: options}` with one name; a name of `extensions.REWARD` or `package.module:NAME`."""


class Reward(Protocol):
    """Pays for an answer. A function of these parameters, or a class whose instances are called with them.

    prompt: the text that the agent read last. answer: what it answered; of `react` what it gave to the tool `answer`, empty
    if nothing; of `code_team` its last program. task: the task, with `task_id`, `prompt`, `level` and, where the
    environment's tasks have them, `answer`, `solution` or `code`.
    A parameter `metrics` is filled in with the environment's own metrics of the episode, such as `pass`. Further
    parameters of a function, and those of a class's `__init__`, are options.

    Returns a finite number, or that and metrics of its own. Called from several threads at once. A class may name in
    `needs` the attributes that it reads of a task. What it raises during a run pays 0 and is counted, but a MarlRayError
    ends the run.
    """

    def __call__(self, prompt: str, answer: str, task: object) -> float | tuple[float, Mapping[str, float]]:
        """Return the reward of an answer, or the reward and metrics by name."""


@dataclass(frozen=True, eq=False)
class NamedReward:
    """A reward as an environment calls it. Made by `make_reward`."""

    name: str
    function: Callable[..., object] = field(repr=False)
    takes_metrics: bool
    needs: tuple[str, ...] = ()
    """Attributes that it reads of a task."""

    @property
    def built_in(self) -> bool:
        """False if users wrote it, so that what it raises is counted."""
        return self.name in REWARD.builtins

    def check_task(self, task: object) -> None:
        """Raise MarlRayError unless the reward can read a task of this kind."""
        missing = [name for name in self.needs if not hasattr(task, name)]
        if missing:
            raise MarlRayError(
                f"reward: {self.name} reads task.{missing[0]}, which tasks of this environment do not have"
            )

    def pay(
        self, prompt: str, answer: str, task: Any, metrics: Mapping[str, float], strict: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Return the reward of an answer, and the reward's own metrics.

        A user's reward that fails on an answer pays 0, and the metric `reward_failed` counts it: an answer must not end a
        run. Raises MarlRayError where the reward does, and if `strict` for a reward that fails.
        """
        if self.built_in:
            return self.value(prompt, answer, task, metrics)
        try:
            value, more = self.value(prompt, answer, task, metrics)
        except MarlRayError:
            raise
        except Exception as error:  # whatever the user's function raises
            place = f"the answer {_shorten(answer)} to task {task.task_id}"
            failure = f"reward: {self.name} fails on {place}: {describe_error(error)}"
            if strict:
                raise MarlRayError(failure) from error
            log.warning("%s", failure)
            return 0.0, {FAILED_METRIC: 1.0}
        return value, {**more, FAILED_METRIC: 0.0}

    def value(
        self, prompt: str, answer: str, task: Any, metrics: Mapping[str, float]
    ) -> tuple[float, dict[str, float]]:
        """Return the result of `pay`, without its defence against errors.

        Raises what the reward raises, and ValueError where the reward returns no finite number.
        """
        keywords = {METRICS_PARAMETER: dict(metrics)} if self.takes_metrics else {}
        result = self.function(prompt, answer, task, **keywords)
        value, more = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(more, Mapping):
            raise ValueError(f"returned metrics {more!r}, expected a mapping of names to numbers")
        return _finite_number(value, "returned"), {
            str(name): _finite_number(part, f"metric {name}:") for name, part in more.items()
        }


def make_reward(reward: ChosenReward) -> NamedReward:
    """Return the reward that a config chooses; built-ins are made as users' own are.

    Raises MarlRayError naming what cannot be imported, an option that the reward does not have or rejects, and what cannot
    be called with a prompt, an answer and a task.
    """
    name, options = _split_options(reward)
    try:
        target = REWARD.load(name)
        if not callable(target):
            raise MarlRayError(f"{name!r} is not callable")
        if inspect.isclass(target):
            function: Any = make_from_options(name, target, options)
        else:
            check_options(
                name,
                target,
                options,
                METRICS_PARAMETER,
                *list(inspect.signature(target).parameters)[: len(_FIXED_PARAMETERS)],
            )
            function = functools.partial(target, **options) if options else target
        takes_metrics = _takes_metrics(name, function)
    except MarlRayError as error:
        raise MarlRayError(f"reward: {error}") from error
    return NamedReward(name, function, takes_metrics, tuple(getattr(function, "needs", ())))


def _split_options(reward: ChosenReward) -> tuple[str, dict[str, object]]:
    if isinstance(reward, str):
        return reward, {}
    if isinstance(reward, Mapping) and len(reward) == 1:
        [(name, options)] = reward.items()
        if isinstance(name, str) and isinstance(options or {}, Mapping):
            return name, dict(options or {})
    raise MarlRayError(f"reward: expected NAME or {{NAME: {{OPTION: VALUE}}}}, got {reward!r}")


def _takes_metrics(name: str, function: Callable[..., object]) -> bool:
    """Return True if the reward has a parameter `metrics`.

    Raises MarlRayError if it cannot be called as `Reward` is.
    """
    if not callable(function):
        raise MarlRayError(
            f"{name} makes a {type(function).__name__} that cannot be called; expected a method __call__"
        )
    signature = inspect.signature(function)
    takes_metrics = METRICS_PARAMETER in signature.parameters
    try:
        signature.bind("", "", None, **({METRICS_PARAMETER: {}} if takes_metrics else {}))
    except TypeError as error:
        expected = "expected (prompt, answer, task), `metrics` and options with a value"
        raise MarlRayError(f"{name} has the parameters {signature} ({error}); {expected}") from error
    return takes_metrics


def _finite_number(value: object, what: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{what} {value!r}, expected a finite number")
    return float(value)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}...")
