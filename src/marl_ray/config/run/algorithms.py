"""The spec of every named algorithm: its needs, keys and defaults.

They are plain data: the maths is in `marl_ray.algorithms`.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args, get_type_hints

from pydantic import ValidationError

from marl_ray.config.mistakes.wording import first_mistake
from marl_ray.config.run.hyper import Aggregation, HyperParameters
from marl_ray.errors import MarlRayError
from marl_ray.extensions import ALGORITHM
from marl_ray.json_types import JsonMapping

CriticInput = Literal["none", "local", "central"]
Constraint = Literal["none", "multiplier", "penalty", "trust_region"]
UpdateOrder = Literal["simultaneous", "sequential"]

ADAM_KEYS = ("adam_betas", "adam_eps")
"""Keys of `hyper` that `optimizer: adamw` reads, and no other."""
READ_WITH_KEY = {
    "kl_target": "kl_coef",
    "kl_horizon": "kl_target",
    "entropy_step": "entropy_target",
    "overlong_penalty": "overlong_buffer",
}
"""Key of `hyper` -> the key that turns on the part of the algorithm that reads it."""
_OPTIMISER_KEYS = (
    *("lr", "lr_decay", "lr_warmup", "optimizer", *ADAM_KEYS, "weight_decay"),
    *("epochs", "minibatches", "max_grad_norm"),
)
_ADVANTAGE_KEYS = ("advantage_norm", "std_ddof")
_LENGTH_KEYS = ("overlong_filter", "overlong_buffer", "overlong_penalty")
COMMON_KEYS = (
    *_OPTIMISER_KEYS,
    *("target_kl", "entropy_coef", "entropy_target", "entropy_step", "aggregation", "importance_cap"),
    *("kl_coef", "kl_estimator", "kl_place", "kl_target", "kl_horizon"),
    *_ADVANTAGE_KEYS,
    *_LENGTH_KEYS,
)
"""Keys of `hyper` that the learner reads for every algorithm that descends a gradient."""
TRUST_REGION_KEYS = (*_OPTIMISER_KEYS, *_ADVANTAGE_KEYS, *_LENGTH_KEYS)
"""Keys of `hyper` that the learner reads if a trust region moves the actor, and gradient descent the critics alone."""
PAIR_KEYS = _OPTIMISER_KEYS
"""Keys of `hyper` that the learner reads if the algorithm learns from preferred pairs."""


@dataclass(frozen=True)
class AlgorithmSpec:
    """The spec of one named algorithm, as configs read it."""

    title: str
    """Its name as people write it."""
    paper: str
    """The paper or page that has its formulas."""
    critic: CriticInput = "none"
    """The input of its critic. Local: what the policy sees; central: the observations of all agents."""
    groups: bool = False
    """True if it compares several episodes from one start: then `train.group_size` must be two or more."""
    group_norm: bool = False
    """True if its advantages may be divided by the deviation of their group (`advantage_norm: group`)."""
    greedy: bool = False
    """True if the first episode of every group is played greedily, as the others' baseline."""
    pairs: bool = False
    """True if it learns from pairs of responses of which one was preferred, given as the run's `data`, and compares
    with the reference policy. Rows of a batch are then pairs, the preferred one first."""
    critic_first: bool = False
    """True if the critic is fitted to the batch's returns before the actor sees its advantages."""
    constraint: Constraint = "none"
    """Means by which it keeps budgets of costs: a Lagrange multiplier, a penalty in the loss, or a trust region's step."""
    order: UpdateOrder = "simultaneous"
    """Sequential: policies are updated one after another, each given the change of those before it."""
    recompute: bool = False
    """True if the learner evaluates the old log-probabilities itself when an update begins.

    The two then differ from the rollout's if another engine or older weights sampled. The learner always evaluates them
    if it or the sampler computes in bfloat16.
    """
    token_policies: bool = True
    """True if it also trains language models."""
    keys: tuple[str, ...] = ()
    """Keys of `hyper` that this algorithm reads besides the common ones."""
    defaults: JsonMapping = field(default_factory=dict)
    """Values that differ from the defaults of `hyper`, for every family of policies."""
    hyper: type[HyperParameters] = HyperParameters
    """The keys of `hyper` and their types; an algorithm with keys of its own gives a subclass that adds them."""

    def __post_init__(self) -> None:
        unknown = sorted({*self.keys, *self.defaults} - set(self.hyper.model_fields))
        if unknown:
            raise MarlRayError(f"AlgorithmSpec {self.title!r}: {unknown[0]!r} is no field of {self.hyper.__name__}")
        for key, hint in get_type_hints(type(self)).items():
            choices = get_args(hint) if key in ("critic", "constraint", "order") else ()
            if choices and getattr(self, key) not in choices:
                raise MarlRayError(
                    f"AlgorithmSpec {self.title!r}: {key}={getattr(self, key)!r}, expected one of {', '.join(choices)}"
                )
        contradictions = {
            "greedy: expected groups, whose first episode it is": self.greedy and not self.groups,
            "critic_first: expected a critic": self.critic_first and self.critic == "none",
            "critic_first: expected no trust region; with both the gradient steps would train nothing": self.critic_first
            and self.constraint == "trust_region",
            "pairs: expected no critic and no groups": self.pairs and (self.critic != "none" or self.groups),
            "constraint: expected a critic, local or central, for costs too": self.needs_costs
            and self.critic == "none",
        }
        for mistake, holds in contradictions.items():
            if holds:
                raise MarlRayError(f"AlgorithmSpec {self.title!r}: {mistake}")
        try:
            self.hyper.model_validate(dict(self.defaults))
        except ValidationError as error:
            missing = [detail["loc"][-1] for detail in error.errors() if detail["type"] == "missing"]
            mistake = f"{missing[0]}: every key needs a default" if missing else f"defaults: {first_mistake(error)}"
            raise MarlRayError(f"AlgorithmSpec {self.title!r}: {mistake}") from error

    @property
    def common_keys(self) -> tuple[str, ...]:
        """Keys of `hyper` that the learner reads for this algorithm."""
        if self.pairs:
            return PAIR_KEYS
        return TRUST_REGION_KEYS if self.constraint == "trust_region" else COMMON_KEYS

    @property
    def read_keys(self) -> frozenset[str]:
        """Every key of `hyper` that changes the algorithm's results; any other key is refused."""
        return frozenset((*self.common_keys, *self.keys))

    @property
    def needs_costs(self) -> bool:
        """True if the algorithm needs costs and budgets."""
        return self.constraint != "none"

    @property
    def needs_whole_episodes(self) -> bool:
        """True if the algorithm needs whole episodes, because nothing of it stands for the rest of a truncated one."""
        return self.critic == "none" or self.critic_first

    @property
    def requirements(self) -> tuple[str, ...]:
        """The algorithm's demands on a run, in words."""
        requirements = {
            f"{self.critic} critic": self.critic != "none",
            "whole episodes": self.needs_whole_episodes and not self.pairs,
            "preferred pairs (`data`)": self.pairs,
            "groups": self.groups,
            "greedy rollout": self.greedy,
            "costs and budgets": self.needs_costs,
            "a trust region": self.constraint == "trust_region",
        }
        return tuple(name for name, needed in requirements.items() if needed)


