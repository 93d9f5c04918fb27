"""`serve deploy` and `serve run` load this module: the gateway of `marl_ray.serving`.

Configs under `serve/configs/` name `marl_ray.serving.app:build`, which works wherever marl_ray is installed.
"""

from marl_ray.serving.app import build

__all__ = ["build"]
