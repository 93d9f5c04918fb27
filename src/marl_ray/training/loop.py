"""The loop of every training worker: collect, update, report, checkpoint. It knows no Ray; callers pass callbacks in."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from pettingzoo import ParallelEnv

from marl_ray.config import RunConfig
from marl_ray.envs.copies import make_batch
from marl_ray.envs.registry import make_env
from marl_ray.rollout.actor_critic.collector import Collector, CollectPlan
from marl_ray.rollout.group_spread import GroupSums
from marl_ray.rollout.protocol import BatchCollector, CollectedBatch
from marl_ray.training.checkpoints.loading import load_newest
from marl_ray.training.checkpoints.origin import HOLDS, PLAY, holds_of, play_of
from marl_ray.training.checkpoints.run_state import fresh_state, state_after
from marl_ray.training.checkpoints.saving import CheckpointSaver, Contents
from marl_ray.training.checkpoints.storage import StoredFolder
from marl_ray.training.collectives import gather, worker_mesh, world
from marl_ray.training.costs import CostStats
from marl_ray.training.evaluation.fixed_starts import CONFIRMED, SCORED, Evaluator
from marl_ray.training.evaluation.recent_episodes import RecentEpisodes, cost_stats
from marl_ray.training.evaluation.whole_episodes import gather_episodes
from marl_ray.training.imitation.warm_start import warm_start
from marl_ray.training.run_folder.record import identity_hash
from marl_ray.training.team.assembly import build_team, bundle_writer
from marl_ray.training.team.joint_update import update_team

if TYPE_CHECKING:  # the import takes seconds, and actor-critics do not need it
    from marl_ray.policies.language.token_policy import TokenPolicy
    from marl_ray.rollout.served.collector import Block
    from marl_ray.training.evaluation.benchmarks import RunBenchmark
    from marl_ray.training.team.assembly import EngineOf

UNKNOWN = -1e12
"""Score of weights that were not evaluated; it is below the score of all that were."""
EVALUATIONS = 10
"""Number of evaluations between a run's first and its last. `evaluation.every` overrides it, and TRAINED_PER_EVALUATED
allows fewer."""
TRAINED_PER_EVALUATED = 10
"""Least number of training steps for each step of an evaluation. Playing takes a third to a half of an iteration, so
evaluations take a few percent of a long run's time."""

Metrics = dict[str, float]


