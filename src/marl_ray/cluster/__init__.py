"""How marl-ray meets a Ray cluster: a local one of its own, and jobs submitted to any."""
