"""A run on one worker, an iteration at a time."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from pettingzoo import ParallelEnv

from marl_ray.config import RunConfig
from marl_ray.json_types import JsonObject
from marl_ray.rollout.protocol import BatchCollector, CollectedBatch
from marl_ray.training.checkpoints.run_state import RunState
from marl_ray.training.checkpoints.saving import CheckpointContents, CheckpointSaver
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.errors import DivergedError
from marl_ray.training.evaluation.recent_episodes import RecentEpisodes, cost_stats
from marl_ray.training.loop.callbacks import SILENT_CALLBACKS, Metrics, RunCallbacks
from marl_ray.training.loop.collection import gather_batch
from marl_ray.training.loop.families.run_family import run_family
from marl_ray.training.loop.reports.not_finite import describe_not_finite
from marl_ray.training.loop.reports.phase_clock import PhaseClock
from marl_ray.training.loop.reports.torch_reasons import TorchReasons
from marl_ray.training.loop.run_evaluation import RunEvaluation, is_better
from marl_ray.training.team.assembly import bundle_writer
from marl_ray.training.team.joint_update import update_team
from marl_ray.training.team.members import Team


@dataclass
class Run:
    """A run on this worker, an iteration at a time; `build_run` makes one.

    The process group is up, and every worker makes the same calls.
    """

    config: RunConfig
    env: ParallelEnv
    """An environment that has the agents and their spaces; the collector plays copies of its own."""
    team: Team
    collector: BatchCollector
    saver: CheckpointSaver
    evaluation: RunEvaluation
    recent: RecentEpisodes
    """The last training episodes, which give the training curve and the score of a run without evaluations."""
    clock: PhaseClock
    torch_reasons: TorchReasons
    state: RunState
    """The state of now, but for `recent`, which is that of the last checkpoint; `evaluation` has the same object."""
    transcripts: list[JsonObject] = field(default_factory=list)
    """A few episodes of the last iteration as text, from all workers; empty for actor-critics."""

    @property
    def done(self) -> bool:
        """True if the run has played all its environment steps."""
        return bool(self.state.steps >= self.config.train.total_steps)

    @property
    def save_due(self) -> bool:
        """True if the current weights must be saved."""
        return self.done or self.state.iteration % self.config.checkpoint.every == 0 or self.evaluation.save_due

    def imitate(self, callbacks: RunCallbacks = SILENT_CALLBACKS) -> None:
        """Imitate the data of the config's `warm_start`, if it has one, which may take hours.

        A run that begins with new weights does so before it evaluates or plays.
        """
        if self.config.warm_start is not None:
            run_family(self.config).imitate(self.config, self.env, self.team, callbacks)

    def begin(self) -> Metrics:
        """Evaluate the weights that training starts from, and measure the benchmarks, if there are any.

        Returns the metrics.
        """
        metrics = self.evaluation.begin()
        if metrics:
            self.state.metrics = self._progress() | metrics
            self.clock.read(0)
        return self.state.metrics

    def step(self, until: int | None = None) -> Metrics:
        """Run one iteration: collect a batch and update the team on it; return its metrics.

        The weights are evaluated and benchmarks are measured when that is due, at the run's end, and at
        `until` environment steps. Raises DivergedError naming the policy and the number that is not finite.
        """
        state, steps_before = self.state, self.state.steps
        with self.clock.phase("rollout"):
            batch = self.collector.collect(self.team.players(), state.iteration)
        gathered = gather_batch(self.config, self.collector, batch, list(self.team.learners))
        self.transcripts = gathered.transcripts
        state.steps += gathered.steps
        state.costs = cost_stats(self.recent.add(gathered.ended, gathered.running), state.costs)
        self.team.sleep_engines()
        self.saver.wait_for_copy()
        with self.clock.phase("update"):
            losses = self._update(batch, steps_before)
        self.torch_reasons.say_new(self.team.learners)
        state.iteration += 1
        state.tokens += gathered.responses.get("tokens", 0.0)
        state.seconds += self.clock.phases["rollout"] + self.clock.phases["update"]
        evaluated = self.evaluation.step(self.done or (until is not None and state.steps >= until))
        played = self.recent.metrics() | gathered.groups | gathered.responses
        speed = gathered.speed(self.clock.read(gathered.steps))
        state.metrics = self._progress() | losses | played | evaluated | speed
        return state.metrics

    def _progress(self) -> Metrics:
        return {"iteration": self.state.iteration, "steps": self.state.steps}

    def _update(self, batch: CollectedBatch, steps_before: int) -> Metrics:
        """Update the team on a batch, before which the run had played `steps_before` steps; return its metrics.

        Raises DivergedError, which names the reward or the cost of the batch that is not finite, if one is not.
        """
        state = self.state
        try:
            return update_team(self.config, self.team, batch.trajectories, state.iteration, steps_before, state.costs)
        except DivergedError as error:  # of all workers together
            running = self.collector.running_episodes
            place = describe_not_finite(self.config, self.team.agents, batch, running, state.iteration)
            raise DivergedError(f"{error}{place}") from error

    def save(self, place: StoredFolder | None, published: Callable[[], None] = lambda: None) -> None:
        """Begin to write a checkpoint to `place`, with a bundle if the score is the best so far.

        Rank 0 calls `published` when it is complete. Without a place nothing is written. Raises as
        `CheckpointSaver.wait` does.
        """
        state, score = self.state, self.evaluation.score()
        best = is_better(score, state.best_score)
        state.best_score, state.recent = max(score, state.best_score), self.recent.state()
        if place is not None:
            self.saver.wait()
            bundle: Callable[..., None] | None = None
            if best and dist.get_rank() == 0:
                bundle = bundle_writer(self.config, self.env, self.team, state.steps, state.metrics, state.origin)
            elif best:
                bundle = self.team.weights_sender()
            learners = {name: learner.to_plain() for name, learner in self.team.learners.items()}
            contents = CheckpointContents(replace(state), learners, self.collector.snapshot(), score, bundle)
            self.saver.save(place, contents, published)
        self.evaluation.note_saved()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and close all parts. Raises what one of them raised."""
        with contextlib.closing(self.team):
            self._close_own_parts()

    def abandon(self) -> None:
        """Close the parts that are open after an error; raise nothing.

        Engines that other workers sample from end with their process: closed here, they would give those workers a
        second error, which might be reported in place of the first.
        """
        is_alone = dist.get_world_size() == 1
        with contextlib.suppress(Exception), contextlib.closing(self.team) if is_alone else contextlib.nullcontext():
            self._close_own_parts()

    def _close_own_parts(self) -> None:
        """Close all parts but the team, which may have engines that other workers sample from."""
        with (
            contextlib.closing(self.env),
            contextlib.closing(self.saver),
            contextlib.closing(self.collector),
            contextlib.closing(self.evaluation),
        ):
            self.saver.wait()
