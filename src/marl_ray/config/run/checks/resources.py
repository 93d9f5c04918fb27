"""Checks of `resources`: the division of models over workers, and the actors of engines."""

from marl_ray.config.run.engines import count_engines_in_actors, engine_spec
from marl_ray.config.run.keys import RunKeys
from marl_ray.errors import MarlRayError


def check(config: RunKeys) -> None:
    """Raise ValueError if the models cannot be divided as `resources` says, or if the engines cannot run there."""
    _check_parallel(config)
    _check_engines(config)


def _check_parallel(config: RunKeys) -> None:
    """Refuse to divide networks that are not divided, or are already by other means."""
    resources = config.resources
    groups = resources.replicate
    if not config.has_language_models:
        if groups > 1:
            raise ValueError(f"resources.parallel: {groups} groups of workers, expected language models")
        for key in ("tensor", "context"):
            if (number := getattr(resources, key)) > 1:
                raise ValueError(f"resources.parallel.{key}={number}: expected language models")
    for name, policy in config.team.items():
        if resources.tensor > 1 and policy.model is not None and policy.model.lora is not None:
            raise ValueError(
                f"team.{name}.model.lora: expected no adapters with resources.parallel.tensor={resources.tensor}, "
                "which divides layers"
            )
        if groups > 1 and policy.model is not None and policy.model.cpu_offload:
            raise ValueError(
                f"team.{name}.model.cpu_offload: expected one group of workers, got {groups} by resources.parallel; "
                "shares of all workers take less of each GPU"
            )


def _check_engines(config: RunKeys) -> None:
    """Refuse engines that cannot be imported, actors that no engine runs in, and ranks above an engine's."""
    resources = config.resources
    for name, policy in config.team.items():
        if policy.model is None:
            continue
        engine, lora = policy.generation.engine, policy.model.lora
        try:
            largest = engine_spec(engine).max_rank
        except MarlRayError as error:
            raise ValueError(f"team.{name}.generation.engine: {error}") from error
        if lora is not None and largest is not None and lora.rank > largest:
            raise ValueError(
                f"team.{name}.model.lora.rank={lora.rank}: expected at most {largest}, the greatest rank of "
                f"generation.engine={engine}"
            )
    if resources.engines and not count_engines_in_actors(config.team):
        raise ValueError(
            f"resources.engines={resources.engines}: expected a policy with generation.engine: vllm, or another engine "
            "that runs in actors"
        )
    if resources.tensor_parallel > 1 and not resources.engines:
        raise ValueError(
            f"resources.tensor_parallel={resources.tensor_parallel}: expected resources.engines of 1 or more; an engine "
            "beside a worker has that worker's GPU"
        )
