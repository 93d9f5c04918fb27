"""The runs of `pass_rates.py`: warm starts, one seed of training in this process, and held-out tasks."""

import time
from pathlib import Path
from typing import Any, NamedTuple

from marl_ray.config import RunConfig
from marl_ray.config.load import parse_config

LEVELS = [1, 2]
SAMPLES = 4
"""Sampled episodes per held-out task, before and after training."""
EVERY = 10
"""Iterations between points of a curve, with one sampled episode per held-out task."""
HELD_OUT = 256
"""Held-out tasks of two levels, at most: all that there are."""
CONTEXT = 1024
"""A repair's prompt may quote a long error. Tokens that are not used cost nothing."""


class Kind(NamedTuple):
    """The team of a run, its episodes, and the demonstrations before reinforcement learning."""

    env: dict[str, Any]
    agents: tuple[str, ...]
    turns: int
    """Turns of all agents in an episode, at most."""
    likely: float
    """Mean log-likelihood of a demonstrated token of the generator, in nats, at which the warm start ends: a model that is
    right in about a third of its answers."""


KINDS = {
    "program": Kind({"turns": 1, "reviewer": False}, ("generator",), 1, -0.11),
    "alone": Kind({"turns": 2, "reviewer": False, "mistakes": 0.5}, ("generator",), 2, -0.11),
    "team": Kind({"turns": 2, "reviewer": True, "mistakes": 0.5}, ("generator", "reviewer"), 3, -0.11),
}
"""One program and no second try; a generator that repairs its program; a generator and its reviewer."""
TOKENS = {"generator": 40, "reviewer": 24}
DEMONSTRATIONS, BATCH = 640, 32
"""Demonstrations of the warm start, and how many make a gradient step."""
STAGES = ((10, 1.5e-3), *[(1, 1e-3)] * 8)
"""Epochs and learning rate of the warm start's parts; it ends with the first part that reaches `likely`."""
COPIES, GROUP = 256, 8
"""Episodes of a batch, and how many of them begin alike and are compared."""
HYPER: dict[str, Any] = {"lr": 2e-4, "epochs": 1, "minibatches": 4, "max_grad_norm": 1.0, "entropy_coef": 0.0}
"""Settings of every algorithm: four gradient steps per batch."""
OWN: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {},
    "dapo": {"dynamic_sampling": 1},
    "ppo": {"gamma": 1.0, "gae_lambda": 1.0, "critic_lr": 1e-3},
}
"""DAPO plays groups again whose members score the same, and once is enough here; PPO's only reward is at the end."""


class Job(NamedTuple):
    """One run of reinforcement learning."""

    kind: str
    algorithm: str
    seed: int
    bundle: str
    iterations: int
    tokens: int | None = None
    """Sampled tokens after which it ends, before `iterations` do."""
    engine: str = "torch"


def run_config(
    kind: str, seed: int, bundle: str | None = None, iterations: int = 0, engine: str = "torch", **more: Any
) -> RunConfig:
    """Return the config of a run that begins with the weights of `bundle`; `more` are keys of it."""
    of_kind = KINDS[kind]
    team = {
        name: {
            "agents": [name],
            "model": {"preset": "tiny-1m", "context": CONTEXT},
            "generation": {"max_tokens": TOKENS[name], "engine": engine},
            "bundle": bundle,
        }
        for name in of_kind.agents
    }
    steps = iterations * COPIES * of_kind.turns
    data = {
        "name": f"language-{kind}",
        "seed": seed,
        "env": {"id": "code_team", "kwargs": {"levels": LEVELS, **of_kind.env}},
        "team": team,
        "train": {"total_steps": steps, "env_copies": COPIES, "horizon": of_kind.turns, "group_size": GROUP},
    }
    return parse_config(RunConfig, {"algorithm": "grpo"} | data | more)


