"""Play whole episodes of a trained team from fixed starts, for benchmarks and comparisons."""

from contextlib import closing
from pathlib import Path
from typing import cast

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.config import RunConfig
from marl_ray.envs.copies import make_batch
from marl_ray.envs.registry import make_env
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.rollout.actor_critic.fixed_episodes import EvaluationCopies, FixedStart, WholeEpisode
from marl_ray.training.evaluation.fixed_starts import StartSet
from marl_ray.training.team.assembly import build_models, team_agents


def play_bundle(
    config: RunConfig, bundle: Path | str, episodes: int, seed: int, steps: int, greedy: bool = False
) -> list[WholeEpisode]:
    """Play `episodes` whole episodes of at most `steps` steps with the bundle's team in the config's environment.

    Actions are drawn from the policies; with `greedy` they are the most likely ones. With the `seed` of a training run
    the episodes have the starts of that run's evaluations.
    """
    team = {name: policy.model_copy(update={"bundle": str(bundle)}) for name, policy in config.team.items()}
    copies = min(config.train.env_copies, episodes)
    starts = [FixedStart(number, StartSet.SELECTION, greedy) for number in range(episodes)]
    with closing(make_env(config.env, config.constraints)) as env:
        agents = team_agents(config, env)
        models = build_models(config.model_copy(update={"team": team}), env, agents)
        players = {name: Player(cast(ActorCritic, model), agents[name], ValueNorm()) for name, model in models.items()}
        groups = list(agents.values())
        with closing(make_batch(config.env, copies, groups, config.cost_signals, config.constraints)) as envs:
            evaluation_copies = EvaluationCopies(env, envs, agents, copies, seed, config.cost_signals, steps)
            return evaluation_copies.play(players, starts)
