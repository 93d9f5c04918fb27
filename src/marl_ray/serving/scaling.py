"""The number of replicas of a deployment: fixed, or Serve's autoscaling between two numbers."""

from typing import Any

from marl_ray.config.serving.arms import Replicas

GATEWAY_ONGOING = 16.0
"""Requests under way in a gateway replica for which it is large enough: as many share a pass well, and far fewer than one
replica can hold."""
ARM_ONGOING = 1.5
"""Calls under way in an arm's replica; gateways keep two at most for each replica, and only while it has no rest."""
TEXT_SHARE = 0.5
"""Part of the responses that a replica of language models can write at once: the load to aim at."""
UPSCALE_S, DOWNSCALE_S = 10.0, 300.0
"""Seconds that a deployment must be too small, or too large. A replica takes seconds to start, and a lull is often
short."""


def scaling(replicas: Replicas, ongoing: float) -> dict[str, Any]:
    """Options of `serve.deployment`: `ongoing` requests per replica are aimed at."""
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    low, high = replicas
    config = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": ongoing}
    return {"autoscaling_config": config | {"upscale_delay_s": UPSCALE_S, "downscale_delay_s": DOWNSCALE_S}}
