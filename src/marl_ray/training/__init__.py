"""The training of a run.

It holds the learner, checkpoints, the worker's loop, and the driver that runs it on Ray Train. Actor-critics and
language models are trained by the same code, which calls the functions of a family where they differ. Three packages
have such functions, each in one module for actor-critics and one for language models; `policy_family`, `run_family` and
`team_family` have the protocol and the choice:

- `loop/families`, of a run: its checks, its warm start, its collector, and the player of its evaluations.
- `team/families`, of a team: its models, and the engines that sample from them.
- `learner/families`, of a policy: the shards of its weights, its passes over a batch, and the copy that plays.
"""
