"""Evaluation of language teams on held-out tasks while they train."""

from collections.abc import Mapping

from marl_ray.config import RunConfig
from marl_ray.rewards.pass_at_k import pass_at_k
from marl_ray.rollout.responses import TokenPlayer
from marl_ray.rollout.text import TextCollector
from marl_ray.training.collectives import gather, world
from marl_ray.training.recent import mean_costs, score


def evaluate_held_out(
    config: RunConfig, collector: TextCollector, players: Mapping[str, TokenPlayer]
) -> tuple[dict[str, float], float]:
    """Metrics and score of a greedy episode and `evaluation.samples` sampled ones per held-out task.

    Every worker takes part, with every n-th task. All evaluations of a run draw the same random numbers, so that they
    differ by the policies alone. The score is the mean return of sampled episodes; a team within its budgets beats every
    one that is not.
    """
    rank, workers = world()
    env, settings = collector.copies[0].env, config.evaluation
    tasks = min(settings.tasks, getattr(env.unwrapped, "held_out", settings.tasks))
    own = range(tasks)[rank::workers]
    alone, drawn = collector.play(players, own, greedy=True), collector.play(players, own, samples=settings.samples)
    by_task = {task: (alone[i], drawn[i * settings.samples :][: settings.samples]) for i, task in enumerate(own)}
    everywhere = [played for part in gather(by_task) for played in part.items()]
    tasks_played = [played for _, played in sorted(everywhere, key=lambda item: item[0])]
    greedy, sampled = [one for one, _ in tasks_played], [e for _, several in tasks_played for e in several]
    found = {"eval/return": _mean([e.ret for e in sampled]), "eval/greedy_return": _mean([e.ret for e in greedy])}
    if config.constraints:
        names = [f"eval/episode_cost_{k}" for k in range(len(config.constraints))]
        found |= dict(zip(names, mean_costs([e.costs for e in sampled]), strict=False))
    if all(e.solved is not None for e in (*greedy, *sampled)):
        found["eval/greedy"] = _mean([float(bool(e.solved)) for e in greedy])
        solved = [sum(bool(e.solved) for e in several) for _, several in tasks_played]
        for k in _ks(settings.samples):
            found[f"eval/pass_at_{k}"] = _mean([pass_at_k(settings.samples, count, k) for count in solved])
    return found, score(config.constraints, found["eval/return"], mean_costs([e.costs for e in sampled]))


def _ks(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    return sorted({samples, *(1 << i for i in range(samples.bit_length()))})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
