"""The choice of policies whose gradient steps have compiled code."""

from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.algorithms.losses.critics import ppo_value_loss
from marl_ray.policies.actor_critic.compiled.network import is_small
from marl_ray.policies.actor_critic.distributions import Categorical
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.training.learner.trained_policy import TrainedPolicy


def reason_for_torch(policy: TrainedPolicy) -> str:
    """Return the reason why torch takes a policy's gradient steps; empty where compiled code does.

    Compiled code does for PPO's loss by Adam on a CPU, for one Discrete action and small networks over vectors or
    categories, one of which is a critic.
    """
    model, hyper, algorithm = policy.rollout_model, policy.hyper, policy.algorithm
    if not isinstance(model, ActorCritic):
        return "it is a language model"
    distribution = model.distribution
    # The first that holds is given, so the algorithm comes before the networks, whose inputs follow from it.
    reasons = {
        f"its device is {policy.device.type}": policy.device.type != "cpu",
        "its algorithm has budgets": algorithm.spec.constraint != "none" or model.cost_critic is not None,
        f"its algorithm's critic is {algorithm.spec.critic}": algorithm.spec.critic == "none",
        "its algorithm has another loss than PPO": algorithm.policy_loss is not ppo_loss
        or algorithm.value_loss is not ppo_value_loss
        or algorithm.spec.critic_first,
        "its old outputs are computed again": policy.must_recompute or not policy.has_equal_copies,
        f"hyper.optimizer is {hyper.optimizer}": hyper.optimizer != "adamw",
        f"hyper.aggregation is {hyper.aggregation}": hyper.aggregation != "token-mean",
        "hyper.kl_coef is above 0": bool(hyper.kl_coef),
        "its action is not one Discrete": not isinstance(distribution, Categorical) or distribution.shape != (),
        "its networks are not small perceptrons over vectors or categories": not (
            is_small(model.actor) and is_small(model.critic)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
