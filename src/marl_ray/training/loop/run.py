"""A run on one worker, an iteration at a time."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from marl_ray.config import RunConfig, engine_spec
from marl_ray.envs.registry import make_env
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.policies.agreement import run_on_all_workers
from marl_ray.rollout.actor_critic.collector import ActorCriticCollector
from marl_ray.rollout.actor_critic.overlap import OverlappedCollector
from marl_ray.rollout.protocol import BatchCollector
from marl_ray.training.checkpoints.origin import play_facts, state_layouts
from marl_ray.training.checkpoints.saving import CheckpointContents, CheckpointSaver
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.collectives import rank_and_world_size, worker_mesh
from marl_ray.training.errors import DivergedError
from marl_ray.training.evaluation.fixed_starts import Evaluator
from marl_ray.training.evaluation.recent_episodes import RecentEpisodes, cost_stats
from marl_ray.training.evaluation.whole_episodes import gather_episodes
from marl_ray.training.loop.callbacks import SILENT_CALLBACKS, Metrics, RunCallbacks
from marl_ray.training.loop.collection import build_collector, group_metrics
from marl_ray.training.loop.families.run_family import run_family
from marl_ray.training.loop.not_finite import describe_not_finite
from marl_ray.training.loop.phase_clock import PhaseClock
from marl_ray.training.loop.run_evaluation import RunEvaluation, is_better, read_run_benchmarks
from marl_ray.training.loop.start import START_ANEW, RunStart, load_start
from marl_ray.training.run_folder.record import identity_hash
from marl_ray.training.team.assembly import build_team, bundle_writer
from marl_ray.training.team.joint_update import update_team
from marl_ray.training.team.members import Team

if TYPE_CHECKING:  # the import takes seconds, and actor-critics do not need it
    from marl_ray.training.team.members import EngineOf


class Closable(Protocol):
    """A part of a run that holds something until it is closed, such as processes, files or threads."""

    def close(self) -> None:
        """Release what the part holds."""


ClosablePart = TypeVar("ClosablePart", bound=Closable)


class Run:
    """A run on this worker, an iteration at a time.

    The process group is up, and every worker makes the same calls.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        start: RunStart = START_ANEW,
        callbacks: RunCallbacks = SILENT_CALLBACKS,
        engine_of: "EngineOf | None" = None,
    ):
        """Build the environment, the team and the collector; `engine_of` makes the engines (see `build_team`).

        Where a part cannot be made, those before it are closed, and its error is raised.
        """
        self._team_parts, self._own_parts = contextlib.ExitStack(), contextlib.ExitStack()
        """These close the engines, and all other parts of this worker, the last that was opened first."""
        with contextlib.ExitStack() as unfinished:
            unfinished.callback(self.abandon)  # what was opened until a part could not be made
            torch.set_num_threads(config.resources.threads_per_worker)
            self.config, self.device = config, device
            self.family = run_family(config)
            self.rank, workers = rank_and_world_size()
            self._say, self._torch_reasons = callbacks.say, dict[str, str]()
            # It may read a file of tasks.
            self.env = run_on_all_workers(lambda: self._open(make_env(config.env, config.constraints)))
            self.team = self._start_team(device, start, callbacks, engine_of)
            self.saver = self._open(CheckpointSaver(self.team.learners))
            state, snapshot = load_start(config, self.team, start, callbacks)
            self.state = replace(
                state,
                run=config.name,
                identity=identity_hash(config),
                layouts=state_layouts(config, self.env, self.team.agents),
                play_facts=play_facts(config),
            )
            """The state in the last checkpoint, but `tokens` and `seconds` are those of now."""
            callbacks.begin(self.state.iteration if start.is_continuation else None)
            data = run_on_all_workers(lambda: self.family.read_data(config, self.team))
            self.collector = run_on_all_workers(lambda: self._open(self._make_collector(workers, snapshot, data)))
            starts = self.family.starts_player(config, self.env, self.team.agents, self.collector)
            self.recent = RecentEpisodes(config, self.state.recent)
            benchmarks = run_on_all_workers(lambda: read_run_benchmarks(config, self.team, self.state))
            measures = {"evaluation": config.has_evaluations, "benchmarks": bool(benchmarks)}
            self.clock = PhaseClock("rollout", "update", *(name for name, happens in measures.items() if happens))
            self.evaluation = self._open(
                RunEvaluation(
                    config,
                    self.team.players,
                    Evaluator(config, starts),
                    benchmarks,
                    self.recent,
                    self.clock,
                    self.state,
                )
            )
            self.iteration, self.steps, self.costs = self.state.iteration, self.state.steps, dict(self.state.costs)
            self.metrics: Metrics = self.state.metrics
            """The metrics of the last iteration."""
            self.imitation_due = config.warm_start is not None and not start.checkpoints
            """True if the run imitates before it evaluates or plays; see `imitate`."""
            self.has_begun = start.is_continuation
            """True if `begin` was called, here or before the checkpoint that the run continues from."""
            self.transcripts: list[JsonObject] = []
            """A few episodes of the last iteration as text, from all workers; empty for actor-critics."""
            self._own_parts.callback(self.saver.wait)
            unfinished.pop_all()

    def _open(self, part: ClosablePart) -> ClosablePart:
        """Return a part that was just made, which is closed with the run."""
        return self._own_parts.enter_context(contextlib.closing(part))

    def _make_collector(self, workers: int, snapshot: JsonMapping | None, data: Any) -> BatchCollector:
        """Return the collector of this worker's share, which continues from a `snapshot` if there is one."""
        collector = build_collector(self.config, self.env, self.team.agents, self.rank, workers, snapshot, data)
        if not self.config.train.overlap:
            return collector
        return OverlappedCollector(cast(ActorCriticCollector, collector), self._plays_last, snapshot)

    def _start_team(
        self, device: torch.device, start: RunStart, callbacks: RunCallbacks, engine_of: "EngineOf | None"
    ) -> Team:
        """Build the team, with its engines running if the run samples from them."""
        config, mixed = self.config, self.config.resources.mixed_precision
        resources = config.resources
        mesh = worker_mesh(device.type, resources.replicate, resources.context, resources.tensor)
        mixed_precision = mixed == "bf16" or (mixed == "auto" and device.type == "cuda")
        callbacks.phase(self.family.BUILDING)
        team = self._team_parts.enter_context(
            contextlib.closing(build_team(config, self.env, mesh, mixed_precision, engine_of))
        )
        for name, rows in start.pass_sizes.items():
            if name in team.learners:
                team.learners[name].limit_passes(rows)
                if self.rank == 0:
                    callbacks.say(f"policy {name!r}: passes of at most {rows}, because larger ones ran out of memory")
        self._say_reason_for_torch(team)
        samples = config.data is None or config.has_evaluations or bool(config.evaluation.benchmarks)
        if samples and any(engine_spec(policy.generation.engine).needs_start for policy in config.team.values()):
            callbacks.phase("starting the engines")
            team.start()  # before a warm start, which may take hours, and which an engine's refusal would waste
        return team

    def _say_reason_for_torch(self, team: Team) -> None:
        """Say of each small policy on a CPU that learns by torch, once, why it does not learn by compiled code."""
        if self.rank or self.config.has_language_models or self.device.type != "cpu":
            return
        for name, learner in team.learners.items():
            if learner.reason_for_torch != self._torch_reasons.get(name, ""):
                self._torch_reasons[name] = learner.reason_for_torch
                self._say(f"policy {name!r}: torch takes its gradient steps, because {learner.reason_for_torch}")

    @property
    def done(self) -> bool:
        """True if the run has played all its environment steps."""
        return bool(self.steps >= self.config.train.total_steps)

    def _plays_last(self) -> bool:
        """Return True if the run ends with the batch after the steps so far."""
        return bool(self.steps + self.config.batch_steps >= self.config.train.total_steps)

    @property
    def save_due(self) -> bool:
        """True if the current weights must be saved."""
        return self.done or self.iteration % self.config.checkpoint.every == 0 or self.evaluation.save_due

    def imitate(self, callbacks: RunCallbacks = SILENT_CALLBACKS) -> None:
        """Imitate the data of the config's `warm_start`, which may take hours, if the run begins with new weights."""
        if self.imitation_due:
            self.imitation_due = False
            self.family.imitate(self.config, self.env, self.team, callbacks)

    def begin(self) -> Metrics:
        """Evaluate the weights that training starts from, and measure the benchmarks, if there are any.

        Returns the metrics.
        """
        self.has_begun = True
        metrics = self.evaluation.begin(self.steps, self.state)
        if metrics:
            self.metrics = {"iteration": self.iteration, "steps": self.steps} | metrics
            self.clock.read(0)
        return self.metrics

    def step(self, until: int | None = None) -> Metrics:
        """Run one iteration: collect a batch and update the team on it; return its metrics.

        The weights are evaluated and benchmarks are measured when that is due, at the run's end, and at
        `until` environment steps. Raises DivergedError naming the policy and the number that is not finite.
        """
        before = self.steps
        with self.clock.phase("rollout"):
            batch = self.collector.collect(self.team.players(), self.iteration)
        ended, running, played = gather_episodes(self.config, batch, self.collector)
        responses, self.transcripts = self.family.response_metrics(batch)
        groups = group_metrics(self.config, self.collector, list(self.team.learners))
        self.steps += played
        self.costs = cost_stats(self.recent.add(ended, running), self.costs)
        self.team.sleep_engines()
        self.saver.wait_for_copy()
        with self.clock.phase("update"):
            try:
                losses = update_team(self.config, self.team, batch.trajectories, self.iteration, before, self.costs)
            except DivergedError as error:  # of all workers together
                place = describe_not_finite(
                    self.config, self.team.agents, batch, self.collector.running_episodes, self.iteration
                )
                raise DivergedError(f"{error}{place}") from error
        self._say_reason_for_torch(self.team)
        self.iteration += 1
        ends = self.done or (until is not None and self.steps >= until)
        self.state.tokens += responses.get("tokens", 0.0)
        self.state.seconds += self.clock.phases["rollout"] + self.clock.phases["update"]
        evaluated = self.evaluation.step(self.iteration, self.steps, ends, self.state)
        progress = {"iteration": self.iteration, "steps": self.steps}
        speed = self.clock.read(played)
        if responses:
            # An update reads both kinds of tokens. Responses differ in length, so environment steps per second say
            # little.
            tokens = responses["tokens"] + responses["prompt_tokens"]
            speed["tokens_per_second"] = tokens * speed["steps_per_second"] / max(played, 1)
        self.metrics = progress | losses | self.recent.metrics() | groups | responses | evaluated | speed
        return self.metrics

    def save(self, place: StoredFolder | None, published: Callable[[], None] = lambda: None) -> None:
        """Begin to write a checkpoint to `place`, with a bundle if the score is the best so far.

        Rank 0 calls `published` when it is complete. Without a place nothing is written. Raises as
        `CheckpointSaver.wait` does.
        """
        score = self.evaluation.score()
        best = is_better(score, self.evaluation.best_score)
        self.evaluation.best_score = max(score, self.evaluation.best_score)
        self.state = replace(
            self.state,
            iteration=self.iteration,
            steps=self.steps,
            costs=self.costs,
            recent=self.recent.state(),
            metrics=self.metrics,
            best_score=self.evaluation.best_score,
            evaluate_at=self.evaluation.evaluate_at,
        )
        if place is not None:
            self.saver.wait()
            bundle: Callable[..., None] | None = None
            if best and self.rank == 0:
                bundle = bundle_writer(self.config, self.env, self.team, self.steps, self.metrics, self.state.origin)
            elif best:
                bundle = self.team.weights_sender()
            learners = {name: learner.to_plain() for name, learner in self.team.learners.items()}
            contents = CheckpointContents(replace(self.state), learners, self.collector.snapshot(), score, bundle)
            self.saver.save(place, contents, published)
        self.evaluation.note_saved()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and close all parts. Raises what one of them raised."""
        with self._team_parts, self._own_parts:
            pass

    def abandon(self) -> None:
        """Close the parts that are open after an error; raise nothing.

        Engines that other workers sample from end with their process: closed here, they would give those workers a
        second error, which might be reported in place of the first.
        """
        team_parts = self._team_parts if rank_and_world_size()[1] == 1 else contextlib.nullcontext()
        with contextlib.suppress(Exception), team_parts, self._own_parts:
            pass
