"""The part `epochs` of `gateway.py`: what an act costs once the weights of an experiment have changed."""

import argparse
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.records import load_before
from benchmarks.serving.cluster import (
    Running,
    gateway,
    make_bundles,
    serve_applications,
    short_folder,
    write_observations,
)
from benchmarks.serving.load import wrk
from marl_ray.experiments.lifecycle import Action
from marl_ray.experiments.store.facade import open_stores

STAGES = (0.25, 0.5, 0.75)
"""Weights of the treatment: every change moves a quarter of the units."""
RAMP = {"strategy": "gradual", "stages": STAGES, "min_duration_s": 1e9, "promotion": "manual"}
SESSIONS = (1, 5, 20)
"""Acts of a session."""
NAME = "exp"
FOLLOW_S = 10.0
"""Deadline of an answer, and of the gateway's notice of a new epoch, in seconds."""


def epochs(options: argparse.Namespace, connections: int) -> dict[str, Any]:
    """Measure two gateways side by side in turn, one in its experiment's first epoch and one in its third."""
    rows: list[dict[str, Any]] = []
    with short_folder() as folder:
        bundles = make_bundles(folder / "bundles")
        observations = write_observations(folder / "observations")
        parts = {name: gateway(folder / name, bundles, (NAME,), RAMP) for name in ("first", "third")}
        with serve_applications(parts, optimized=True) as running:
            _advance(parts["third"]["args"]["database"], running["third"], observations)
            for number in range(options.passes):
                for acts in SESSIONS:
                    row: dict[str, Any] = {"acts": acts, "load_before": load_before()}
                    for name in ("first", "third")[:: -1 if number % 2 else 1]:
                        row[name] = _measure_gateway(running[name], options.seconds, connections, observations, acts)
                    rows.append(row)
                    print(row, flush=True)
    return {"rows": rows, "seconds": options.seconds, "connections": connections, "stages": STAGES}


def _advance(database: str, running: Running, observations: Path) -> None:
    """Go two stages on, and wait until the gateway assigns by the last one."""
    stores = open_stores(database)
    for _ in STAGES[1:]:
        record = stores.experiments.read(NAME)
        assert record is not None
        epoch = stores.experiments.change(
            NAME, Action.NEXT_STAGE, epoch=record.epoch, actor="benchmark", reason="ramp"
        ).epoch
    stores.close()
    body = b'{"session_id":"%b","observations":%b}' % (b"%d", observations.read_bytes().splitlines()[0])
    deadline = time.monotonic() + FOLLOW_S
    for number in range(1_000_000):
        answer = httpx.post(running.act, content=body % number, timeout=FOLLOW_S).json()
        if answer["epoch"] == epoch:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the gateway is at epoch {answer['epoch']}, expected {epoch} within {FOLLOW_S:g} s")


def _measure_gateway(
    running: Running, seconds: int, connections: int, observations: Path, acts: int
) -> dict[str, float]:
    wrk(running.act, 1, connections, observations, acts)
    cpu = running.cpu_seconds()
    rate = wrk(running.act, seconds, connections, observations, acts)
    used = running.cpu_seconds() - cpu
    return {"rps": rate["rps"], "cpu_us": 1e6 * used / rate["requests"], "p99_ms": rate["p99_ms"]}
