"""Config of the arms of an experiment; each arm answers for a share of its units."""

from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from marl_ray.config.base import HTTP_BASE_URL, Config
from marl_ray.config.run.engines import serving_engine
from marl_ray.config.run.model import DEFAULT_ENGINE

MIN_WEIGHT = 1e-6
"""Smallest weight and probability: below it floating-point arithmetic says nothing about an experiment."""
Weight = Annotated[float, Field(ge=0, le=1 / MIN_WEIGHT)]


def _check_rising(replicas: int | tuple[int, int]) -> int | tuple[int, int]:
    if not isinstance(replicas, int) and replicas[0] > replicas[1]:
        raise ValueError(f"expected [least, most], got {list(replicas)}")
    return replicas


Replicas = Annotated[PositiveInt | tuple[PositiveInt, PositiveInt], AfterValidator(_check_rising)]


def max_replicas(replicas: Replicas) -> int:
    """Return the greatest number of replicas."""
    return replicas if isinstance(replicas, int) else replicas[1]


class PriceConfig(Config):
    """Price of an external model, in USD per million tokens."""

    prompt: NonNegativeFloat = Field(allow_inf_nan=False)
    """Price of tokens that it reads."""
    completion: NonNegativeFloat = Field(allow_inf_nan=False)
    """Price of tokens that it writes."""

    def cost(self, prompt: int, completion: int) -> float:
        """Return the price in USD of `prompt` tokens read and `completion` tokens written."""
        return (prompt * self.prompt + completion * self.completion) / 1e6


class ArmConfig(Config):
    """One arm: a bundle, or a model behind an OpenAI-compatible URL, and its share of the traffic."""

    bundle: str | None = None
    """Bundle folder or `models:/name/version`; each arm has either this or `url`."""
    url: str | None = Field(default=None, pattern=HTTP_BASE_URL)
    """Base URL of an OpenAI-compatible API, its `/v1` included: the arm is a language model there."""
    model: str | None = Field(default=None, min_length=1, max_length=200)
    """With `url`: name of the model there."""
    api_key_env: str | None = Field(default=None, min_length=1)
    """With `url`: the environment variable of the gateway's replicas that has the API key. None is sent when not given."""
    deadline_s: PositiveFloat | None = None
    """With `url`: longest wait for the next token in seconds; half of `request_timeout_s` when not given, and at most."""
    price: PriceConfig | None = None
    """With `url`: price of its tokens. All units of the experiment then have the metric `cost_usd`, but for those with a
    response whose tokens the server does not count."""
    engine: Annotated[str, AfterValidator(serving_engine)] = DEFAULT_ENGINE
    """With `bundle` of language models: `torch`, the built-in decoder; `vllm` (an extra), in a process that adapters
    of one base model share; or `package.module:NAME` of an engine of your own that serves."""
    weight: Weight = 1.0
    """Share of the units, relative to the other arms' weights; 0, or from 1e-6 to 1e6."""
    replicas: Replicas = 1
    """With `placement: deployment`: replicas of the arm's own deployment, or `[least, most]`, as the load asks for."""
    cpus: NonNegativeFloat = 1.0
    """With `placement: deployment`: CPUs of each of them."""
    gpus: NonNegativeFloat = 0.0
    """With `placement: deployment`: GPUs of each of them."""
    allow_rolled_back: bool = False
    """Accept a bundle that another experiment has rolled back; the audit keeps this. The key cannot revive an arm that
    this experiment has rolled back."""

    @property
    def reference(self) -> str:
        """The bundle, or the URL."""
        return self.bundle or str(self.url)

    @model_validator(mode="after")
    def _check_source(self) -> "ArmConfig":
        if (self.bundle is None) == (self.url is None):
            raise ValueError("expected either bundle or url")
        if self.url is not None and self.model is None:
            raise ValueError("model: expected the model's name beside url")
        for name in ("model", "api_key_env", "deadline_s", "price"):
            if self.url is None and getattr(self, name) is not None:
                raise ValueError(f"{name}: only read with url, not with bundle")
        if self.url is not None and self.engine != DEFAULT_ENGINE:
            raise ValueError("engine: only read with bundle, not with url")
        return self
