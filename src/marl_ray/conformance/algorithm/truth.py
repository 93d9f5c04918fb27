"""True values of the tiny games, path by path over Python floats.

The code is slow, obvious, and has nothing in common with the learner.

`Tables` hold the probabilities of every agent's two actions in every state. A triple is of the reward and of the two
costs. An episode that is not over at the last step of a path continues by what `after` says of its last state.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from marl_ray.conformance.algorithm.games import EPISODE_STEPS, SIGNAL_COUNT, STATE_COUNT, GameRules, GameStep

Tables = Sequence[Sequence[Sequence[float]]]
"""Probabilities by agent, state and action."""
Triple = list[float]
"""Reward and costs."""
After = Mapping[int, Sequence[float]]
"""State -> reward and costs that follow it."""
SUM_KINDS = 1 + SIGNAL_COUNT
"""Number of sums of a triple: of the reward and of each cost."""


def zero_sums() -> After:
    """Return the rewards and costs of zero after every state."""
    return dict.fromkeys(range(STATE_COUNT), (0.0,) * SUM_KINDS)


def has_ended(rules: GameRules, path: Sequence[GameStep]) -> bool:
    """Return True if a path ends by the rules, so that nothing follows."""
    last = path[-1]
    return last.moved.over and (rules.is_terminated or last.state == 0)


def time_of(state: int) -> int:
    """Return the number of steps before a state."""
    return (state + 1) // 2


def probability(rules: GameRules, tables: Tables, path: Sequence[GameStep]) -> float:
    """Return the probability of a path; forced moves are certain."""
    product = 1.0
    for step in path:
        for agent in rules.decisions(time_of(step.state)):
            product *= tables[agent][step.state][step.actions[agent]]
    return product


def path_sums(rules: GameRules, path: Sequence[GameStep], after: After) -> Triple:
    """Return the undiscounted sums of reward and costs along a path."""
    sums = [0.0 if has_ended(rules, path) else after[path[-1].moved.state][k] for k in range(SUM_KINDS)]
    for step in path:
        for k, amount in enumerate((step.moved.reward, *step.moved.costs)):
            sums[k] += amount
    return sums


def expected_returns(rules: GameRules, tables: Tables, after: After, max_steps: int = EPISODE_STEPS) -> Triple:
    """Return J and J_c from the start over at most `max_steps` steps."""
    sums = [0.0] * SUM_KINDS
    for path in rules.paths(max_steps):
        p, amounts = probability(rules, tables, path), path_sums(rules, path, after)
        sums = [total + p * amount for total, amount in zip(sums, amounts, strict=True)]
    return sums


def values(rules: GameRules, tables: Tables, after: After) -> After:
    """Return the exact critics: state -> reward and costs that follow it."""
    values_of = {state: list(after[state]) for state in range(STATE_COUNT)}
    for state in reversed(range(2 * EPISODE_STEPS - 1)):
        sums = [0.0] * SUM_KINDS
        for step in rules.steps(state):
            p = probability(rules, tables, [step])
            over = has_ended(rules, [step])
            for k, amount in enumerate((step.moved.reward, *step.moved.costs)):
                sums[k] += p * (amount + (0.0 if over else values_of[step.moved.state][k]))
        values_of[state] = sums
    return values_of


def gradient(
    rules: GameRules,
    tables: Tables,
    kind: int,
    after: After,
    max_steps: int = EPISODE_STEPS,
    weight: Callable[[int], float] = lambda decisions: 1.0,
) -> list[list[Triple]]:
    """Return dJ / d logit of softmax policies by agent, state and action, the sum over paths of p (R - J) grad log p.

    `kind` is the place of the differentiated sum in a triple. `weight` is the weight that an algorithm gives to a
    decision of an agent that decided so often on the path. With a weight the subtracted J matters, and it is the mean
    that algorithms subtract.
    """
    mean = expected_returns(rules, tables, after, max_steps)[kind]
    result = [[[0.0, 0.0] for _ in range(STATE_COUNT)] for _ in range(rules.count)]
    for path in rules.paths(max_steps):
        share = probability(rules, tables, path) * (path_sums(rules, path, after)[kind] - mean)
        for agent in range(rules.count):
            decisions_of_agent = [step for step in path if rules.decides(agent, time_of(step.state))]
            for step in decisions_of_agent:
                for action in (0, 1):
                    score = (step.actions[agent] == action) - tables[agent][step.state][action]
                    result[agent][step.state][action] += share * weight(len(decisions_of_agent)) * score
    return result


def decisions(rules: GameRules, tables: Tables, policy: int) -> float:
    """Return the mean number of decisions that one policy makes in an episode."""
    members = range(policy * rules.agents, (policy + 1) * rules.agents)
    total = 0.0
    for path in rules.paths():
        count = sum(rules.decides(agent, time_of(step.state)) for step in path for agent in members)
        total += probability(rules, tables, path) * count
    return total


def divergence_gradient(rules: GameRules, tables: Tables, reference: Tables) -> list[list[Triple]]:
    """Return d / d logit of the mean KL(policy || reference) of the decisions along the paths.

    The states count as they are visited now.
    """
    result = [[[0.0, 0.0] for _ in range(STATE_COUNT)] for _ in range(rules.count)]
    for path in rules.paths():
        p = probability(rules, tables, path)
        for step in path:
            for agent in rules.decisions(time_of(step.state)):
                probabilities, reference_probabilities = tables[agent][step.state], reference[agent][step.state]
                ratios = [math.log(a / b) for a, b in zip(probabilities, reference_probabilities, strict=True)]
                divergence = sum(a * ratio for a, ratio in zip(probabilities, ratios, strict=True))
                for action in (0, 1):
                    result[agent][step.state][action] += p * probabilities[action] * (ratios[action] - divergence)
    return result
