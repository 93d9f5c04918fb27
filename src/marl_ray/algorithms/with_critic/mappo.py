"""Multi-agent PPO (Yu et al. 2021, arXiv 2103.01955): PPO with a critic that sees what all agents see.

Actors stay decentralised; V is on the joint observation, with one output per agent, so agents may have different
rewards. The parts that the paper found to matter are in place: value normalisation (`value_norm.py`), the clipped Huber
value loss, advantages normalised over the whole batch without dead agents, orthogonal weights with a small last actor
layer, one large minibatch. Unlike the paper's code the value bootstraps at a time limit.
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS

MAPPO = Algorithm("mappo", SPECS["mappo"], gae_advantages, ppo_loss)
