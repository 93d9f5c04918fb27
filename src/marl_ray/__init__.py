"""marl-ray: train teams of policies on Ray, measure them, serve the winners."""

__version__ = "0.1.0"
