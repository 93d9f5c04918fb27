"""Checks of `train.overlap`, with which the next batch is played while the last one is trained on."""

from marl_ray.config.run.keys import RunKeys


def check(config: RunKeys) -> None:
    """Raise ValueError for `train.overlap` where a loss does not take the probabilities of the policy that played."""
    if not config.train.overlap:
        return
    if config.has_language_models or config.has_whole_episodes:
        raise ValueError("train.overlap: expected actor-critics and train.rollout=steps")
    for name in config.trained_policies:
        spec = config.spec_of(name)
        if spec.recompute or spec.constraint == "trust_region" or spec.order == "sequential":
            raise ValueError(
                f"train.overlap: {config.algorithm_of(name)} learns from the newest weights' own batch alone; expected an "
                "algorithm such as ppo, ippo or mappo"
            )
        if config.given_hyper(name).get("importance_cap") is not None:
            raise ValueError(
                f"train.overlap: importance_cap of policy {name!r} has no effect: the loss's own ratio is to the policy "
                "that played, and `clip` bounds it"
            )
