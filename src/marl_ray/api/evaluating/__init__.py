"""The call `marl_ray.evaluate`: its arguments, and the two kinds of scores, of a benchmark and of whole episodes."""
