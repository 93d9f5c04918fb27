"""Extension points. A config names a built-in, an entry point of an installed package, or `package.module:NAME`.

An entry point is a line of a package's own `pyproject.toml`, in the group `marl_ray.KINDs`:

    [project.entry-points."marl_ray.algorithms"]
    my_algorithm = "my_package.algorithms:MY_ALGORITHM"
"""

import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePosixPath
from typing import Any, TypeVar

from marl_ray.errors import MarlRayError, did_you_mean, one_line

REFERENCE = "package.module:NAME"
"""The form in which a config names any object."""
T = TypeVar("T")


@dataclass(frozen=True)
class ExtensionPoint:
    """One kind of part that users bring, with the built-in ones by name. Built-ins are imported as users' own are."""

    kind: str
    """Kind of the part, a noun such as `algorithm` or `environment`."""
    builtins: Mapping[str, str]
    """Name -> `package.module:NAME`. A built-in's name wins over an entry point of the same name."""
    classes: tuple[str, ...] = ()
    """`package.module:NAME` of the classes whose instances are the parts; empty if parts are called or are classes."""

    @property
    def group(self) -> str:
        """The group of entry points."""
        return f"marl_ray.{self.kind}s"

    def names(self) -> list[str]:
        """Return the built-ins' names in their order, then those of installed packages in alphabetical order."""
        return [*self.builtins, *sorted(installed_points(self.group).keys() - self.builtins.keys())]

    def reference(self, name: str) -> str:
        """Return the `package.module:NAME` of a name; a reference stays as it is.

        Raises MarlRayError for an unknown name, with the names that are close, and for one that two packages claim.
        """
        if ":" in name:
            return name
        if name in self.builtins:
            return self.builtins[name]
        installed = installed_points(self.group)
        if name not in installed:
            hint = with_colon(name, self.classes) or did_you_mean(name, self.names(), REFERENCE)
            raise MarlRayError(f"{name!r} is unknown{hint}")
        claims = installed[name]
        if len({claim.value for claim in claims}) > 1:
            packages = " and ".join(sorted(claim.dist.name for claim in claims if claim.dist is not None))
            raise MarlRayError(f"{name!r} is of {packages}; expected {REFERENCE} to say which")
        return claims[0].value

    def load(self, name: str) -> Any:
        """Return the object that a name stands for. Raises MarlRayError as `reference` does, or if the import fails."""
        return import_reference(self.reference(name), self.classes)


