"""Properties of every algorithm. A property takes an algorithm and a case, and returns what differs, or None."""

from marl_ray.config import spec_of
from marl_ray.conformance.algorithm import learner_access, truth
from marl_ray.conformance.algorithm.comparing import (
    BUDGETS,
    CERTAIN_CRITIC_SETTINGS,
    DRIFT_SETTINGS,
    EXACT_COSINE,
    FIRST_STEP_SETTINGS,
    Difference,
    begin_run,
    describe_angle,
    first_update,
    max_steps,
)
from marl_ray.conformance.algorithm.game_run import (
    UNLIMITED,
    GameRun,
    GridPoint,
    default_hyper,
    needs_whole_episodes,
    read_keys,
)

FITTED_CRITIC_COSINE = 0.999
"""Minimum cosine with the true gradient of J where a critic is fitted before the actor's step, because it is not exact."""
MAX_MOVEMENT = 1e-3
"""Change of a log-probability, in nats, that counts as none: Adam's steps of DRIFT_SETTINGS have the length of the learning
rate, 0.01, on any advantage that is not exactly zero, however small."""
MAX_GRADIENT_DEVIATION = 1e-4
"""Length of the difference of two gradients, in lengths of one, that counts as none: sums of float32 in another order."""


def reward_gradient(algorithm: str, case: GridPoint) -> Difference:
    """Check that the first gradient step goes up the true gradient of J."""
    game_run, _ = first_update(algorithm, case)
    true = truth.gradient(
        game_run.rules, game_run.uniform, 0, game_run.after, max_steps(game_run), learner_access.row_weight(game_run)
    )
    for number, learner in enumerate(game_run.learners):
        measured = -learner_access.actor_gradient(learner)
        min_cosine = FITTED_CRITIC_COSINE if spec_of(algorithm).critic_first else EXACT_COSINE
        difference = describe_angle("the gradient of J", measured, game_run.weight_gradient(number, true), min_cosine)
        if difference:
            return difference
    return None


def no_drift(algorithm: str, case: GridPoint) -> Difference:
    """Check that nothing moves the policy without rewards and costs, be episodes ended or truncated at the horizon."""
    hyper = DRIFT_SETTINGS | (CERTAIN_CRITIC_SETTINGS if spec_of(algorithm).critic_first else {})
    game_run = begin_run(
        algorithm,
        case,
        rewarded=False,
        priced=False,
        hyper=hyper,
        game={"early": needs_whole_episodes(algorithm)},
        scripted=False,
        budgets=(1.0, 1.0),
    )
    for iteration in range(2 if case.below else 1):
        batches = game_run.collect()
        game_run.update(batches)
        for learner, batch in zip(game_run.learners, batches.values(), strict=True):
            difference = _describe_movement(learner_access.movement(learner, batch), iteration)
            if difference:
                return difference
    return None


def no_drift_of_texts(algorithm: str, case: GridPoint) -> Difference:
    """Check that without rewards nothing moves a language model, though some responses end and some are truncated."""
    hyper = DRIFT_SETTINGS | {"lr": 1e-4} | (CERTAIN_CRITIC_SETTINGS if spec_of(algorithm).critic_first else {})
    game_run = GameRun(algorithm, case, hyper=hyper, budgets=(1.0, 1.0), scripted=False, text=True)
    batches = game_run.collect()
    if not all(bool(batch.terminated.any() and batch.truncated.any()) for batch in batches.values()):
        return "the game is none: expected some responses that ended and some that were truncated"
    game_run.update(batches)
    for learner, batch in zip(game_run.learners, batches.values(), strict=True):
        difference = _describe_movement(learner_access.movement(learner, batch), 0)
        if difference:
            return difference
    return None


def _describe_movement(movement: float, iteration: int) -> Difference:
    if movement <= MAX_MOVEMENT:
        return None
    return f"a log-probability moved by {movement:.4f} in iteration {iteration + 1}, without any reward"


def value_clip(algorithm: str, case: GridPoint) -> Difference:
    """Check that before any gradient step the value clip takes no gradient away."""
    game_runs = [
        begin_run(algorithm, case, hyper=FIRST_STEP_SETTINGS | {"value_clip": clip}, mixed=True)
        for clip in (0.2, UNLIMITED)
    ]
    for iteration in range(2):
        for game_run in game_runs:
            game_run.step()
        for clipped, free in zip(*(game_run.learners for game_run in game_runs), strict=True):
            with_clip, without = learner_access.critic_gradient(clipped), learner_access.critic_gradient(free)
            removed = float((with_clip - without).norm() / without.norm())
            if removed > MAX_GRADIENT_DEVIATION:
                return f"in iteration {iteration + 1} the clip takes away {removed:.0%} of the critics' first gradient"
    return None


def empty_batch(algorithm: str, case: GridPoint) -> Difference:
    """Check that a batch without decisions moves no normaliser."""
    game_run = begin_run(algorithm, case, hyper=FIRST_STEP_SETTINGS)
    game_run.step()
    batches = game_run.collect()
    before = [learner_access.normalizer_state(learner) for learner in game_run.learners]
    game_run.update({name: learner_access.without_decisions(batch) for name, batch in batches.items()})
    after = [learner_access.normalizer_state(learner) for learner in game_run.learners]
    return None if before == after else f"an empty batch moved the normalisers from {before[0]} to {after[0]}"


