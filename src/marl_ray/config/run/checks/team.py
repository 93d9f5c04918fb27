"""Checks of a team, of which some policy learns and all are of a family that its algorithms train."""

from marl_ray.config.run.keys import RunKeys


def check(config: RunKeys) -> None:
    """Raise ValueError if nothing is trained, or if a policy is of another family than the others or its algorithm."""
    if not config.trained_policies:
        raise ValueError("team: every policy is frozen, so there is nothing to train")
    actor_critics = [name for name, policy in config.team.items() if policy.model is None]
    if actor_critics and len(actor_critics) < len(config.team):
        raise ValueError(f"team.{actor_critics[0]}.model: expected a language model, as the other policies are")
    for name in config.trained_policies if config.has_language_models else ():
        spec = config.spec_of(name)
        if not spec.token_policies or spec.critic == "central":
            raise ValueError(
                f"team.{name}: {config.algorithm_of(name)} trains actor-critics, not language models; "
                "`marl-ray algorithms` says which do both"
            )
