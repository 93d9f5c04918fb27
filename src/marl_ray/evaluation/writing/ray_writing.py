"""Write samples on a Ray cluster, with an actor on every GPU or, without GPUs, on every node with CPUs."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from marl_ray.errors import MarlRayError, one_line
from marl_ray.evaluation.benchmarks import Problem, benchmark
from marl_ray.evaluation.options import WritingRequest
from marl_ray.evaluation.ray_batches import result_of, run_batches
from marl_ray.evaluation.writing.requests import Job, Row, SampleWriter
from marl_ray.evaluation.writing.writer import CPU_BATCH, GPU_BATCH, Writer
from marl_ray.json_types import JsonObject

START_S = 600.0
"""Seconds that an actor may take to get a place, and to read the bundle and its models."""
PATIENCE_S = 60.0
"""Seconds to wait for the other actors when the first is ready."""
BATCH_S = 7200.0
"""Seconds that an actor may take to write one batch."""


class WriterNode:
    """Writes batches on its node; becomes a Ray actor."""

    def __init__(self, request: WritingRequest, name: str) -> None:
        self._request_and_name = request, name
        self._writer: Writer | None = None

    def manifest(self, problems: Sequence[Problem]) -> JsonObject:
        """Return the manifest that `SampleWriter.manifest` describes; reads the bundle."""
        return self._writer_of_node().manifest(problems)

    def rows(self, jobs: Sequence[Job]) -> list[Row]:
        """Return the samples of a batch."""
        return self._writer_of_node().rows(jobs)

    def _writer_of_node(self) -> Writer:
        # The bundle is not read in __init__, because an error there would only kill the actor, without a message.
        if self._writer is None:
            request, name = self._request_and_name
            self._writer = Writer(request, benchmark(name))
        return self._writer


@contextmanager
def ray_writers(request: WritingRequest, name: str) -> Iterator[SampleWriter]:
    """Make the writers for a benchmark, given its name, on the Ray that this process is connected to."""
    import ray

    source = _RayWriters(request, name)
    try:
        yield source
    finally:
        for actor in source.actors:
            ray.kill(actor)


class _RayWriters:
    def __init__(self, request: WritingRequest, name: str) -> None:
        import ray

        remote: Any = ray.remote(WriterNode)
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        sizes = [{"num_gpus": 1, "num_cpus": 1}] * gpus or [{"num_cpus": count} for count in cpus if count]
        if not sizes:
            raise MarlRayError("evaluate: the cluster has neither GPUs nor CPUs")
        self.actors = [remote.options(**size).remote(request, name) for size in sizes]
        self.batch = GPU_BATCH if gpus else CPU_BATCH
        self._ready: dict[str, Any] = {}
        """Name in messages -> an actor that has read the bundle."""

    def manifest(self, problems: Sequence[Problem]) -> JsonObject:
        """Return the manifest that `SampleWriter.manifest` describes.

        Actors that have died, or that still wait for a place when this returns, get no work. Raises MarlRayError if none is
        ready in time.
        """
        import ray
        from ray.exceptions import RayActorError

        calls = {actor.manifest.remote(problems): actor for actor in self.actors}
        waiting, deadline = list(calls), time.monotonic() + START_S
        manifest: JsonObject = {}
        death: RayActorError | None = None
        self._ready = {}
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                break
            try:
                manifest = result_of(done[0])
            except RayActorError as error:
                death = error
                continue
            if not self._ready:
                deadline = time.monotonic() + PATIENCE_S
            self._ready[f"actor {len(self._ready) + 1}"] = calls[done[0]]
        if self._ready:
            return manifest
        if death is not None and not waiting:
            raise MarlRayError(f"evaluate: every actor died while it read the bundle: {one_line(death)}") from death
        raise MarlRayError(f"evaluate: no actor had a place and read the bundle within {START_S:.0f} s")

    def write(self, jobs: Sequence[Job]) -> Iterator[list[Row]]:
        """Yield samples as `SampleWriter.write` does. Raises MarlRayError as `run_batches` does."""
        size = max(1, min(self.batch, math.ceil(len(jobs) / max(1, len(self._ready)))))
        return run_batches(
            dict(self._ready),
            jobs,
            size,
            lambda actor, batch: actor.rows.remote(batch),
            in_flight=1,
            limit_s=lambda batch: BATCH_S,
            task_of=lambda job: job[0].task_id,
            done="written",
        )