_CLIP_BOUND_KEYS = ("clip", "clip_high")
_CLIP_KEYS = (*_CLIP_BOUND_KEYS, "dual_clip")
_CRITIC_KEYS = ("critic_lr", "gamma", "gae_lambda", "value_clip", "huber_delta", "value_coef")
_COST_KEYS = ("cost_gamma", "cost_gae_lambda")
_LAGRANGE_KEYS = ("multiplier_init", "multiplier_lr", "multiplier_damping", "multiplier_max")
_PID_KEYS = ("multiplier_init", "pid_kp", "pid_ki", "pid_kd", "pid_delay")
_TRUST_KEYS = ("trust_region", "cg_iterations", "cg_damping", "line_search_steps", "line_search_decay")
_GROUP_DEFAULTS: dict[str, object] = {"std_ddof": 1, "entropy_coef": 0.0}
_CRITIC_FREE_DEFAULTS: dict[str, object] = _GROUP_DEFAULTS | {"gamma": 1.0}


def _group_spec(
    title: str,
    paper: str,
    *,
    aggregation: Aggregation,
    advantage_norm: Literal["batch", "group", "none"],
    keys: tuple[str, ...] = _CLIP_KEYS,
    group_norm: bool = True,
    **defaults: object,
) -> AlgorithmSpec:
    """Return the spec of a critic-free algorithm that compares the members of a group.

    `group_norm` is False for one whose advantages no deviation of a group may divide.
    """
    values = _CRITIC_FREE_DEFAULTS | {"aggregation": aggregation, "advantage_norm": advantage_norm} | defaults
    return AlgorithmSpec(
        title, paper, groups=True, group_norm=group_norm, keys=(*keys, "dynamic_sampling"), defaults=values
    )


