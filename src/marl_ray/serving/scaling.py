"""The number of replicas of a deployment: fixed, or Serve's autoscaling between two numbers."""

from marl_ray.config.serving.arms import Replicas
from marl_ray.json_types import JsonObject

MAX_ONGOING_REQUESTS = 2_000
"""Maximum number of requests under way in a replica; callers queue more. Serve's default of 5 leaves nothing to batch."""
GATEWAY_ONGOING = 16.0
"""Target of requests under way per gateway replica: enough to share forward passes well, far below a replica's limit."""
ARM_ONGOING = 1.5
"""Target of calls under way per arm replica; gateways keep at most two for each replica, and only under load."""
TEXT_SHARE = 0.5
"""Target share of the responses that a replica of language models can write at once."""
UPSCALE_S, DOWNSCALE_S = 10.0, 300.0
"""Seconds of too much load before a deployment grows, and of too little before it shrinks. A replica takes seconds to
start, and most lulls are short."""


def scaling(replicas: Replicas, ongoing: float) -> JsonObject:
    """Return the options of `serve.deployment` that aim at `ongoing` requests per replica."""
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    low, high = replicas
    config = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": ongoing}
    return {"autoscaling_config": config | {"upscale_delay_s": UPSCALE_S, "downscale_delay_s": DOWNSCALE_S}}
