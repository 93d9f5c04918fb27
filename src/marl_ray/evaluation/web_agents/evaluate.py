"""Measure an agent on a benchmark in a browser."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from marl_ray.config import EnvConfig
from marl_ray.envs.registry import make_env
from marl_ray.envs.text.base import COSTS
from marl_ray.envs.web.browser.chromium import close_shared_chromium
from marl_ray.envs.web.environment import BrowserEnv
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.evaluation.data_files import SHORT_DIGEST
from marl_ray.evaluation.options import Progress, WebRequest, no_progress
from marl_ray.evaluation.scoring.evaluate import choose_ks
from marl_ray.evaluation.scoring.report import MARKDOWN_FILE, REPORT_FILE
from marl_ray.evaluation.scoring.results import open_results
from marl_ray.evaluation.web_agents.playing import WebJob, play_jobs
from marl_ray.evaluation.web_agents.protocol import WebAgent, WebBenchmark
from marl_ray.evaluation.web_agents.reporting import web_markdown, web_report
from marl_ray.evaluation.web_agents.scripted import ExpertAgent, RandomAgent
from marl_ray.evaluation.web_agents.trained import ElementAgent, LanguageAgent
from marl_ray.evaluation.writing.authors import authors_of
from marl_ray.extensions import import_reference, make_from_options
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.stored_files.record_files import read_bytes
from marl_ray.stored_files.temporary_files import replace_file

EXPERT, RANDOM = "expert", "random"
SPLITS = {"test": ("test",), "train": ("train",), "all": ("train", "test")}
"""Split of a request -> the splits of the environment whose tasks it has."""
NEUTRAL_OPTIONS = ("record", "traces")
"""Options of the environment that change no result."""
RESERVED_OPTIONS = ("cost", "reward", "keep_pages")
"""Options of the environment that the evaluation sets itself."""


def evaluate_web(
    benchmark: WebBenchmark, request: WebRequest, progress: Progress = no_progress
) -> tuple[dict[str, object], Path]:
    """Play what is not played yet, write the report, and return it and its folder.

    However this ends, all finished episodes stay in the folder, and the same call continues from there.
    Raises FieldError naming the option, or MarlRayError.
    """
    if request.split not in SPLITS:
        raise FieldError("split", f"expected one of {', '.join(SPLITS)}, got {request.split!r}")
    refused = [name for name in request.env if name in RESERVED_OPTIONS]
    if refused:
        raise FieldError("env", f"{refused[0]} is set by the evaluation")
    agent = make_agent(request)
    with ExitStack() as cleanup:
        cleanup.callback(close_shared_chromium)
        kwargs = {**benchmark.kwargs, **request.env}
        envs = [
            cleanup.enter_context(_browser(benchmark, kwargs))
            for _ in range(request.workers or len(os.sched_getaffinity(0)))
        ]
        jobs = _jobs(envs[0], request)
        ks = choose_ks({job.task_id: request.num_samples for job in jobs}, request.k, benchmark.ks)
        manifest = _manifest(benchmark, request, kwargs, agent, len(jobs))
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        folder = request.out or Path("runs/evaluations", f"{benchmark.name}-{digest[:SHORT_DIGEST]}")
        with open_results(folder, manifest) as results:
            pending = [job for job in jobs if ("sample", job.task_id, job.sample) not in results.rows]
            done = len(jobs) - len(pending)
            progress("episode", done, len(jobs))
            for rows in play_jobs(envs, agent, pending):
                results.add(rows)
                done += len(rows)
                progress("episode", done, len(jobs))
            report = web_report(manifest, [job.task_id for job in jobs], list(results.rows.values()), ks)
    replace_file(folder / REPORT_FILE, (json.dumps(report, indent=2) + "\n").encode())
    replace_file(folder / MARKDOWN_FILE, web_markdown(report).encode())
    return report, folder


def make_agent(request: WebRequest) -> WebAgent:
    """Return the agent that the request names. Raises FieldError naming the option that does not fit."""
    scripted = request.policy in (EXPERT, RANDOM) or (":" in request.policy and "/" not in request.policy)
    options = [name for name, value in request.overrides.items() if value is not None]
    options += [name for name, value in (("agent", request.agent), ("greedy", request.greedy)) if value]
    if scripted and options:
        raise FieldError(options[0], "expected with a bundle")
    if request.greedy and request.num_samples > 1:
        raise FieldError(
            "num_samples", f"expected 1, since greedy episodes are all the same, got {request.num_samples}"
        )
    if request.policy == EXPERT:
        return ExpertAgent()
    if request.policy == RANDOM:
        return RandomAgent(request.seed)
    if scripted:
        return _agent_by_reference(request.policy)
    bundle = load_bundle(request.policy, request.tracking_uri)
    names = list(bundle.agents)
    agent = request.agent or names[0]
    if agent not in names or (request.agent is None and len(set(bundle.agents.values())) > 1):
        raise FieldError("agent", f"expected one of {', '.join(names)}, got {request.agent}")
    if not isinstance(bundle, ActorCriticBundle):
        return LanguageAgent(authors_of(bundle), agent, request.overrides, request.seed, request.greedy)
    if options := [name for name, value in request.overrides.items() if value is not None]:
        raise FieldError(options[0], "expected with language models, not with actor-critics")
    return ElementAgent(bundle, agent, request.seed, request.greedy)


def _agent_by_reference(reference: str) -> WebAgent:
    try:
        agent: WebAgent = make_from_options(reference, import_reference(reference), {})
    except MarlRayError as error:
        raise FieldError("policy", str(error)) from error
    missing = [name for name in ("manifest", "act") if not callable(getattr(agent, name, None))]
    if missing:
        raise FieldError("policy", f"{reference} returned {type(agent).__name__}, which has no {missing[0]}()")
    return agent


def _browser(benchmark: WebBenchmark, kwargs: Mapping[str, object]) -> BrowserEnv:
    try:
        env = make_env(EnvConfig(id=benchmark.env_id, kwargs={**kwargs, "cost": list(COSTS)}))
    except MarlRayError as error:
        place, _, message = str(error).partition(": ")
        if not place.startswith("env.kwargs"):  # neither the options nor one of them
            raise FieldError("env", str(error)) from error
        raise FieldError(place.replace("env.kwargs", "env"), message) from error
    if not isinstance(env, BrowserEnv):
        raise MarlRayError(f"benchmark: {benchmark.env_id} is of type {type(env).__name__}, expected a BrowserEnv")
    return env


def _jobs(env: BrowserEnv, request: WebRequest) -> list[WebJob]:
    counts = {"train": env.tasks, "test": env.held_out}
    jobs = []
    for split in SPLITS[request.split]:
        for index in range(counts[split]):
            task = env.task_at(index, split)
            name = task.task_id if request.split != "all" else f"{split}/{task.task_id}"
            group = getattr(task, "page", "") or " and ".join(getattr(task, "sites", ())) or "all tasks"
            jobs += [WebJob(split, index, name, group, sample) for sample in range(request.num_samples)]
    if not jobs:
        raise FieldError("split", f"{request.split} has no tasks")
    return jobs


def _manifest(
    benchmark: WebBenchmark, request: WebRequest, kwargs: JsonMapping, agent: WebAgent, episodes: int
) -> JsonObject:
    agent_facts = dict(agent.manifest())
    options = {name: value for name, value in kwargs.items() if name not in NEUTRAL_OPTIONS}
    files = [kwargs[name] for name in ("data", "test_data") if kwargs.get(name)]
    digests = [hashlib.sha256(read_bytes(path)).hexdigest() for path in files]
    tasks = f"file of sha256 {digests[0][:SHORT_DIGEST]}" if digests else "its own tasks"
    return {
        "benchmark": benchmark.name,
        "variant": f"{benchmark.title}, {tasks}, split {request.split}, {episodes} episodes; {agent_facts['agent']}",
        "env": {"id": benchmark.env_id, "kwargs": options},
        "data_sha256": digests,
        "split": request.split,
        "num_samples": request.num_samples,
        **agent_facts,
    }
