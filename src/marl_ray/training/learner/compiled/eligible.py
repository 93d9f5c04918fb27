"""The choice of policies whose gradient steps have compiled code."""

from marl_ray.algorithms.losses.ppo_losses import ppo_loss
from marl_ray.algorithms.losses.value_losses import ppo_value_loss
from marl_ray.policies.actor_critic.compiled.network import is_small
from marl_ray.policies.actor_critic.distributions import Categorical
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.training.learner.trained_policy import TrainedPolicy


def is_compiled(policy: TrainedPolicy) -> bool:
    """True for PPO's loss by Adam on a CPU, for one Discrete action and small networks over vectors with a critic of the
    agent's own observation."""
    model, hyper, algorithm = policy.rollout_model, policy.hyper, policy.algorithm
    return (
        isinstance(model, ActorCritic)
        and policy.device.type == "cpu"
        and policy.samples_alike
        and not policy.recomputes
        and algorithm.policy_loss is ppo_loss
        and algorithm.value_loss is ppo_value_loss
        and algorithm.spec.constraint == "none"
        and algorithm.spec.critic == "local"
        and not algorithm.spec.critic_first
        and hyper.optimizer == "adamw"
        and hyper.aggregation == "token-mean"
        and not hyper.kl_coef
        and isinstance(model.distribution, Categorical)
        and model.distribution.shape == ()
        and is_small(model.actor)
        and is_small(model.critic)
        and model.cost_critic is None
    )
