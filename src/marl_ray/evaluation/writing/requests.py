"""Requests for samples that the language models of a bundle write, and the file that keeps these samples."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from marl_ray.evaluation.benchmarks import Problem
from marl_ray.evaluation.data_files import SHORT_DIGEST
from marl_ray.evaluation.options import Progress, WritingRequest, no_progress
from marl_ray.evaluation.scoring.results import ResultKey, open_results
from marl_ray.json_types import JsonObject
from marl_ray.stored_files.temporary_files import replace_file

PROMPT_FIELD = "{prompt}"
SAMPLES_FILE, WRITING_FOLDER = "samples.jsonl", "generation"
Job = tuple[Problem, int]
Row = JsonObject


class SampleWriter(Protocol):
    """Writes samples: in this process, or on a cluster."""

    def manifest(self, problems: Sequence[Problem]) -> JsonObject:
        """Return the facts that determine the samples. Raises MarlRayError naming the first prompt that is too long."""

    def write(self, jobs: Sequence[Job]) -> Iterator[list[Row]]:
        """Yield samples as they come, in batches in any order."""


def write_samples(
    source: SampleWriter,
    request: WritingRequest,
    problems: Sequence[Problem],
    facts: JsonObject,
    out: Path | None,
    progress: Progress = no_progress,
) -> tuple[Path, str]:
    """Write the samples that are missing.

    Returns the evaluation's folder with the samples in it, and their description.

    `facts` name benchmark and data. However this ends, written samples stay in the folder, and the same call
    continues there.
    """
    manifest = facts | source.manifest(problems)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    folder = out or Path("runs/evaluations", f"{facts['benchmark']}-{digest[:SHORT_DIGEST]}")
    jobs = [(problem, sample) for problem in problems for sample in range(request.num_samples)]
    with open_results(folder / WRITING_FOLDER, manifest) as written:
        keys: list[ResultKey] = [("sample", problem.task_id, sample) for problem, sample in jobs]
        pending = [job for job, key in zip(jobs, keys, strict=True) if key not in written.rows]
        done = len(jobs) - len(pending)
        progress("answer", done, len(jobs))
        for rows in source.write(pending):
            written.add(rows)
            done += len(rows)
            progress("answer", done, len(jobs))
        lines = [{key: value for key, value in written.rows[key].items() if key != "what"} for key in keys]
    replace_file(folder / SAMPLES_FILE, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return folder, _describe_samples(manifest)


def _describe_samples(manifest: JsonObject) -> str:
    """Return the description of the samples, for the variant of a number."""
    sampling = []
    for name, generation in manifest["generation"].items():
        drawn = "greedy" if manifest["greedy"] else f"temperature {generation['temperature']:g}"
        limits = [
            f"{key} {generation[key]:g}" for key, neutral in (("top_k", 0), ("top_p", 1)) if generation[key] != neutral
        ]
        sampling.append(", ".join([f"{name}: {drawn}", *limits, f"max_tokens {generation['max_tokens']}"]))
    prompt = "" if manifest["prompt"] in (None, PROMPT_FIELD) else f", prompt {manifest['prompt']!r}"
    writer = f"{manifest['writer']} of bundle {manifest['bundle'][:SHORT_DIGEST]}"
    return f"{manifest['answer']}s of {writer}{prompt}, {manifest['num_samples']} a problem ({'; '.join(sampling)})"