ALGORITHM = ExtensionPoint(
    "algorithm",
    {
        "ppo": "marl_ray.algorithms.with_critic.ppo:PPO",
        "ippo": "marl_ray.algorithms.with_critic.ippo:IPPO",
        "mappo": "marl_ray.algorithms.with_critic.mappo:MAPPO",
        "happo": "marl_ray.algorithms.with_critic.happo:HAPPO",
        "grpo": "marl_ray.algorithms.without_critic.grpo:GRPO",
        "dr_grpo": "marl_ray.algorithms.without_critic.dr_grpo:DR_GRPO",
        "rloo": "marl_ray.algorithms.without_critic.rloo:RLOO",
        "reinforce_pp": "marl_ray.algorithms.without_critic.reinforce_pp:REINFORCE_PP",
        "reinforce_pp_baseline": "marl_ray.algorithms.without_critic.reinforce_pp_baseline:REINFORCE_PP_BASELINE",
        "remax": "marl_ray.algorithms.without_critic.remax:REMAX",
        "gspo": "marl_ray.algorithms.without_critic.gspo:GSPO",
        "cispo": "marl_ray.algorithms.without_critic.cispo:CISPO",
        "dapo": "marl_ray.algorithms.without_critic.dapo:DAPO",
        "direct_dapo": "marl_ray.algorithms.with_critic.direct_dapo:DIRECT_DAPO",
        "dpo": "marl_ray.algorithms.from_preferences.dpo:DPO",
        "ppo_lagrangian": "marl_ray.algorithms.constrained.ppo_lagrangian:PPO_LAGRANGIAN",
        "pid_lagrangian": "marl_ray.algorithms.constrained.pid_lagrangian:PID_LAGRANGIAN",
        "p3o": "marl_ray.algorithms.constrained.p3o:P3O",
        "cpo": "marl_ray.algorithms.constrained.cpo:CPO",
        "mappo_lagrangian": "marl_ray.algorithms.constrained.mappo_lagrangian:MAPPO_LAGRANGIAN",
        "map3o": "marl_ray.algorithms.constrained.map3o:MAP3O",
        "macpo": "marl_ray.algorithms.constrained.macpo:MACPO",
    },
    ("marl_ray.algorithms.definition:Algorithm",),
)
"""See `marl_ray.algorithms.Algorithm`; `config.SPECS` has the specs of the built-in ones, which need no torch."""
ENVIRONMENT = ExtensionPoint(
    "environment",
    {
        "budget_dag": "marl_ray.envs.budget.dag:BudgetDag",
        "code_team": "marl_ray.envs.text.code_team:CodeTeam",
        "math": "marl_ray.envs.text.math_tasks:MathTasks",
        "miniwob": "marl_ray.envs.web.miniwob:MiniWob",
        "miniwob_elements": "marl_ray.envs.web.miniwob_elements:MiniWobElements",
        "react": "marl_ray.envs.text.react:React",
        "webarena": "marl_ray.envs.web.webarena.environment:WebArena",
    },
)
"""A callable that returns a PettingZoo environment; ids of MultiGrid, mpe2 and Gymnasium name families of them."""
REWARD = ExtensionPoint(
    "reward",
    {
        "solved": "marl_ray.rewards.answers:Solved",
        "math_answer": "marl_ray.rewards.answers:MathAnswer",
        "short_answer": "marl_ray.rewards.answers:ShortAnswer",
        "exact_match": "marl_ray.rewards.answers:ExactMatch",
        "code_tests": "marl_ray.rewards.code:CodeTests",
        "llm_judge": "marl_ray.rewards.judge.reward:LLMJudge",
    },
)
"""A function of (prompt, answer, task), or a class of such callables: `marl_ray.rewards.protocol.Reward`."""
TOOL = ExtensionPoint(
    "tool",
    {
        "answer": "marl_ray.agents.builtin.answer:FinalAnswer",
        "code_interpreter": "marl_ray.agents.builtin.code_interpreter:CodeInterpreter",
        "google_search_serper": "marl_ray.agents.builtin.search:GoogleSearchSerper",
    },
)
"""A typed function, or a class whose instances are called; see `marl_ray.agents.tools.make_tool`."""
BENCHMARK = ExtensionPoint(
    "benchmark",
    {
        "humaneval": "marl_ray.evaluation.benchmarks.humaneval:HUMANEVAL",
        "humaneval_plus": "marl_ray.evaluation.benchmarks.evalplus:HUMANEVAL_PLUS",
        "mbpp": "marl_ray.evaluation.benchmarks.mbpp:MBPP",
        "mbpp-sanitized": "marl_ray.evaluation.benchmarks.mbpp:MBPP_SANITIZED",
        "mbpp_plus": "marl_ray.evaluation.benchmarks.evalplus:MBPP_PLUS",
        "bigcodebench-complete": "marl_ray.evaluation.benchmarks.bigcodebench:COMPLETE",
        "bigcodebench-instruct": "marl_ray.evaluation.benchmarks.bigcodebench:INSTRUCT",
        "codecontests": "marl_ray.evaluation.benchmarks.codecontests:CODECONTESTS",
        "jsonl": "marl_ray.evaluation.benchmarks.jsonl:JSONL",
        "math": "marl_ray.evaluation.benchmarks.math_problems:MATH",
        "webarena": "marl_ray.evaluation.web_agents.protocol:WEBARENA",
        "miniwob": "marl_ray.evaluation.web_agents.protocol:MINIWOB",
    },
    ("marl_ray.evaluation.benchmarks.base:Benchmark", "marl_ray.evaluation.web_agents.protocol:WebBenchmark"),
)
"""See `marl_ray.evaluation.benchmarks.Benchmark`, and `marl_ray.evaluation.web_agents.protocol.WebBenchmark`."""
SCHEDULER = ExtensionPoint(
    "scheduler",
    {
        "fifo": "marl_ray.tuning.search.schedulers.fifo:FifoScheduler",
        "asha": "marl_ray.tuning.search.schedulers.asha:AshaScheduler",
        "median": "marl_ray.tuning.search.schedulers.median:MedianScheduler",
        "pbt": "marl_ray.tuning.search.schedulers.pbt:PbtScheduler",
        "pb2": "marl_ray.tuning.search.schedulers.pb2:Pb2Scheduler",
    },
)
"""See `marl_ray.tuning.search.schedulers.Scheduler`, a class with `Settings`."""
TRACKER = ExtensionPoint(
    "tracker",
    {
        "tensorboard": "marl_ray.training.tracking.sinks:TensorBoard",
        "wandb": "marl_ray.training.tracking.sinks:WeightsAndBiases",
    },
)
"""A callable of the run's config and id that returns a `marl_ray.training.tracking.sinks.Sink`."""
ENGINE = ExtensionPoint(
    "engine",
    {
        "torch": "marl_ray.policies.engines.torch_engine:TorchEngine",
        "transformers": "marl_ray.policies.engines.transformers_engine:PagedEngine",
        "vllm": "marl_ray.policies.engines.vllm.engine:VllmEngine",
    },
)
"""A class derived from `marl_ray.policies.engines.base.Engine` that is made from a `TokenPolicy`."""
POINTS = {point.kind: point for point in (ALGORITHM, ENVIRONMENT, REWARD, TOOL, BENCHMARK, SCHEDULER, TRACKER, ENGINE)}
"""Every kind of extension."""