class Clock:
    """Seconds spent in named phases since the last reading."""

    def __init__(self, *phases: str) -> None:
        self.started, self.phases = time.perf_counter(), dict.fromkeys(phases, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.phases[name] += time.perf_counter() - before

    def read(self, steps: int) -> Metrics:
        """Return steps per second and each phase's share of the time since the last reading."""
        now = time.perf_counter()
        elapsed = now - self.started
        shares = {f"time/{name}": seconds / elapsed for name, seconds in self.phases.items()}
        self.started, self.phases = now, dict.fromkeys(self.phases, 0.0)
        return {"steps_per_second": steps / elapsed, **shares, "time/other": max(0.0, 1 - sum(shares.values()))}


def beats(score: float, best: float) -> bool:
    """Return True if weights of this score take the place of the best so far.

    Of equal scores the earlier weights stay: nothing shows that later ones are better, and a policy may have collapsed
    since. Where nothing is scored, the newest weights count.
    """
    return score > best or score == best == UNKNOWN


class Run:
    """A run on this worker, an iteration at a time; the process group is up, and every worker makes the same calls."""

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        resume_from: Sequence[StoredFolder],
        emit: Callable[[Metrics], None],
        run_id: str | None = None,
        own_hyper: bool = False,
        engine_of: "EngineOf | None" = None,
        phase: Callable[[str], None] = lambda text: None,
        origin: str | None = None,
        begins: Callable[[int | None], None] = lambda iteration: None,
        say: Callable[[str], None] = lambda line: None,
        best_left: float = math.inf,
    ):
        """The run continues from the first of the checkpoints `resume_from` that is whole, and begins anew if there is
        none in the list; `say` gets a line about each that is damaged. `begins` gets the iteration of its own checkpoint,
        or None, before any row is emitted. `emit` gets the metrics of each epoch of a warm start. With `own_hyper` the
        checkpoint may be of a run with other hyper-parameters: the run takes its weights and optimiser state, and keeps the
        hyper-parameters of this config. `engine_of` makes the language models' engines (see `build_team`). `phase` gets the
        name of each part that begins. `origin` names the checkpoint if another run wrote it (`config.resume_from`).
        `best_left` is the greatest score of a bundle that is left, if a better one may be lost."""
        torch.set_num_threads(config.resources.threads_per_worker)
        self.config = config
        self.rank, workers = world()
        mesh = worker_mesh(device.type, config.resources.replicate)
        mixed = config.resources.mixed_precision
        self.env = make_env(config.env, config.constraints)
        mixed_precision = mixed == "bf16" or (mixed == "auto" and device.type == "cuda")
        phase("loading the models" if config.language else "making the policies")
        self.team = build_team(config, self.env, mesh, mixed_precision, engine_of)
        samples = config.data is None or config.evaluates or bool(config.evaluation.benchmarks)
        if samples and any(policy.generation.engine != "torch" for policy in config.team.values()):
            phase("starting the engines")
            self.team.start()  # before a warm start, which may take hours, and which an engine's refusal would waste
        envs: Mapping[str, Any] | None = None
        self.state = fresh_state(run_id, list(self.team.models))
        self.saver = CheckpointSaver(self.team.learners)
        if resume_from:
            phase("reading the checkpoint")
            self.state, envs = load_newest(resume_from, self.team.learners, own_hyper or origin is not None, say)
            if origin is not None:
                self.state, envs = state_after(config, self.state, envs, origin, run_id, list(self.team.models))
        if resume_from and origin is None:
            self.state["best_score"] = min(self.state["best_score"], best_left)
        begins(self.state["iteration"] if resume_from and origin is None else None)
        warms_up = config.warm_start is not None and not resume_from
        if warms_up and config.language:
            from marl_ray.training.imitation.fine_tuning import fine_tune

            phase("fitting the demonstrations")
            fine_tune(config, self.env, self.team, emit)
        elif warms_up:
            phase("imitating the logged decisions")
            warm_start(config, self.env, self.team, emit)
        data = None
        if config.data is not None:
            from marl_ray.training.team.language import build_data

            data = build_data(config, self.team.agents, self.team.models)
        self.facts = {HOLDS: holds_of(config, self.env, self.team.agents), PLAY: play_of(config)}
        """The facts by which a checkpoint shows which other runs may begin from it."""
        self.collector = build_collector(config, self.env, self.team.agents, self.rank, workers, envs, data)
        self.evaluator = Evaluator(config, self.env, self.team.agents, self.collector)
        self.recent = RecentEpisodes(config, self.state["recent"])
        self.benchmarks = self._read_benchmarks()
        measures = {"evaluation": config.evaluates, "benchmarks": bool(self.benchmarks)}
        self.clock = Clock("rollout", "update", *(name for name, happens in measures.items() if happens))
        self.iteration, self.steps = self.state["iteration"], self.state["steps"]
        self.costs = {name: CostStats(**stats) for name, stats in self.state["costs"].items()}
        self.metrics: Metrics = self.state["metrics"]
        """The metrics of the last iteration."""
        self.fresh = not resume_from or origin is not None
        """True until the run has played its first step."""
        self.evaluated: float | None = None
        """Score of the current weights, if they were evaluated and are not saved yet."""
        self.measured = False
        """True if a benchmark of the current weights was measured that is in no checkpoint yet."""
        self.transcripts: list[dict[str, Any]] = []
        """A few episodes of the last iteration as text, from all workers; empty for actor-critics."""

    @property
    def done(self) -> bool:
        return bool(self.steps >= self.config.train.total_steps)

    @property
    def best(self) -> bool:
        """True if the current weights were evaluated, are not saved yet, and score more than all saved ones."""
        return self.evaluated is not None and beats(self.evaluated, self.state["best_score"])

    @property
    def save_due(self) -> bool:
        """True if the current weights must be saved. A run that goes on from a checkpoint measures no benchmark again."""
        return self.done or self.iteration % self.config.checkpoint.every == 0 or self.best or self.measured

    def begin(self) -> Metrics:
        """Evaluate the weights that training starts from, and measure the benchmarks, if there are any; returns the
        metrics."""
        self.fresh = False
        metrics: Metrics = {}
        if self.config.evaluates:
            metrics, cost = self.evaluate()
            left = self.config.train.total_steps - self.steps
            # Episodes may become shorter as the team learns, and evaluations cheaper, so the first wait is at most half
            # of the run.
            wait = max(left / EVALUATIONS, min(TRAINED_PER_EVALUATED * cost, left / 2))
            self.state["evaluate_at"] = self.steps + wait
        metrics |= self.measure(False)
        if metrics:
            self.metrics = {"iteration": self.iteration, "steps": self.steps} | metrics
            self.clock.read(0)
        return self.metrics

    def step(self, until: int | None = None) -> Metrics:
        """Run one iteration: collect a batch and update the team on it; returns its metrics. The weights are evaluated and
        benchmarks are measured when that is due, at the run's end, and at `until` environment steps."""
        before, self.evaluated = self.steps, None
        with self.clock.phase("rollout"):
            batch = self.collector.collect(self.team.players(), self.iteration)
        ended, running, played = gather_episodes(self.config, batch, self.collector)
        responses = self._response_metrics(batch) if self.config.language else {}
        groups = _group_metrics(self.config, self.collector, list(self.team.learners))
        self.steps += played
        self.costs = cost_stats(self.recent.add(ended, running), self.costs)
        self.team.rest()
        with self.clock.phase("update"):
            losses = update_team(self.config, self.team, batch.trajectories, self.iteration, before, self.costs)
        self.iteration += 1
        evaluated: Metrics = {}
        ends = self.done or (until is not None and self.steps >= until)
        due = self.config.evaluates and self._evaluation_due()
        if due or (self.config.evaluates and ends):
            evaluated, cost = self.evaluate()
            if due:  # an evaluation for another reason does not move the next one that is due
                wait = max(TRAINED_PER_EVALUATED * cost, self.config.train.total_steps / EVALUATIONS)
                self.state["evaluate_at"] = self.steps + wait
        self.state["tokens"] += responses.get("tokens", 0.0)
        self.state["seconds"] += self.clock.phases["rollout"] + self.clock.phases["update"]
        evaluated |= self.measure(ends)
        progress = {"iteration": self.iteration, "steps": self.steps}
        speed = self.clock.read(played)
        if responses:
            # An update reads both kinds of tokens. Responses differ in length, so environment steps per second say
            # little.
            tokens = responses["tokens"] + responses["prompt_tokens"]
            speed["tokens_per_second"] = tokens * speed["steps_per_second"] / max(played, 1)
        self.metrics = progress | losses | self.recent.metrics() | groups | responses | evaluated | speed
        return self.metrics

    def _evaluation_due(self) -> bool:
        every = self.config.evaluation.every
        return bool(self.steps >= self.state["evaluate_at"] if every is None else self.iteration % every == 0)

    def evaluate(self) -> tuple[Metrics, int]:
        """Evaluate the current weights; returns metrics and the steps that were played for them. Every worker takes part.

        If the score is the best so far, the weights are measured again on other episodes, for the metrics `best/...`.
        An evaluation changes nothing that training reads.
        """
        players = self.team.players()
        with self.clock.phase("evaluation"):
            scored = self.evaluator.evaluate(players, SCORED, self.steps)
            self.evaluated = max(scored.score, UNKNOWN)
            metrics, steps = {f"eval/{key}": value for key, value in scored.metrics.items()}, scored.steps
            if self.best:
                confirmed = self.evaluator.evaluate(players, CONFIRMED, self.steps)
                metrics |= {f"best/{key}": value for key, value in confirmed.metrics.items()} | {
                    "best/steps": self.steps
                }
                steps += confirmed.steps
        return metrics, steps

    def measure(self, ends: bool) -> Metrics:
        """Measure the benchmarks that are due, or all where the run `ends`; their metrics, and what training has taken so
        far. Every worker takes part; nothing that training reads changes."""
        due = [benchmark for benchmark in self.benchmarks if ends or benchmark.due(self.iteration)]
        if not due:
            return {}
        from marl_ray.training.evaluation.benchmarks import measure, spent

        with self.clock.phase("benchmarks"):
            metrics = measure(due, self.config.name, self.iteration)
        self.measured = True
        return metrics | spent(self.config, self.state["tokens"], self.state["seconds"])

    def _read_benchmarks(self) -> "list[RunBenchmark]":
        if not self.config.evaluation.benchmarks:
            return []
        from marl_ray.training.evaluation.benchmarks import check_unchanged, read_benchmarks

        models = cast("Mapping[str, TokenPolicy]", self.team.models)
        benchmarks = read_benchmarks(self.config, self.team.agents, models, self.team.engines)
        check_unchanged(benchmarks, self.state["benchmarks"])
        return benchmarks

    def _response_metrics(self, batch: CollectedBatch) -> Metrics:
        """Compute the metrics of all workers' responses, and keep the transcripts."""
        from marl_ray.rollout.text.collector import TextBatch
        from marl_ray.training.team.language import response_metrics

        assert isinstance(batch, TextBatch)
        metrics, self.transcripts = response_metrics(batch)
        return metrics

    def score(self) -> float:
        """The number that chooses the best checkpoint: the score of the evaluation of these weights or, without
        evaluations, of the recent episodes."""
        score = self.evaluated if self.config.evaluates else self.recent.score()
        return UNKNOWN if score is None else max(score, UNKNOWN)

    def save(self, place: StoredFolder | None, published: Callable[[], None] = lambda: None) -> None:
        """Begin to write a checkpoint to `place`, with a bundle if the score is the best so far; rank 0 calls `published`
        when it is complete. Without a place nothing is written. Raises as `CheckpointSaver.wait` does."""
        score = self.score()
        best = beats(score, self.state["best_score"])
        self.state |= {
            "iteration": self.iteration,
            "steps": self.steps,
            "costs": {name: vars(stats) for name, stats in self.costs.items()},
            "recent": self.recent.state(),
            "metrics": self.metrics,
            "best_score": max(score, self.state["best_score"]),
            "run": self.config.name,
            "identity": identity_hash(self.config),
            **self.facts,
        }
        if place is not None:
            self.saver.wait()
            bundle = None
            if best and self.rank == 0:
                bundle = bundle_writer(self.config, self.env, self.team, self.steps, self.metrics, self.state["origin"])
            learners = {name: learner.plain() for name, learner in self.team.learners.items()}
            contents = Contents(dict(self.state), learners, self.collector.snapshot(), score, bundle)
            self.saver.save(place, contents, published)
        self.evaluated, self.measured = None, False

    def close(self) -> None:
        self.saver.wait()
        self.saver.close()
        self.collector.close()
        self.evaluator.close()
        self.env.close()
        self.team.close()


