"""Checks of `data`, from which a run learns without play."""

from marl_ray.config.run.keys import DECISIONS_SCHEME, RunKeys
from marl_ray.config.run.sections import TrainConfig


def check(config: RunKeys) -> None:
    """Raise ValueError if keys do not go with `data`, or do not go without it."""
    if config.data is None:
        for name in config.trained_policies:
            if config.spec_of(name).pairs:
                raise ValueError(f"data: {config.algorithm_of(name)} of policy {name!r} needs preferred pairs")
        return
    if not config.has_language_models:
        raise ValueError("data: expected language models; `warm_start.data` imitates decisions of actor-critics")
    defaults = TrainConfig()
    for key in ("group_size", "branch_turns", "curriculum"):
        if getattr(config.train, key) != getattr(defaults, key):
            raise ValueError(f"train.{key}: nothing reads it with `data`, as nothing is played but evaluations")
    for name in config.trained_policies:
        _check_policy(config, name, config.data)


def _check_policy(config: RunKeys, name: str, data: str) -> None:
    """Refuse an algorithm that needs what was not logged, and hyper-parameters of play."""
    spec, algorithm, user_keys = config.spec_of(name), config.algorithm_of(name), config.given_hyper(name)
    if spec.critic != "none" or spec.greedy:
        raise ValueError(
            f"data: {algorithm} of policy {name!r} needs {', '.join(spec.requirements)}, which were not logged; expected "
            "an algorithm that needs whole episodes or groups alone"
        )
    if "dynamic_sampling" in user_keys:
        raise ValueError(f"dynamic_sampling of policy {name!r}: nothing is played again with `data`")
    if user_keys.get("importance_cap") is not None:
        raise ValueError(
            f"importance_cap of policy {name!r}: the loss's own ratio is to what was served, and `clip` bounds it"
        )
    if not spec.pairs and not data.startswith(DECISIONS_SCHEME):
        raise ValueError(
            f"data: {data!r}, expected {DECISIONS_SCHEME}FOLDER/EXPERIMENT; {algorithm} of policy {name!r} does not learn "
            "from a file of preferred pairs"
        )
