"""Hyper-parameters: every key of every algorithm."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from marl_ray.config.base import Config
from marl_ray.config.random_streams import Epochs, Refills

Beta = Annotated[float, Field(ge=0, lt=1)]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "fixed-length"]
KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]


class HyperParameters(Config):
    """Hyper-parameters of the update.

    The defaults here are those of actor-critics; `family_defaults` has those of language models.
    `marl-ray algorithms NAME` shows the defaults in which an algorithm differs.
    """

    lr: PositiveFloat = 7e-4
    """Learning rate of the actor."""
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critics; `lr` when not given."""
    lr_decay: bool = False
    """Decay the learning rates, and the trust region, linearly to zero at `train.total_steps`."""
    lr_warmup: NonNegativeInt = 0
    """Batches over which the learning rates, and the trust region, rise linearly to their full size: batch k of n has k / n
    of it, times what `lr_decay` leaves."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """`adamw`: Adam with decoupled weight decay. `sgd`: plain gradient descent, which keeps no state."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of Adam's running means of the gradient and of its square."""
    adam_eps: PositiveFloat = 1e-5
    """Added to the root of Adam's mean square."""
    weight_decay: NonNegativeFloat = 0.0
    """Share of a weight that a step takes off, times the learning rate. Not of norms, biases and embeddings."""
    epochs: Epochs = 4
    """Passes over each batch."""
    minibatches: PositiveInt = 1
    """Parts a batch is divided into: by time index, or by episode where batches are whole episodes."""
    max_grad_norm: PositiveFloat = 10.0
    """Gradient norm above which the actor's and the critics' gradients are scaled down, each by its own norm."""
    target_kl: PositiveFloat | None = None
    """Stop the epochs of a batch once the mean KL estimate passes this; null never stops."""

    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    value_clip: PositiveFloat | None = 0.2
    """Half-width of the value clip, in units of the value normaliser; null turns it off."""
    huber_delta: PositiveFloat = 10.0
    """Error at which the value loss turns from square to linear, in units of the value normaliser."""
    value_coef: PositiveFloat = 1.0
    """Weight of the critics' losses beside the policy's."""

    clip: PositiveFloat = 0.2
    """The ratio is held above 1 - clip."""
    clip_high: PositiveFloat | None = None
    """The ratio is held below 1 + clip_high; `clip` when not given."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the loss of a bad action as a multiple of its advantage; null turns it off."""
    ratio_level: Literal["token", "sequence"] = "token"
    """RLOO: one ratio per decision (verl), or the whole sequence's product (TRL)."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: bound of the weight pi_old / pi_behaviour, for experience that another engine or
    older weights gathered; null trusts the behaviour's log-probabilities, but for 2 where vLLM samples in bfloat16."""
    aggregation: Aggregation = "token-mean"
    """Rule by which the losses of a batch's decisions become one number. `fixed-length` divides by the most decisions
    that a sequence may have: `train.horizon`, or `generation.max_tokens` of a language model."""
    advantage_norm: Literal["batch", "group", "none"] = "batch"
    """Divisor of advantages: the standard deviation of the batch (centred too), of the group, or none."""
    std_ddof: Literal[0, 1] = 0
    """Degrees of freedom taken off in that standard deviation (1: Bessel)."""

    entropy_coef: NonNegativeFloat = 0.01
    """Weight of the entropy bonus in the loss."""
    entropy_target: PositiveFloat | None = None
    """Entropy (nats per decision) that the coefficient is steered to; null keeps it fixed."""
    entropy_step: PositiveFloat = 1e-3
    """Step of the coefficient per batch towards `entropy_target`."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference policy (the weights the run began with); 0 has no reference."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the divergence; `+` has the named value and k2's gradient."""
    kl_place: Literal["reward", "loss"] = "loss"
    """Place of the divergence: taken off the rewards before advantages, or added to the loss."""
    kl_target: PositiveFloat | None = None
    """Divergence that the coefficient is steered to; null keeps it fixed."""
    kl_horizon: PositiveInt = 10_000
    """Sequences after which the adaptive coefficient has followed an error once."""
    dynamic_sampling: Refills = 0
    """Number of times that groups whose members all score the same are played again from another start."""
    overlong_filter: bool = False
    """Leave sequences that were truncated at the horizon out of the loss."""
    overlong_buffer: NonNegativeInt = 0
    """Last steps before the horizon in which the reward is lowered, linearly down to -`overlong_penalty`; 0 turns it off."""
    overlong_penalty: PositiveFloat = 1.0
    """Reward that a sequence which reaches the horizon loses."""

    cost_gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of costs."""
    cost_gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of the costs' generalised advantage estimation."""
    multiplier_init: NonNegativeFloat = 0.0
    """First value of the Lagrange multipliers."""
    multiplier_lr: PositiveFloat = 0.005
    """PPO-Lagrangian: about the step of a multiplier per batch, whatever the size of the violation (Adam). MAPPO-Lagrangian:
    its step after each gradient step, for a relative violation of one."""
    multiplier_damping: NonNegativeFloat = 0.4
    """Added to the cost's weight per relative violation of the last batch, for as long as it lasts; 0 is the undamped
    algorithm of the paper, whose policy and multiplier circle around the budget."""
    multiplier_max: PositiveFloat = 100.0
    """Bound of a multiplier."""
    pid_kp: NonNegativeFloat = 0.4
    """Proportional gain on the relative violation (cost - budget) / budget."""
    pid_ki: NonNegativeFloat = 0.02
    """Integral gain."""
    pid_kd: NonNegativeFloat = 0.01
    """Derivative gain."""
    pid_delay: PositiveInt = 10
    """Batches over which the derivative is taken."""
    penalty: PositiveFloat = 1.0
    """P3O's factor kappa, in units of (standard deviations of reward advantage) / (of cost advantage)."""
    trust_region: PositiveFloat = 0.01
    """Greatest mean KL of one CPO step."""
    cg_iterations: PositiveInt = 10
    """Conjugate-gradient iterations per solve."""
    cg_damping: NonNegativeFloat = 0.1
    """Added to the Fisher matrix's diagonal."""
    line_search_steps: PositiveInt = 15
    """Shortenings of a step that breaks its promises, before it is given up."""
    line_search_decay: float = Field(default=0.8, gt=0, lt=1)
    """Factor of each shortening."""

    beta: PositiveFloat = 0.1
    """DPO: its paper's beta, the weight of the log ratio to the reference; a larger one holds the policy nearer to it."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """DPO: share of the pairs whose order is believed to be wrong."""
    regression_beta: PositiveFloat = 0.02
    """Direct DAPO: temperature of the squared regression of the log ratio on advantage / `regression_beta`."""
    critic_epochs: PositiveInt = 4
    """Direct DAPO: passes that fit the critic before the actor's."""
    lowest_return: float = 0.0
    """Direct DAPO: the return that the critic's 0 stands for; a lower one counts as this."""
    highest_return: float = 1.0
    """Direct DAPO: the return that the critic's 1 stands for; a higher one counts as this."""

    @model_validator(mode="after")
    def _check_combination(self) -> "HyperParameters":
        if self.clip_high is not None and self.clip_high < self.clip < 1:  # 1 is no lower bound
            raise ValueError(f"clip_high={self.clip_high:g} must not be below clip={self.clip:g}")
        if self.lowest_return >= self.highest_return:
            raise ValueError(
                f"highest_return={self.highest_return:g} must be above lowest_return={self.lowest_return:g}"
            )
        if self.kl_place == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator=k1: its gradient is zero in expectation, so it does nothing in the loss; expected "
                "kl_place=reward, or k1+"
            )
        if self.ratio_level == "sequence" and self.aggregation != "seq-mean-token-mean":
            raise ValueError(
                f"aggregation={self.aggregation}: expected seq-mean-token-mean with ratio_level=sequence, where a sequence "
                "is one term of the loss"
            )
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Least and greatest ratio."""
        return 1 - self.clip, 1 + (self.clip if self.clip_high is None else self.clip_high)


class GivenHyper(HyperParameters):
    """Hyper-parameters of every policy as the user gave them.

    Keys of a user's own algorithm have no field here; the algorithm's spec checks them.
    """

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _check_combination(self) -> "GivenHyper":
        return self  # the algorithm's own defaults are not known here

    def as_given(self) -> dict[str, object]:
        """Return the keys and values that the user gave."""
        return self.model_dump(exclude_unset=True)
