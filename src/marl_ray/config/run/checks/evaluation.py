"""Checks of `evaluation`: the keys that the family of the policies does not read."""

from marl_ray.config.run.keys import RunKeys
from marl_ray.config.run.sections import EvaluationConfig

_LANGUAGE_KEYS = ("tasks", "samples", "benchmarks")
_ACTOR_CRITIC_KEYS = ("episodes", "max_steps")


def check(config: RunKeys) -> None:
    """Raise ValueError if a key of `evaluation` is given that nothing reads."""
    defaults = EvaluationConfig()
    readers = "a text environment and language models"
    if config.has_language_models:
        readers = "actor-critics; text environments have `tasks` and `samples`"
    for key in _ACTOR_CRITIC_KEYS if config.has_language_models else _LANGUAGE_KEYS:
        if getattr(config.evaluation, key) != getattr(defaults, key):
            raise ValueError(f"evaluation.{key}: expected {readers}")
    if config.resources.hourly_price is not None and not config.evaluation.benchmarks:
        raise ValueError("resources.hourly_price: expected evaluation.benchmarks, without which nothing reads it")
