"""Cost of the driver of a sweep for each trial: all of its own code, on legs that report rows without training."""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.tuning.folder import ROWS_FILE, Folder, trial_folder
from marl_ray.tuning.records import SweepRecords, identity_of
from marl_ray.tuning.records_file import LeasedRecords, RecordsFile
from marl_ray.tuning.reporting.tracking import SweepTracking
from marl_ray.tuning.running.ray_tune import Searcher
from marl_ray.tuning.running.sweep_legs import SweepLegs
from marl_ray.tuning.running.trial_files import Leg
from marl_ray.tuning.search.plan import SweepPlan

SEEDS, SLOTS, TOTAL = 3, 64, 40_960
"""Seeds of a trial, trials at a time, and environment steps of a trial."""
REPORTS, METRICS = 4, 40
"""Reports of a leg, a row each, and metrics of a row."""
SPACE = {
    "algorithm": {"choice": ["ippo", "mappo"]},
    "hyper.lr": {"loguniform": [1e-4, 1e-2]},
    "hyper.entropy_coef": {"uniform": [0.0, 0.05]},
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "asha": {"kind": "asha", "grace": 2560, "reduction": 4},
    "fifo": {"kind": "fifo"},
}


class NoTracker:
    """Stands in for MLflow, whose cost `trackers.py` measures."""

    def __init__(self, uri: str):
        self.uri, self.parent = uri, self

    def log(self, *arguments: Any) -> None: ...

    flush = end = report = close = log


class Stopwatch:
    """Wall and CPU seconds spent in named functions."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.inside: set[str] = set()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def time_call(*args: Any, **keys: Any) -> Any:
            if name in self.inside:
                return function(*args, **keys)
            self.inside.add(name)
            began, used = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **keys)
            finally:
                self.inside.remove(name)
                self.wall[name] += time.perf_counter() - began
                self.cpu[name] += time.thread_time() - used

        return time_call

    def watch(self, thing: Any, name: str, *methods: str) -> None:
        for method in methods:
            setattr(thing, method, self.around(name, getattr(thing, method)))


def simulate_sweep(storage: Path, trials: int, scheduler: str, search: str = "random") -> dict[str, float]:
    """Return what a sweep of this many trials costs the driver, in milliseconds of CPU for each trial.

    They are those of the driver's loop (`own`, of which `scheduler`, `save` and `legs` are parts; `wall` is its wall
    time), of the search beside it, and of the report at the end. Ray is up, because the driver asks it for capacity.
    Tune, MLflow, the processes of the trials and their training are left out: legs are handed out and end in the order
    of their start, SLOTS at a time.
    """
    config = parse_config(
        SweepConfig,
        {
            "name": f"{scheduler}-{search}-{trials}",
            "run": {"env": {"id": "gridworld"}, "train": {"total_steps": TOTAL}, "tracking": {"progress": False}},
            "space": SPACE,
            "search": search,
            "scheduler": SCHEDULERS[scheduler],
            "budget": {"trials": trials},
            "seeds": SEEDS,
            "storage": str(storage),
        },
    )
    records = SweepRecords(config.name, config.resolve(), identity_of(config))
    folder = Folder(config.storage, config.name)
    lease = Lease(folder.filesystem, folder.path, f"sweep {config.name!r}")  # it is not taken: nobody else is there
    tracking = SweepTracking(config, folder, records, lease.owns)
    tracking.mlflow_runs.close("finished")
    tracking.mlflow_runs = NoTracker(tracking.mlflow_runs.parent.uri)  # type: ignore[assignment]
    saved = LeasedRecords(RecordsFile(folder, records), lease, tracking.warn)
    legs = SweepLegs(config, records, SweepPlan(config, records), saved, tracking, lease.lost)
    clock = Stopwatch()
    clock.watch(legs.plan.search, "search", "propose", "tell")
    clock.watch(legs.plan.scheduler, "scheduler", "decide")
    clock.watch(legs, "legs", "_begin_leg")
    clock.watch(legs.needs, "legs", "check")
    clock.watch(saved, "save", "save")
    searcher = Searcher(legs)
    running: list[tuple[str, Leg]] = []
    rng, started = np.random.default_rng(0), 0
    clock.watch(searcher, "loop", "suggest", "on_trial_complete")
    clock.watch(legs, "loop", "note_rows")
    clock.watch(saved, "report", "save_all")
    clock.watch(tracking, "report", "close")
    while True:
        while len(running) < SLOTS:
            suggested = searcher.suggest(str(started))
            if not isinstance(suggested, dict):
                break
            running.append((str(started), Leg(**suggested["leg"])))
            started += 1
        if not running:
            break
        trial_id, leg = running.pop(0)
        rows = _rows(rng, config, records.trials[leg.number].steps, leg.until or TOTAL)
        ending: dict[str, Any] = {"status": "finished" if leg.until is None else "waiting", "error": ""}
        ending |= {"objectives": [rows[-1]["objective/eval/return"]], "seconds": 10.0}
        ending |= {"steps": rows[-1]["steps"], "played": rows[-1]["played"]}
        result = json.dumps(ending)
        trial_folder(config.storage, config.name, leg.number).open_lines(ROWS_FILE).append(
            map(json.dumps, rows), durable=True
        )
        for row in rows:
            legs.note_rows(leg, json.loads(json.dumps([row])))
        searcher.on_trial_complete(trial_id, {"leg_result": result})
    assert len(records.trials) == trials and all(record.state == "ended" for record in records.trials)
    saved.save_all()
    tracking.close()
    cpu = {part: clock.cpu[part] for part in ("search", "scheduler", "save", "legs", "report")}
    times = cpu | {"own": clock.cpu["loop"] - clock.cpu["search"], "wall": clock.wall["loop"] - clock.wall["search"]}
    return {name: 1000 * value / trials for name, value in times.items()} | {"legs_run": started}


def _rows(rng: np.random.Generator, config: SweepConfig, begin: int, end: int) -> list[dict[str, float]]:
    rows = []
    for at in np.linspace(begin, end, REPORTS + 1)[1:]:
        row = {f"metric_{k}": float(value) for k, value in enumerate(rng.normal(size=METRICS))}
        row |= {f"seed-{seed}/eval/return": float(rng.normal()) for seed in config.seeds}
        steps = int(at)
        row |= {"objective/eval/return": float(rng.normal()), "iteration": steps // 512, "steps": steps}
        rows.append(row | {"played": steps * SEEDS, "exploits": 0})
    return rows
