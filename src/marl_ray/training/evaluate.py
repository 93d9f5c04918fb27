"""Episodes of a trained team, on fresh seeds."""

from pathlib import Path

from marl_ray.algorithms.value_norm import ValueNorm
from marl_ray.config import RunConfig
from marl_ray.envs import make_env
from marl_ray.envs.batch import make_batch
from marl_ray.rollout.buffers import Player
from marl_ray.rollout.collector import Collector, Episode, Plan
from marl_ray.training.team import build_models, team_agents


def evaluate(
    config: RunConfig, bundle: Path | str, episodes: int, seed: int, steps: int, greedy: bool = False
) -> list[Episode]:
    """At least `episodes` whole episodes of at most `steps` steps that the bundle's team plays in the config's environment.

    Actions are drawn from the policies, or the most likely ones with `greedy`. `seed` should not be one of training's.
    """
    team = {name: policy.model_copy(update={"bundle": str(bundle)}) for name, policy in config.team.items()}
    env = make_env(config.env, config.constraints)
    agents = team_agents(config, env)
    models = build_models(config.model_copy(update={"team": team}), env, agents)
    players = {name: Player(model, agents[name], ValueNorm()) for name, model in models.items()}
    for player in players.values():
        player.model.critic = player.model.cost_critic = None  # nothing is valued
    copies = config.train.env_copies
    plan = Plan(steps, episodes=True, greedy=greedy)
    envs = make_batch(config.env, copies, list(agents.values()), config.signals, config.constraints)
    collector = Collector(env, envs, agents, range(copies), plan, seed, config.signals)
    played: list[Episode] = []
    for iteration in range(-(-episodes // copies)):
        played += collector.collect(players, iteration).episodes
    collector.close()
    env.close()
    return played
