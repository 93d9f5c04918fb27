"""The gateway by the import path `serve.app:build`, for a cluster that was started in the root of a checkout.

The file is there because Ray Serve imports what a config names, from the folder in which the cluster was started too. It
adds nothing to `marl_ray.serving.app:build`, which the configs under `serve/configs/` name: that path works wherever
marl-ray is installed.
"""

from marl_ray.serving.app import build

__all__ = ["build"]