def adaptive_kl(algorithm: str, case: GridPoint) -> Difference:
    """Check that the divergence's coefficient follows the number of sequences, not that of minibatches."""
    hyper = FIRST_STEP_SETTINGS | {"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100_000}
    coefficients = []
    for minibatches in (1, 2):
        case = case._replace(below=case.below and needs_whole_episodes(algorithm))
        game_run = begin_run(algorithm, case, hyper=hyper | {"minibatches": minibatches})
        game_run.step()
        coefficients.append([learner.state.kl_coef for learner in game_run.learners])
    return (
        None
        if coefficients[0] == coefficients[1]
        else f"one minibatch led to {coefficients[0]}, two to {coefficients[1]}"
    )


def micro_batches(algorithm: str, case: GridPoint) -> Difference:
    """Check that the division of a batch into passes changes no gradient."""
    hyper = FIRST_STEP_SETTINGS | {"multiplier_init": 1.0}
    undivided, divided = (
        begin_run(algorithm, case, hyper=hyper, budgets=BUDGETS, mixed=True, micro_batch=size) for size in (None, 3)
    )
    for game_run in (undivided, divided):
        game_run.step()
    for reference, other in zip(undivided.learners, divided.learners, strict=True):
        measured, true = learner_access.gradient(other), learner_access.gradient(reference)
        deviation = float((measured - true).norm() / true.norm())
        if deviation > MAX_GRADIENT_DEVIATION:
            return f"the gradient of passes of 3 copies differs from that of one pass by {deviation:.1e}"
    return None


def uneven_lengths(algorithm: str, case: GridPoint) -> Difference:
    """Check that the gradient of J is right where episodes differ in length, or the config refuses the aggregation."""
    default = default_hyper(algorithm)
    levels = learner_access.choices("ratio_level") if "ratio_level" in read_keys(algorithm) else (default.ratio_level,)
    for level in levels:
        for aggregation in dict.fromkeys((default.aggregation, "token-mean", "seq-mean-token-sum")):
            hyper = {"aggregation": aggregation, **({} if len(levels) == 1 else {"ratio_level": level})}
            if not learner_access.accepts_hyper(algorithm, hyper):
                continue
            game_run = begin_run(algorithm, case, hyper=FIRST_STEP_SETTINGS | hyper, game={"early": True})
            game_run.step()
            true = truth.gradient(
                game_run.rules,
                game_run.uniform,
                0,
                game_run.after,
                max_steps(game_run),
                learner_access.row_weight(game_run),
            )
            for number, learner in enumerate(game_run.learners):
                measured = -learner_access.actor_gradient(learner)
                what = f"with {aggregation} and one ratio a {level} the gradient of J"
                difference = describe_angle(what, measured, game_run.weight_gradient(number, true))
                if difference:
                    return difference
    return None


def entropy_bonus(algorithm: str, case: GridPoint) -> Difference:
    """Check that `entropy_coef` makes the policy more random where nothing is earned."""
    hyper = DRIFT_SETTINGS | {"entropy_coef": 1.0}
    game_run = begin_run(algorithm, case, rewarded=False, priced=False, hyper=hyper)
    for learner in game_run.learners:
        learner_access.prefer_one_action(learner)
    before = game_run.tables()[0][0]
    game_run.step()
    after = game_run.tables()[0][0]
    if abs(after[0] - 0.5) < abs(before[0] - 0.5) - 1e-4:
        return None
    return f"probabilities {before[0]:.3f}, {before[1]:.3f} became {after[0]:.3f}, {after[1]:.3f} with entropy_coef=1"


def divergence_penalty(algorithm: str, case: GridPoint) -> Difference:
    """Check that `kl_coef` in the loss pulls the policy to the reference where nothing is earned.

    Every estimator that is taken is checked.
    """
    for estimator in learner_access.choices("kl_estimator"):
        penalty = {"kl_coef": 1.0, "kl_place": "loss", "kl_estimator": estimator}
        if not learner_access.accepts_hyper(algorithm, penalty):
            continue
        game_run = begin_run(algorithm, case, rewarded=False, priced=False, hyper=FIRST_STEP_SETTINGS | penalty)
        reference = learner_access.aim_reference(game_run.learners[0])
        game_run.step()
        by_logit = truth.divergence_gradient(game_run.rules, game_run.uniform, reference)
        true = game_run.weight_gradient(0, by_logit)
        # `abs` descends the total variation, and k3 the divergence the other way round: not parallel, but downhill.
        difference = describe_angle(
            f"{estimator}'s gradient", learner_access.actor_gradient(game_run.learners[0]), true, min_cosine=0.5
        )
        if difference:
            return difference
    return None


def refusals(algorithm: str, case: GridPoint) -> Difference:
    """Check that a config refuses hyper-parameters that the algorithm or its rows do not read.

    Rows that are stretches of play have no length, which `overlong_buffer` and `overlong_filter` would read.
    """
    if not learner_access.accepts_hyper(algorithm, {}):
        return "no config takes the algorithm"
    accepted_keys = [
        key
        for key, value in learner_access.unread_keys(algorithm).items()
        if learner_access.accepts_hyper(algorithm, {key: value})
    ]
    if accepted_keys:
        return f"the config takes keys that the algorithm does not read: {', '.join(accepted_keys)}"
    if not needs_whole_episodes(algorithm):
        for key in ("overlong_buffer", "overlong_filter"):
            if key in read_keys(algorithm) and learner_access.accepts_hyper(algorithm, {key: 1}, rolling=True):
                return f"the config takes {key}, though a row is a stretch of play, which has no length of its own"
    return None
