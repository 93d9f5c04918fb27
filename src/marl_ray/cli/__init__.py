"""The command line. Every command imports what it needs when it runs, so `--help` answers at once."""

from marl_ray.cli.main import app, main

__all__ = ["app", "main"]
