"""Checks of a batch: copies, groups, branches, minibatches and lengths of sequences."""

from marl_ray.config.run.keys import RunKeys


def check(config: RunKeys) -> None:
    """Raise ValueError if a batch cannot be gathered or divided as `train` and the hyper-parameters say."""
    _check_copies(config)
    _check_branches(config)
    for name in config.trained_policies:
        _check_minibatches(config, name)
        _check_length(config, name)
    if config.has_language_models and config.train.rollout == "steps":
        raise ValueError("train.rollout=steps: language models play whole episodes")
    if not config.has_language_models and config.train.curriculum:
        raise ValueError("train.curriculum: expected a text environment and language models")


def _check_copies(config: RunKeys) -> None:
    """Refuse copies that workers cannot share equally, and groups that do not fit a worker's copies."""
    train, workers = config.train, config.resources.workers
    if train.env_copies % workers:
        raise ValueError(f"train.env_copies={train.env_copies} must be a multiple of resources.workers={workers}")
    if train.group_size > 1 and config.env_copies_per_worker % train.group_size:
        raise ValueError(
            f"train.group_size={train.group_size} must divide the copies of a worker "
            f"(train.env_copies / resources.workers = {config.env_copies_per_worker})"
        )


def _check_branches(config: RunKeys) -> None:
    """Refuse branches without groups of texts, or at turns that no episode has."""
    branch_turns, horizon = config.train.branch_turns or 0, config.train.horizon
    if branch_turns and not (config.has_language_models and config.has_group_comparison):
        raise ValueError(
            f"train.branch_turns={branch_turns}: expected a language model whose algorithm compares groups"
        )
    if branch_turns >= horizon:
        raise ValueError(
            f"train.branch_turns={branch_turns} must be below train.horizon={horizon}, the turns of an episode"
        )


def _check_minibatches(config: RunKeys, name: str) -> None:
    """Refuse more minibatches than a batch has parts: episodes, or time indices."""
    minibatches = config.hyper_of(name).minibatches
    key = "env_copies" if config.has_whole_episodes else "horizon"
    parts = getattr(config.train, key)
    if minibatches > parts:
        raise ValueError(f"minibatches={minibatches} of policy {name!r} must not exceed train.{key}={parts}")


def _check_length(config: RunKeys, name: str) -> None:
    """Refuse rules for long sequences where rows have no length, and a buffer longer than any sequence."""
    hyper, policy = config.hyper_of(name), config.team[name]
    longest, key_of_limit = config.train.horizon, "train.horizon"
    if policy.model is not None:
        longest, key_of_limit = policy.generation.max_tokens, f"team.{name}.generation.max_tokens"
    if hyper.overlong_buffer >= longest:
        raise ValueError(f"overlong_buffer={hyper.overlong_buffer} must be below {key_of_limit}={longest}")
    for key in ("overlong_buffer", "overlong_filter"):
        if getattr(hyper, key) and not config.has_whole_episodes:
            raise ValueError(
                f"{key} of policy {name!r}: a row holds a stretch of play, which has no length of its own; expected "
                "train.rollout=episodes"
            )