def warm_start(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """Fine-tune with supervision alone, and leave a bundle that the runs of this seed begin with."""
    import torch

    from marl_ray.training.single_process import train_alone

    torch.set_num_threads(1)
    started, likelihoods, bundle = time.perf_counter(), [], None
    for part, (epochs, lr) in enumerate(STAGES):
        tuned = {"data": "environment", "count": DEMONSTRATIONS, "epochs": epochs, "lr": lr, "batch": BATCH}
        # Another seed: other demonstrations, in another order.
        rows = train_alone(run_config(kind, seed + 1000 * part, bundle, warm_start=tuned), folder / str(part))
        bundle = str(folder / str(part) / "0" / "bundle")
        likelihoods += [_likelihood(row) for row in rows if "warm_start/epoch" in row]
        if likelihoods[-1] >= KINDS[kind].likely:
            break
    return {
        "kind": kind,
        "seed": seed,
        "bundle": bundle,
        "log_likelihood": likelihoods,
        "seconds": time.perf_counter() - started,
    }


def _likelihood(row: dict[str, float]) -> float:
    """Return the log-likelihood of the generator, whose name stands before it where the generator is not alone."""
    name = "warm_start/log_likelihood"
    return row[name] if name in row else row[f"generator/{name}"]


def train(job: Job) -> dict[str, Any]:
    """Train one seed, with the held-out tasks before, during and after."""
    import torch

    from marl_ray.training.loop.assembly import build_run
    from marl_ray.training.single_process import process_group

    torch.set_num_threads(1)
    started = time.perf_counter()
    hyper = HYPER | OWN[job.algorithm]
    config = run_config(
        job.kind, job.seed, job.bundle, job.iterations, job.engine, algorithm=job.algorithm, hyper=hyper
    )
    with process_group():
        run = build_run(config, torch.device("cpu"))
        programs = _time_programs(run.collector)
        before = play_held_out(run, SAMPLES)
        curve, rows, gaps, tokens = [[0, 0, _mean(before["passes"])]], [], [], 0
        print(f"{job.kind} {job.algorithm} seed {job.seed} begins: held-out {curve[0][2]:.1%}", flush=True)
        run.clock.read(0)
        while run.state.iteration < job.iterations and (job.tokens is None or tokens < job.tokens):
            programs.clear()
            began = time.perf_counter()
            row = run.step()
            seconds, tokens = time.perf_counter() - began, tokens + int(row["tokens"])
            rollout, update = seconds * row["time/rollout"], seconds * row["time/update"]
            # Seconds of all, sampling (and what else a rollout does), programs, update; tokens; passes in training.
            rows.append([seconds, rollout - sum(programs), sum(programs), update, row["tokens"], row["env/pass"]])
            gaps += [value for name, value in row.items() if name.endswith("engine/log_prob_gap")]
            if run.state.iteration % EVERY == 0:
                curve.append([run.state.iteration, tokens, _mean(play_held_out(run, 1)["passes"])])
                run.clock.read(0)
                print(
                    f"{job.kind} {job.algorithm} seed {job.seed}, iteration {run.state.iteration}: {tokens} tokens, "
                    f"training {row['env/pass']:.1%}, held-out {curve[-1][2]:.1%}, {seconds:.1f} s",
                    flush=True,
                )
        after = play_held_out(run, SAMPLES)
        curve.append([run.state.iteration, tokens, _mean(after["passes"])])
        run.close()
    return {
        "kind": job.kind,
        "algorithm": job.algorithm,
        "engine": job.engine,
        "seed": job.seed,
        "before": before,
        "after": after,
        "curve": curve,
        "iterations": rows,
        "tokens": tokens,
        "log_prob_gap": max(gaps, default=None),
        "seconds": time.perf_counter() - started,
    }


def play_held_out(run: Any, samples: int) -> dict[str, Any]:
    """Sample every held-out task: pass@1 and that of the first program by task; tokens of a mean episode."""
    env = run.collector.copies[0].env.unwrapped
    tasks = range(min(HELD_OUT, env.held_out))
    episodes = run.collector.play(run.team.players(), tasks, samples=samples)
    by_task = [episodes[i * samples :][:samples] for i in tasks]
    return {
        "passes": [_mean([episode.metrics["pass"] for episode in task_episodes]) for task_episodes in by_task],
        "first": [_mean([episode.metrics["first"] for episode in task_episodes]) for task_episodes in by_task],
        "tokens": _mean([float(episode.tokens) for episode in episodes]),
        "turns": _mean([float(episode.length) for episode in episodes]),
    }


def _time_programs(collector: Any) -> list[float]:
    """Return a list that gets the seconds of every wave of resets and steps of the environments."""
    times: list[float] = []
    plain = collector.run_side_by_side

    def time_wave(*arguments: Any) -> None:
        began = time.perf_counter()
        plain(*arguments)
        times.append(time.perf_counter() - began)

    collector.run_side_by_side = time_wave
    return times


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
