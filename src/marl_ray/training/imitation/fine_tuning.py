"""Supervised fine-tuning of a team of language models on demonstrations, before the first iteration.

    max  mean over tokens of log pi(response token | prompt, response before it)

for each policy over the demonstrations of its agents, within the tokens that begin and end a turn
(`policies.prompting.turn_ends`), at the temperature at which the policy will sample. A gradient step takes
`warm_start.batch` demonstrations over all workers. Each of n workers takes every n-th of them in the order of their
lengths, in passes of `train.micro_batch`. So the gradients are the same for any number of workers.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from marl_ray.config import RunConfig, WarmStartConfig
from marl_ray.policies.language.padding import pad_sequences
from marl_ray.rollout.rng import permutation
from marl_ray.training.collectives import broadcast_from_rank0, rank_and_world_size, sum_over_workers
from marl_ray.training.errors import DivergedError
from marl_ray.training.imitation.warm_start import WARM_START_ITERATION, fit_all
from marl_ray.training.learner.optimizers import backward_over_workers, clip_gradients, optimizer_of
from marl_ray.training.learner.trained_policy import TrainedPolicy
from marl_ray.training.team.gpu_pass_limit import translate_out_of_memory
from marl_ray.training.team.members import Team
from marl_ray.training.texts.demonstrations import EncodedExample, encode_examples, read_demonstrations

if TYPE_CHECKING:
    from pettingzoo import AECEnv


LEARNING_RATE_FACTOR = 10
"""Learning rate of a warm start that sets none, as a multiple of `hyper.lr`.

The rate may be larger because a demonstration gives the right token everywhere, and a reward judges only a whole
response (verl, TRL and OpenRLHF fine-tune with 5e-6 to 2e-5, and learn from rewards with 1e-6).
"""


def fine_tune(config: RunConfig, env: "AECEnv", team: Team, emit: Callable[[dict[str, float]], None]) -> None:
    """Fit every trained policy to its agents' demonstrations; every worker takes part.

    `emit` gets each epoch's metrics, on rank 0 alone: the mean log-likelihood of a token, in nats. Raises DivergedError
    if it is not finite, and PassMemoryError, which names the policy.
    """
    settings = cast(WarmStartConfig, config.warm_start)
    # Rank 0 alone plays the demonstrations. An environment that runs programs may take long, and a time limit may end a
    # program on one worker and not on another.
    examples = broadcast_from_rank0(lambda: read_demonstrations(config, env, team.agents))
    fits = {
        name: DemonstrationFit(
            name,
            learner.policy,
            encode_examples(examples[name], learner.policy.model.lm, learner.policy.model.tokenizer, config, name),
            settings,
        )
        for name, learner in team.learners.items()
    }
    fit_all(config, team, fits, emit)


class DemonstrationFit:
    """One policy, its demonstrations, and an optimiser for the warm start alone.

    The run begins with a fresh optimiser.
    """

    def __init__(self, name: str, policy: TrainedPolicy, examples: list[EncodedExample], settings: WarmStartConfig):
        self.name = name
        self.policy = policy
        self.examples = examples
        self.batch = settings.batch
        self.optimizer = optimizer_of(
            policy.hyper, [([policy.actor], settings.lr or LEARNING_RATE_FACTOR * policy.hyper.lr)]
        )

    def run_epoch(self, seed: int, number: int) -> dict[str, float]:
        """Make one pass over the demonstrations, in an order drawn by seed and epoch.

        Returns the mean log-likelihood of a token, in nats. Raises DivergedError if it is not finite.
        """
        order = permutation(seed, WARM_START_ITERATION, number, len(self.examples)).tolist()
        likelihood = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        where = f"policy {self.name!r}, warm start, epoch {number + 1}"
        max_rows = -(-self.batch // rank_and_world_size()[1])
        with translate_out_of_memory(where, self.policy.settings.micro_batch, self.name, max_rows):
            for start in range(0, len(order), self.batch):
                likelihood += self._step([self.examples[i] for i in order[start : start + self.batch]])
        mean = float(sum_over_workers(likelihood)) / sum(len(example.response) for example in self.examples)
        if not math.isfinite(mean):
            raise DivergedError(f"{where}: log_likelihood is not finite")
        return {"log_likelihood": mean}

    def _step(self, minibatch: list[EncodedExample]) -> Tensor:
        """Take one gradient step on all workers' examples and return this worker's sum of log-likelihoods."""
        policy, (rank, workers) = self.policy, rank_and_world_size()
        worker_examples = sorted(minibatch, key=lambda example: -example.length)[rank::workers]
        # All workers make as many passes as the one with the most demonstrations needs.
        max_rows = -(-len(minibatch) // workers)
        size = policy.settings.micro_batch or max_rows
        tokens = sum(len(example.response) for example in minibatch)
        likelihood = torch.zeros((), dtype=torch.float64, device=policy.device)
        self.optimizer.zero_grad(set_to_none=True)
        # Of workers that compute a pass together, one has demonstrations in it.
        joint = policy.joint if policy.settings.micro_batch else 1
        passes = -(-max_rows // size) * joint
        for number in range(passes):
            if passes > 1:
                policy.family.begin_pass(policy.model, number + 1 == passes)
            start = number // joint * size
            part = worker_examples[start : start + size] if number % joint == rank % joint else []
            rows = pad_sequences([example.prompt for example in part], [example.response for example in part])
            prompts, responses, mask = (x.to(policy.device) for x in rows)
            likelihoods = policy.model.evaluate(prompts, responses, mask, need_entropy=False).log_probs.sum()
            backward_over_workers(-likelihoods / tokens)
            likelihood += likelihoods.detach()
        if passes > 1:
            policy.family.end_passes(policy.model)
        clip_gradients([policy.actor], policy.hyper.max_grad_norm)
        self.optimizer.step()
        return likelihood
