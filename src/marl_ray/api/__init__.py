"""The Python API, whose names `marl_ray` shows and imports at their first use."""
