"""Checks of each policy's algorithm: its hyper-parameters, and what it needs of the run."""

from pydantic import ValidationError

from marl_ray.config.base import message_of
from marl_ray.config.run.algorithms import ADAM_KEYS, READ_WITH_KEY
from marl_ray.config.run.hyper import HyperParameters
from marl_ray.config.run.keys import RunKeys


def check(config: RunKeys) -> None:
    """Raise ValueError if a policy's hyper-parameters are not valid, or if its algorithm lacks what it needs."""
    for name, policy in config.team.items():
        hyper = _valid_hyper(config, name)
        if not policy.frozen:  # a frozen policy has no algorithm
            _check_readers(config, name, hyper)
            _check_advantages(config, name, hyper)
            _check_needs(config, name)


def _valid_hyper(config: RunKeys, name: str) -> HyperParameters:
    """Return the hyper-parameters of a policy. Raises ValueError that names the key in the config."""
    try:
        return config.hyper_of(name)
    except ValidationError as error:
        first = error.errors()[0]
        of_policy = first["loc"] and first["loc"][0] in config.team[name].hyper
        key = ".".join([*(["team", name] if of_policy else []), "hyper", *map(str, first["loc"])])
        raise ValueError(f"{key}: {message_of(first)}") from error


def _check_readers(config: RunKeys, name: str, hyper: HyperParameters) -> None:
    """Refuse keys whose reader another key has turned off."""
    user_keys, fields = config.given_hyper(name), type(hyper).model_fields
    for key in ADAM_KEYS if hyper.optimizer != "adamw" else ():
        if key in user_keys:
            raise ValueError(f"{key} of policy {name!r}: expected optimizer=adamw, got {hyper.optimizer}")
    for key, part in READ_WITH_KEY.items():
        if key in user_keys and user_keys[key] != fields[key].default and not getattr(hyper, part):
            raise ValueError(f"{key} of policy {name!r}: expected {part} beside it, without which nothing reads it")


def _check_advantages(config: RunKeys, name: str, hyper: HyperParameters) -> None:
    """Refuse advantages divided by the deviation of groups that the algorithm does not have or does not divide by."""
    spec, algorithm = config.spec_of(name), config.algorithm_of(name)
    if hyper.advantage_norm == "group" and not spec.groups:
        raise ValueError(f"advantage_norm=group of policy {name!r}: {algorithm} has no groups")
    if hyper.advantage_norm == "group" and not spec.group_norm:
        raise ValueError(f"advantage_norm=group of policy {name!r}: {algorithm} takes no deviation of a group")


def _check_needs(config: RunKeys, name: str) -> None:
    """Refuse a run that lacks the groups, the whole episodes or the budgets that the algorithm needs."""
    spec, algorithm, train = config.spec_of(name), config.algorithm_of(name), config.train
    if spec.groups and train.group_size < 2 and config.data is None:
        raise ValueError(f"train.group_size={train.group_size}: {algorithm} of policy {name!r} needs 2 or more")
    if spec.groups and not spec.greedy and config.has_greedy_copies and train.group_size < 3:
        raise ValueError(
            f"train.group_size={train.group_size}: {algorithm} of policy {name!r} needs 3 or more where another "
            "policy's has the first member play greedily"
        )
    if spec.needs_whole_episodes and train.rollout == "steps":
        raise ValueError(f"train.rollout=steps: {algorithm} of policy {name!r} needs whole episodes")
    if spec.needs_costs and not config.constraints:
        raise ValueError(f"constraints: {algorithm} of policy {name!r} needs a budget for each cost of the environment")