@dataclass(frozen=True)
class Keeping:
    """The way in which a run keeps its checkpoints."""

    place_of: Callable[[int], StoredFolder]
    """Iteration -> the folder of its checkpoint."""
    before: Callable[[], None] = lambda: None
    """Called on every worker before a checkpoint is begun."""
    published: Callable[[], None] = lambda: None
    """Called on rank 0, beside the training, when a checkpoint is complete; it raises nothing."""


def run_worker(
    config: RunConfig,
    device: torch.device,
    resume_from: Sequence[StoredFolder],
    emit: Callable[[Metrics], None],
    keeping: Keeping | None,
    run_id: str | None = None,
    show: Callable[[int, list[dict[str, Any]]], None] = lambda iteration, transcripts: None,
    engine_of: "EngineOf | None" = None,
    phase: Callable[[str], None] = lambda text: None,
    origin: str | None = None,
    begins: Callable[[int | None], None] = lambda iteration: None,
    say: Callable[[str], None] = lambda line: None,
    best_left: float = math.inf,
) -> Metrics:
    """Train to the end on this worker; the process group is up.

    `emit` gets the metrics of each epoch of a warm start, then of each iteration, on rank 0 alone. If `keeping`
    is None, no checkpoint is written. `show` gets transcripts of the iterations that have a checkpoint, before `emit`, on
    rank 0 alone. `phase` gets the name of each part of the run when it begins. `resume_from`, `origin`, `begins`, `say`
    and `best_left` are those of `Run`. Returns the metrics of the last iteration.
    """
    run = Run(config, device, resume_from, emit, run_id, False, engine_of, phase, origin, begins, say, best_left)

    def save() -> None:
        if keeping is None:
            run.save(None)
            return
        keeping.before()
        run.save(keeping.place_of(run.iteration), keeping.published)

    try:
        if run.fresh:
            if config.evaluates or run.benchmarks:
                phase("evaluating before training")
            metrics = run.begin()
            if run.rank == 0 and metrics:
                emit(metrics)
            # A run that is done here asked for a warm start alone. A run that begins from another's checkpoint keeps what it
            # begins with, so that it needs the other no more.
            if run.done or origin is not None or (run.save_due and metrics):
                save()
        elif run.done and run.state["best_score"] == -math.inf:  # all bundles are lost
            if config.evaluates:
                run.evaluate()
            save()
        if not run.done:
            phase(f"training from step {run.steps:,} to {config.train.total_steps:,}")
        while not run.done:
            metrics = run.step()
            if run.rank == 0:
                if run.save_due and run.transcripts:
                    show(run.iteration, run.transcripts)
                emit(metrics)
            if run.save_due:
                save()
    except Exception:
        with suppress(Exception):  # what is being written is complete before the group ends
            run.saver.wait()
        raise
    run.close()
    return run.metrics


