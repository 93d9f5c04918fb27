"""Independent PPO (de Witt et al. 2020, arXiv 2011.09533): every agent is its own PPO learner.

PPO's loss (`ppo.py`), with the critic on the agent's own observation. Agents of one policy share weights and batch.
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS

IPPO = Algorithm("ippo", SPECS["ippo"], gae_advantages, ppo_loss)
