"""Build a run on this worker: its environment, team, collector and evaluations, with its state from the run's start."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from pettingzoo import ParallelEnv

from marl_ray.closing import Unfinished
from marl_ray.config import RunConfig, engine_spec
from marl_ray.envs.registry import make_env
from marl_ray.json_types import JsonMapping
from marl_ray.policies.agreement import run_on_all_workers
from marl_ray.rollout.actor_critic.collector import ActorCriticCollector
from marl_ray.rollout.actor_critic.overlap import OverlappedCollector
from marl_ray.rollout.protocol import BatchCollector
from marl_ray.training.checkpoints.origin import play_facts, state_layouts
from marl_ray.training.checkpoints.run_state import RunState
from marl_ray.training.checkpoints.saving import CheckpointSaver
from marl_ray.training.collectives import rank_and_world_size, worker_mesh
from marl_ray.training.evaluation.fixed_starts import Evaluator
from marl_ray.training.evaluation.recent_episodes import RecentEpisodes
from marl_ray.training.loop.callbacks import SILENT_CALLBACKS, RunCallbacks
from marl_ray.training.loop.collection import build_collector
from marl_ray.training.loop.families.run_family import run_family
from marl_ray.training.loop.reports.phase_clock import PhaseClock
from marl_ray.training.loop.reports.torch_reasons import TorchReasons
from marl_ray.training.loop.run import Run
from marl_ray.training.loop.run_evaluation import RunEvaluation, read_run_benchmarks
from marl_ray.training.loop.start import START_ANEW, RunStart, load_start
from marl_ray.training.run_folder.record import identity_hash
from marl_ray.training.team.assembly import build_team
from marl_ray.training.team.members import Team

if TYPE_CHECKING:  # the import takes seconds, and actor-critics do not need it
    from marl_ray.training.team.members import EngineOf


def build_run(
    config: RunConfig,
    device: torch.device,
    start: RunStart = START_ANEW,
    callbacks: RunCallbacks = SILENT_CALLBACKS,
    engine_of: "EngineOf | None" = None,
) -> Run:
    """Build a run on this worker; `engine_of` makes the engines (see `build_team`).

    The process group is up, and every worker makes the same call. Where a part cannot be made, the parts before it are
    closed, and its error is raised. With several workers the team stays open, and its engines end with their process.
    """
    torch.set_num_threads(config.resources.threads_per_worker)
    with Unfinished() as unfinished:
        # An environment may read a file of tasks, which may fail on one worker alone; all workers raise the error then.
        env = run_on_all_workers(lambda: unfinished.keep(make_env(config.env, config.constraints)))
        callbacks.phase(run_family(config).BUILDING)
        team = _build_team(config, env, device, engine_of)
        if dist.get_world_size() == 1:  # else other workers may sample from its engines, see `Run.abandon`
            unfinished.keep(team)
        _limit_passes(team, start, callbacks)
        torch_reasons = TorchReasons(config, device, callbacks.say)
        torch_reasons.say_new(team.learners)
        _start_engines(config, team, callbacks)
        saver = unfinished.keep(CheckpointSaver(team.learners))
        state, snapshot = _load_state(config, env, team, start, callbacks)
        callbacks.begin(state.iteration if start.is_continuation else None)
        data = run_on_all_workers(lambda: run_family(config).read_data(config, team))
        collector = run_on_all_workers(
            lambda: unfinished.keep(_build_collector(config, env, team, state, snapshot, data))
        )
        recent = RecentEpisodes(config, state.recent)
        evaluation = unfinished.keep(_build_evaluation(config, env, team, collector, recent, state))
        unfinished.pop_all()
    return Run(config, env, team, collector, saver, evaluation, recent, evaluation.clock, torch_reasons, state)


def _build_team(config: RunConfig, env: ParallelEnv, device: torch.device, engine_of: "EngineOf | None") -> Team:
    """Build the team on the mesh of all workers."""
    resources, mixed = config.resources, config.resources.mixed_precision
    mesh = worker_mesh(device.type, resources.replicate, resources.context, resources.tensor)
    mixed_precision = mixed == "bf16" or (mixed == "auto" and device.type == "cuda")
    return build_team(config, env, mesh, mixed_precision, engine_of)


def _limit_passes(team: Team, start: RunStart, callbacks: RunCallbacks) -> None:
    """Make the passes smaller that had no room on a worker before this start, and say so."""
    for name, rows in start.pass_sizes.items():
        if name in team.learners:
            team.learners[name].limit_passes(rows)
            if dist.get_rank() == 0:
                callbacks.say(f"policy {name!r}: passes of at most {rows}, because larger ones ran out of memory")


def _start_engines(config: RunConfig, team: Team, callbacks: RunCallbacks) -> None:
    """Start the engines if the run samples from them and one of them needs it."""
    samples = config.data is None or config.has_evaluations or bool(config.evaluation.benchmarks)
    if samples and any(engine_spec(policy.generation.engine).needs_start for policy in config.team.values()):
        callbacks.phase("starting the engines")
        team.start()  # before a warm start, which may take hours, and which an engine's refusal would waste


def _load_state(
    config: RunConfig, env: ParallelEnv, team: Team, start: RunStart, callbacks: RunCallbacks
) -> tuple[RunState, JsonMapping | None]:
    """Load the weights of the run's start into the team; return the run's state, and the collector's snapshot if any."""
    state, snapshot = load_start(config, team, start, callbacks)
    state = replace(
        state,
        run=config.name,
        identity=identity_hash(config),
        layouts=state_layouts(config, env, team.agents),
        play_facts=play_facts(config),
    )
    return state, snapshot


def _build_collector(
    config: RunConfig, env: ParallelEnv, team: Team, state: RunState, snapshot: JsonMapping | None, data: Any
) -> BatchCollector:
    """Return the collector of this worker's share, which continues from a `snapshot` if there is one."""
    rank, workers = rank_and_world_size()
    collector = build_collector(config, env, team.agents, rank, workers, snapshot, data)
    if not config.train.overlap:
        return collector

    def plays_last() -> bool:
        """Return True if the run ends with the batch after the steps so far."""
        return bool(state.steps + config.batch_steps >= config.train.total_steps)

    return OverlappedCollector(cast(ActorCriticCollector, collector), plays_last, snapshot)


def _build_evaluation(
    config: RunConfig,
    env: ParallelEnv,
    team: Team,
    collector: BatchCollector,
    recent: RecentEpisodes,
    state: RunState,
) -> RunEvaluation:
    """Return the part that evaluates and benchmarks the team's weights, with the clock of the run."""
    starts = run_family(config).starts_player(config, env, team.agents, collector)
    benchmarks = run_on_all_workers(lambda: read_run_benchmarks(config, team, state))
    measures = {"evaluation": config.has_evaluations, "benchmarks": bool(benchmarks)}
    clock = PhaseClock("rollout", "update", *(name for name, happens in measures.items() if happens))
    return RunEvaluation(config, team.players, Evaluator(config, starts), benchmarks, recent, clock, state)