def _constrained_spec(
    title: str,
    paper: str,
    *,
    constraint: Constraint,
    critic: CriticInput,
    order: UpdateOrder = "simultaneous",
    keys: tuple[str, ...],
) -> AlgorithmSpec:
    """Return the spec of an algorithm with cost critics and budgets; `keys` are those of its constraint alone."""
    clip_keys = () if constraint == "trust_region" else _CLIP_KEYS
    return AlgorithmSpec(
        title,
        paper,
        critic=critic,
        constraint=constraint,
        order=order,
        token_policies=constraint != "trust_region",
        keys=(*clip_keys, *_CRITIC_KEYS, *_COST_KEYS, *keys),
    )


SPECS: dict[str, AlgorithmSpec] = {
    "ppo": AlgorithmSpec(
        "Proximal policy optimisation", "arXiv 1707.06347", critic="local", keys=(*_CLIP_KEYS, *_CRITIC_KEYS)
    ),
    "ippo": AlgorithmSpec("Independent PPO", "arXiv 2011.09533", critic="local", keys=(*_CLIP_KEYS, *_CRITIC_KEYS)),
    "mappo": AlgorithmSpec("Multi-agent PPO", "arXiv 2103.01955", critic="central", keys=(*_CLIP_KEYS, *_CRITIC_KEYS)),
    "happo": AlgorithmSpec(
        "Heterogeneous-agent PPO",
        "arXiv 2109.11251",
        critic="central",
        order="sequential",
        keys=(*_CLIP_KEYS, *_CRITIC_KEYS),
    ),
    "grpo": _group_spec(
        "Group relative policy optimisation",
        "arXiv 2402.03300",
        aggregation="seq-mean-token-mean",
        advantage_norm="group",
    ),
    "dr_grpo": _group_spec("GRPO done right", "arXiv 2503.20783", aggregation="fixed-length", advantage_norm="none"),
    "rloo": _group_spec(
        "REINFORCE leave-one-out",
        "arXiv 2402.14740",
        aggregation="token-mean",
        advantage_norm="none",
        keys=(*_CLIP_KEYS, "ratio_level"),
        group_norm=False,  # it subtracts a mean of the others, which no deviation of all divides
    ),
    "reinforce_pp": AlgorithmSpec(
        "REINFORCE++",
        "arXiv 2501.03262",
        keys=(*_CLIP_KEYS, "gamma"),
        defaults=_CRITIC_FREE_DEFAULTS | {"aggregation": "token-mean", "advantage_norm": "batch"},
    ),
    "reinforce_pp_baseline": _group_spec(
        "REINFORCE++ with a group baseline", "arXiv 2501.03262", aggregation="token-mean", advantage_norm="batch"
    ),
    "remax": AlgorithmSpec(
        "ReMax",
        "arXiv 2310.10505",
        groups=True,
        greedy=True,
        keys=("gamma",),
        defaults=_CRITIC_FREE_DEFAULTS | {"aggregation": "seq-mean-token-sum", "advantage_norm": "none", "epochs": 1},
    ),
    "gspo": _group_spec(
        "Group sequence policy optimisation",
        "arXiv 2507.18071",
        aggregation="seq-mean-token-mean",
        advantage_norm="group",
        clip=3e-4,
        clip_high=4e-4,
    ),
    "cispo": _group_spec(
        "Clipped importance sampling policy optimisation",
        "arXiv 2506.13585",
        aggregation="token-mean",
        advantage_norm="group",
        keys=_CLIP_BOUND_KEYS,
        clip=1.0,  # no lower bound, as the paper: a weight is never negative
        clip_high=4.0,
    ),
    "dapo": _group_spec(
        "Decoupled clip and dynamic sampling policy optimisation",
        "arXiv 2503.14476",
        aggregation="token-mean",
        advantage_norm="group",
        clip_high=0.28,
        dynamic_sampling=4,  # overlong handling is off: in an environment a time limit is an ordinary end
    ),
    "direct_dapo": AlgorithmSpec(
        "Direct advantage policy optimisation",
        "arXiv 2412.18279",
        critic="local",
        critic_first=True,
        keys=("critic_lr", "regression_beta", "critic_epochs", "lowest_return", "highest_return"),
        defaults={"advantage_norm": "none", "entropy_coef": 0.0},
    ),
    "dpo": AlgorithmSpec(
        "Direct preference optimisation",
        "arXiv 2305.18290",
        pairs=True,
        keys=("beta", "label_smoothing"),
        defaults=_CRITIC_FREE_DEFAULTS | {"aggregation": "seq-mean-token-mean", "advantage_norm": "none"},
    ),
    "ppo_lagrangian": _constrained_spec(
        "PPO-Lagrangian", "Ray, Achiam, Amodei 2019", constraint="multiplier", critic="local", keys=_LAGRANGE_KEYS
    ),
    "pid_lagrangian": _constrained_spec(
        "PID-Lagrangian", "arXiv 2007.03964", constraint="multiplier", critic="local", keys=_PID_KEYS
    ),
    "p3o": _constrained_spec(
        "Penalised PPO", "arXiv 2205.11814", constraint="penalty", critic="local", keys=("penalty",)
    ),
    "cpo": _constrained_spec(
        "Constrained policy optimisation",
        "arXiv 1705.10528",
        constraint="trust_region",
        critic="local",
        keys=_TRUST_KEYS,
    ),
    "mappo_lagrangian": _constrained_spec(
        "MAPPO-Lagrangian",
        "arXiv 2110.02793",
        constraint="multiplier",
        critic="central",
        order="sequential",
        keys=_LAGRANGE_KEYS,
    ),
    "map3o": _constrained_spec(
        "Multi-agent P3O", "arXiv 2205.11814", constraint="penalty", critic="central", keys=("penalty",)
    ),
    "macpo": _constrained_spec(
        "Multi-agent constrained policy optimisation",
        "arXiv 2110.02793",
        constraint="trust_region",
        critic="central",
        order="sequential",
        keys=_TRUST_KEYS,
    ),
}
"""Every built-in algorithm, in the order of the documentation; `extensions.ALGORITHM` says where its functions are."""


def spec_of(algorithm: str) -> AlgorithmSpec:
    """Return the spec of an algorithm (see `extensions.ALGORITHM`). Raises MarlRayError saying what is expected."""
    if algorithm in SPECS:
        return SPECS[algorithm]
    target = ALGORITHM.load(algorithm)
    spec = getattr(target, "spec", None)
    if not isinstance(spec, AlgorithmSpec) or not all(
        callable(getattr(target, key, None)) for key in ("advantages", "policy_loss")
    ):
        raise MarlRayError(
            f"{algorithm}: expected an Algorithm (of marl_ray.algorithms), whose `spec` is an AlgorithmSpec"
        )
    return spec
