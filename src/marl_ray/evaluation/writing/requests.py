"""Samples that the language models of a bundle write for a benchmark's problems: asked for, kept, named."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from marl_ray.evaluation.benchmarks import Kind, Problem
from marl_ray.evaluation.scoring.results import open_results, write_whole

PROMPT = "{prompt}"
SAMPLES, FOLDER = "samples.jsonl", "generation"
Job = tuple[Problem, int]
Row = dict[str, Any]


@dataclass(frozen=True)
class WritingRequest:
    """What is to be written, and by whom."""

    bundle: str
    """A folder, or `models:/name/version`."""
    tracking_uri: str | None = None
    agent: str | None = None
    """Whose policy answers alone; None: the team, or the only policy."""
    samples: int = 1
    """Per problem."""
    seed: int = 0
    greedy: bool = False
    temperature: float | None = None
    """Of the bundle's generation where it is None, and so is max_tokens."""
    max_tokens: int | None = None
    answer: Kind | None = None
    """What the answer is; None: what the policy was trained to write, see `Writer`."""
    prompt: str | None = None
    """What is read, with {prompt} in it."""


class SampleWriter(Protocol):
    """Who writes: this process, or a cluster's."""

    def manifest(self, problems: Sequence[Problem]) -> dict[str, Any]:
        """What makes the samples those samples. Raises MarlRayError naming the first prompt that is too long."""

    def write(self, jobs: Sequence[Job]) -> Iterator[list[Row]]:
        """Samples as they come, in batches in any order."""


def generate(
    source: SampleWriter,
    request: WritingRequest,
    problems: Sequence[Problem],
    of: dict[str, Any],
    out: Path | None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[Path, str]:
    """Write what is not written yet; the evaluation's folder, with the samples in it, and what they are called.

    `of` names benchmark and data. However this ends, what was written stays in the folder, and the same call goes on there.
    """
    manifest = of | source.manifest(problems)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    folder = out or Path("runs/evaluations", f"{of['benchmark']}-{digest[:12]}")
    jobs = [(problem, sample) for problem in problems for sample in range(request.samples)]
    with open_results(folder / FOLDER, manifest) as written:
        keys = [("sample", problem.task_id, sample) for problem, sample in jobs]
        missing = [job for job, key in zip(jobs, keys, strict=True) if key not in written.rows]
        done = len(jobs) - len(missing)
        progress("answer", done, len(jobs))
        for rows in source.write(missing):
            written.add(rows)
            done += len(rows)
            progress("answer", done, len(jobs))
        lines = [{key: value for key, value in written.rows[key].items() if key != "what"} for key in keys]
    write_whole(folder / SAMPLES, "".join(json.dumps(line) + "\n" for line in lines))
    return folder, _name(manifest)


def _name(manifest: dict[str, Any]) -> str:
    """What the samples are, for the variant of a number."""
    sampling = []
    for name, own in manifest["generation"].items():
        drawn = "greedy" if manifest["greedy"] else f"temperature {own['temperature']:g}"
        limits = [f"{key} {own[key]:g}" for key, off in (("top_k", 0), ("top_p", 1)) if own[key] != off]
        sampling.append(", ".join([f"{name}: {drawn}", *limits, f"max_tokens {own['max_tokens']}"]))
    prompt = "" if manifest["prompt"] in (None, PROMPT) else f", prompt {manifest['prompt']!r}"
    who = f"{manifest['writer']} of bundle {manifest['bundle'][:12]}"
    return f"{manifest['answer']}s of {who}{prompt}, {manifest['num_samples']} a problem ({'; '.join(sampling)})"
