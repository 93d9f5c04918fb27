"""Checks of a run's start from new weights, from logged decisions or from another run's checkpoint."""

from marl_ray.config.run.keys import RunKeys


def check(config: RunKeys) -> None:
    """Raise ValueError if the run would start in two ways, or end with its start without having trained."""
    if not config.train.total_steps and not config.has_language_models:
        raise ValueError("train.total_steps: expected 1 or more; 0 is for supervised fine-tuning")
    if not config.train.total_steps and config.warm_start is None:
        raise ValueError("train.total_steps=0: expected `warm_start`, there is nothing else to do")
    if config.warm_start is None:
        return
    if config.resume_from is not None:
        raise ValueError("warm_start: expected no resume_from beside it; such a run begins with trained weights")
    for name in config.trained_policies:
        kl_coef, pairs = config.hyper_of(name).kl_coef, config.spec_of(name).pairs
        if kl_coef or pairs:
            cause = config.algorithm_of(name) if pairs else f"kl_coef={kl_coef:g}"
            raise ValueError(
                f"warm_start: {cause} of policy {name!r} would hold it at the weights before the warm start; leave one "
                "of them out, or start from a `bundle` that was warmed up"
            )
