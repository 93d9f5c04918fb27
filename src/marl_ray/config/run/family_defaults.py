"""Defaults of `hyper` for each family of policies.

The defaults of actor-critics are those of the fields in `HyperParameters`. A language model decides a token at a time,
is large, and has been trained before, so other numbers are right for it:

- `gamma`, `gae_lambda` and their like of costs are 1: a reward at a response's end counts as much for its first token as for
  its last (verl, TRL and OpenRLHF all do so).
- One epoch, gradients of norm 1 and no entropy bonus.
- Adam's own epsilon, 1e-8: a large model's gradient is spread over so many weights that 1e-5 would be most of the divisor.
- 1e-6 is the learning rate of verl, TRL and OpenRLHF for models of billions of weights. Low-rank adapters want ten times
  that of all weights (Schulman et al. 2025, "LoRA Without Regret"). Critics are new, so they learn faster (verl: 1e-5).
- The presets are a thousand times smaller and begin untrained. Their learning rate 2e-4 is that of the measured runs
  (`benchmarks/language/pass_rates.py`), and so is an epsilon of 1e-5, which keeps weights that hardly have a
  gradient from making whole steps.
- Critics are heads on the model, which their loss must not pull away from its text: 0.1 of it counts (Ziegler et al. 2019,
  arXiv 1909.08593).
"""

from marl_ray.config.run.model import ModelConfig

_LANGUAGE_DEFAULTS: dict[str, object] = {
    **dict.fromkeys(("gamma", "gae_lambda", "cost_gamma", "cost_gae_lambda"), 1.0),
    "epochs": 1,
    "max_grad_norm": 1.0,
    "entropy_coef": 0.0,
    "value_coef": 0.1,
}
_LEARNING_RATES: dict[tuple[bool, bool], dict[str, float]] = {
    (False, False): {"lr": 1e-6, "critic_lr": 1e-5, "adam_eps": 1e-8},
    (False, True): {"lr": 1e-5, "critic_lr": 1e-5, "adam_eps": 1e-8},
    (True, False): {"lr": 2e-4, "critic_lr": 1e-3, "adam_eps": 1e-5},
    (True, True): {"lr": 2e-3, "critic_lr": 1e-3, "adam_eps": 1e-5},
}
"""Learning rates by (preset, trained by adapters)."""


def family_defaults(model: ModelConfig | None) -> dict[str, object]:
    """Return the defaults of `hyper` for a policy with this model (None: an actor-critic).

    Only those are returned that differ from the defaults of `HyperParameters`.
    """
    if model is None:
        return {}
    return _LANGUAGE_DEFAULTS | _LEARNING_RATES[model.preset is not None, model.lora is not None]