def build_collector(
    config: RunConfig,
    env: ParallelEnv,
    agents: dict[str, list[str]],
    rank: int,
    workers: int,
    state: Mapping[str, Any] | None = None,
    data: "Mapping[str, Sequence[Block]] | None" = None,
) -> BatchCollector:
    """Make the collector of one worker's share of the environment copies, or of the run's `data`."""
    own = config.train.env_copies // workers
    copies = range(rank * own, (rank + 1) * own)
    refills = {
        name: config.hyper_of(name).dynamic_sampling for name, policy in config.team.items() if not policy.frozen
    }
    plan = CollectPlan(
        config.train.horizon,
        config.whole_episodes,
        config.train.group_size,
        config.greedy,
        max(refills.values()),
        tuple(name for name, count in refills.items() if count),
        config.branch_turns,
        tuple(name for name in refills if config.spec_of(name).groups),
    )
    if config.language:
        from marl_ray.training.team.language import build_text_collector

        return build_text_collector(config, agents, copies, plan, state, data)
    envs = make_batch(config.env, own, list(agents.values()), config.signals, config.constraints)
    return Collector(env, envs, agents, copies, plan, config.seed, config.signals, state)


def _group_metrics(config: RunConfig, collector: BatchCollector, names: Sequence[str]) -> Metrics:
    """Compute how the members of groups differed, on all workers, for each policy whose algorithm compares groups."""
    compared = [name for name in names if config.spec_of(name).groups and not config.spec_of(name).greedy]
    if not compared:
        return {}
    parts = gather({name: tuple(collector.group_sums[name]) for name in compared})
    metrics: Metrics = {}
    for name in compared:
        sums = sum((GroupSums(*part[name]) for part in parts), GroupSums())
        prefix = "" if len(names) == 1 else f"{name}/"
        metrics |= {prefix + key: value for key, value in sums.metrics().items()}
    return metrics