def import_reference(reference: str, classes: Collection[str] = ()) -> Any:
    """Return the object that `package.module:NAME` names; NAME may be dotted.

    Raises MarlRayError with the reason if it fails. If the module has no such name, the error offers its instances of
    `classes` (`package.module:NAME` each), or else what it defines.
    """
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise MarlRayError(f"expected {REFERENCE}, got {reference!r}")
    try:
        target: object = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it loads
        if "/" in module or module.endswith(".py"):
            raise MarlRayError(
                f"expected {REFERENCE}, got a file: did you mean {_module_of(module)}:{name}?"
            ) from error
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        where = "; commands look in the folder in which they are started" if missing else ""
        raise MarlRayError(
            f"cannot import {module!r} of {reference!r} ({type(error).__name__}: {one_line(error)}){where}"
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise MarlRayError(
                f"{part!r} of {reference!r} is not in the module{did_you_mean(part, _defined_names(target, classes))}"
            )
        target = getattr(target, part)
    return target


def with_colon(name: str, classes: Collection[str] = ()) -> str:
    """Return the end of an error about a name that lacks a colon; empty where it is no such name.

    The text is '; did you mean package.module:NAME?' for `package.module.NAME` of a module that there is, and for a
    module of the folder in which the command was started, whose instances of `classes` it offers. For a file it is ';
    expected module:NAME, not a file'.
    """
    if name.endswith(".py"):
        return f"; expected {_module_of(name)}:NAME, not a file"
    if _is_module_of_folder(name):
        return f"; did you mean {' or '.join(f'{name}:{part}' for part in _parts_of(name, classes)[:3])}?"
    module, _, last = name.rpartition(".")
    try:
        spec = module and importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a package of it is missing, or the name is no name of a module
        return ""
    return f"; did you mean {module}:{last}?" if spec else ""


def _is_module_of_folder(name: str) -> bool:
    """Return True if a module or a package of this dotted name lies in the folder in which the command was started."""
    path = name.replace(".", "/")
    return os.path.isfile(f"{path}.py") or os.path.isfile(f"{path}/__init__.py")


def _parts_of(module: str, classes: Collection[str]) -> list[str]:
    """Return the names that a module defines, as `_defined_names` does; NAME where the module cannot be imported."""
    try:
        names = _defined_names(importlib.import_module(module), classes)
    except (Exception, SystemExit):  # whatever the user's module raises while it loads
        return ["NAME"]
    return [name for name in names if not name.startswith("_")] or ["NAME"]


def _module_of(file: str) -> str:
    """Return the dotted name by which the module of a file is imported in the folder where commands are started."""
    path = PurePosixPath(file.removesuffix(".py"))
    return path.name if path.is_absolute() else ".".join(path.parts)


def _defined_names(target: object, classes: Collection[str]) -> list[str]:
    """Return the names of a module's instances of `classes`; of anything else all names.

    If a module has no such instance, they are the names that it or its package defines, without those that it imports.
    """
    names = dir(target)
    if not inspect.ismodule(target):
        return names
    if parts := [name for name in names if not _classes_of(getattr(target, name)).isdisjoint(classes)]:
        return parts
    package = target.__name__.partition(".")[0]
    packages = {name: getattr(getattr(target, name), "__module__", None) or "" for name in names}
    return [name for name in names if packages[name].partition(".")[0] == package] or names


def _classes_of(value: object) -> set[str]:
    """Return `package.module:NAME` of an object's class and of its bases."""
    return {f"{base.__module__}:{base.__qualname__}" for base in type(value).__mro__}


def make_from_options(name: str, make: Callable[..., T], options: Mapping[str, object]) -> T:
    """Return the instance of a class, or the result of a function, for the options of a config.

    Raises MarlRayError for an option that it does not have, and where it rejects what an option says.
    """
    check_options(name, make, options)
    try:
        return make(**options)
    except (TypeError, ValueError, KeyError, OSError) as error:
        raise MarlRayError(f"{name} rejected {dict(options)} ({one_line(error)})") from error


def check_options(name: str, function: Callable[..., object], options: Mapping[str, object], *reserved: str) -> None:
    """Raise MarlRayError for an option that is no parameter of the function, or one that is reserved for the caller.

    Raises it too for a number of another kind, as `check_numbers` does.
    """
    try:
        check_numbers(function, options)
    except ValueError as error:
        raise MarlRayError(f"{name} rejected {dict(options)} ({error})") from error
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    accepted = [parameter.name for parameter in parameters if parameter.name not in reserved]
    for option in options:
        if option not in accepted:
            expected = did_you_mean(str(option), accepted) if accepted else "; it has no options"
            raise MarlRayError(f"{name} has no option {str(option)!r}{expected}")


def check_numbers(function: Callable[..., object], options: Mapping[str, object]) -> None:
    """Raise ValueError naming an option whose number is of another kind than the function's annotation says.

    It is a true or a false, as `workers: yes` of a config means one worker because a bool is an int of Python; or a
    fraction where the annotation is a whole number. A list of numbers has none of them in it either. A function whose
    parameters cannot be read takes every option.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions that are written in C have no signature
        return
    for name, parameter in parameters.items():
        value = options.get(name)
        types = set(re.findall(r"\w+", inspect.formatannotation(parameter.annotation)))
        if types.isdisjoint({"int", "float"}):
            continue
        is_list = isinstance(value, list | tuple)
        parts = value if isinstance(value, list | tuple) else [value]
        if "bool" not in types and any(isinstance(part, bool) for part in parts):
            raise ValueError(f"{name}={value}, expected {'no true or false in it' if is_list else 'a number'}")
        if "float" not in types and any(isinstance(part, float) for part in parts):
            raise ValueError(f"{name}={value}, expected {'whole numbers in it' if is_list else 'a whole number'}")


@cache
def installed_points(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name. Reading the metadata of all packages takes tens of milliseconds."""
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        points.setdefault(point.name, []).append(point)
    return points
