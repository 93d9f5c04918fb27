"""Tasks made from seeds, offline: sums, and one-line Python functions described in a tiny language.

A level is a difficulty. Constants vary, so that what is learned from some tasks helps with others. Training and held-out
tasks are told apart by a hash of the prompt (`marl_ray.envs.text.base.is_held_out`): they are disjoint whatever the seeds.
"""
