"""Typed configs. Importing this package loads pydantic and YAML only, never torch or Ray."""

from marl_ray.config.load import config_hash, load_config, parse_config, read_yaml
from marl_ray.config.run.algorithms import SPECS, AlgorithmSpec, spec_of
from marl_ray.config.run.config import RunConfig
from marl_ray.config.run.engines import EngineSpec, engine_spec
from marl_ray.config.run.hyper import HyperParameters
from marl_ray.config.run.model import GenerationConfig, LoraConfig, ModelConfig
from marl_ray.config.run.sections import (
    BenchmarkConfig,
    CheckpointConfig,
    ConstraintConfig,
    CostConfig,
    EnvConfig,
    EvaluationConfig,
    NetworkConfig,
    PolicyConfig,
    ResourcesConfig,
    TrackingConfig,
    TrainConfig,
    WarmStartConfig,
)
from marl_ray.config.serving.arms import ArmConfig
from marl_ray.config.serving.experiment import BreakerConfig, ExperimentConfig
from marl_ray.config.serving.gateway import CacheConfig, GatewayConfig, RateLimitConfig
from marl_ray.config.tracking import resolve_tracking_uri

__all__ = [
    "SPECS",
    "AlgorithmSpec",
    "ArmConfig",
    "BenchmarkConfig",
    "BreakerConfig",
    "CacheConfig",
    "CheckpointConfig",
    "ConstraintConfig",
    "CostConfig",
    "EngineSpec",
    "EnvConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "GatewayConfig",
    "GenerationConfig",
    "HyperParameters",
    "LoraConfig",
    "ModelConfig",
    "NetworkConfig",
    "PolicyConfig",
    "RateLimitConfig",
    "ResourcesConfig",
    "RunConfig",
    "TrackingConfig",
    "TrainConfig",
    "WarmStartConfig",
    "config_hash",
    "engine_spec",
    "load_config",
    "parse_config",
    "read_yaml",
    "resolve_tracking_uri",
    "spec_of",
]
