"""A trial on Ray Tune: one leg of one configuration, with all its seeds.

One worker on a CPU trains inside the trial's own process. More workers, or a GPU, are a Ray Train worker group that
this process drives (it needs no CPU itself). Either way the leg begins from the trial's folder and writes every
checkpoint to it, so a leg whose process is lost continues from its last checkpoint.
"""

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from marl_ray.config import RunConfig
from marl_ray.config.sweep import MetricConfig
from marl_ray.config.tracking import TRACKING_URI
from marl_ray.errors import MarlRayError, describe_error
from marl_ray.json_types import JsonObject
from marl_ray.training.machines.working_folder import enter_folder
from marl_ray.tuning.folder import trial_folder
from marl_ray.tuning.running.trial_files import CHECKPOINT_PREFIX, Leg, TrialWriter, is_takeover, read_state
from marl_ray.tuning.running.trial_seeds import load_seeds, never_reported_error, run_leg
from marl_ray.tuning.running.worker_group import run_in_workers

MIN_REPORT_INTERVAL_S = 0.5
"""Minimum number of seconds between two reports to Tune: each is a round trip to the sweep's driver."""
ERROR_FILE = "error.txt"
"""File in a trial's folder with the traceback of the error that ended it."""


def run_trial(config: JsonObject) -> None:
    """Train a trial as far as its leg goes; this is the function that Tune runs.

    Errors become results; Tune retries only crashed processes.
    """
    import ray.tune

    leg = Leg(**config["leg"])
    sender = _ReportSender(ray.tune.report)
    try:
        result = run_trial_leg(leg, sender.add, sender.say)
    except Exception as error:  # whatever a part of the trial raises, the other trials continue
        result = {"status": "failed", "error": describe_error(error) + _write_traceback(leg, error)}
    sender.flush({"leg_result": result | _progress_of(leg)})


def trial_function(sweep: str) -> Callable[[JsonObject], None]:
    """Return `run_trial` under the sweep's name, which the Ray dashboard shows.

    A process serves one trial after another, so a trial's own name would soon be wrong.
    """

    def train_trial(config: JsonObject) -> None:
        run_trial(config)

    train_trial.__name__ = f"{sweep}-trial"
    return train_trial


def run_trial_leg(leg: Leg, emit: Callable[[dict[str, float]], None], say: Callable[[str], None]) -> JsonObject:
    """Run a leg and return its result. `emit` gets each row of metrics, and `say` lines for the user.

    Raises MarlRayError if the run never reports a metric of the sweep.
    """
    os.environ[TRACKING_URI] = leg.tracking_uri
    enter_folder(leg.folder)
    folder = trial_folder(leg.storage, leg.sweep, leg.number)
    configs = [RunConfig.model_validate(data) for data in leg.configs]
    writer = TrialWriter(folder, configs[0].checkpoint.newest, [config.seed for config in configs], emit, say)
    ended = (run_in_workers if leg.has_worker_group else _run_in_process)(leg, configs, writer)
    objectives, done = ended["objectives"], ended["done"]
    if objectives is None and done:
        reported = {key for row in writer.rows for key in row}
        metric = next((m["name"] for m in leg.metrics if m["name"] not in reported), leg.metrics[0]["name"])
        raise never_reported_error(metric, reported)
    status = "finished" if done else "waiting"
    return {"status": status, "error": "", "objectives": objectives}


def _run_in_process(leg: Leg, configs: list[RunConfig], writer: TrialWriter) -> JsonObject:
    """Run the leg in this process."""
    from marl_ray.training.single_process import process_group

    def keep(local: Path) -> None:
        name = f"{writer.place}/{CHECKPOINT_PREFIX}{seeds.iteration:06d}"
        writer.folder.upload(local, name)
        writer.note_checkpoint(name, seeds.steps, seeds.played)

    metrics = [MetricConfig.model_validate(metric) for metric in leg.metrics]
    with process_group():
        seeds, start, damages = load_seeds(writer.folder, writer.starts, configs, metrics, torch.device("cpu"))
        with seeds.close_after():  # this process may serve another trial
            if start is not None and damages:
                writer.return_to(start, seeds.iteration, seeds.steps, damages)
            writer.note_begin(seeds.played)
            run_leg(seeds, leg.until, writer.add_row, keep, start is not None and is_takeover(start))
        return {"objectives": seeds.objectives(), "done": seeds.done}


def _write_traceback(leg: Leg, error: Exception) -> str:
    """Write the traceback to the trial's folder, and return where it is, in words.

    The text is empty for the product's own errors, which say all there is to say.
    """
    if isinstance(error, MarlRayError) and error.__cause__ is None:
        return ""
    try:
        trial_folder(leg.storage, leg.sweep, leg.number).write(
            ERROR_FILE, "".join(traceback.format_exception(error)).encode()
        )
    except (OSError, MarlRayError):
        return ""
    return f" (traceback in trials/{leg.number:04d}/{ERROR_FILE})"


class _ReportSender:
    """Collects rows and reports several at once to Tune, and lines for the user as they come."""

    def __init__(self, report: Callable[[JsonObject], None]):
        self.report, self.sent = report, time.monotonic()
        self.rows: list[dict[str, float]] = []

    def add(self, row: dict[str, float]) -> None:
        self.rows.append(row)
        if time.monotonic() - self.sent > MIN_REPORT_INTERVAL_S:
            self.flush()

    def say(self, line: str) -> None:
        self.flush({"line": line})

    def flush(self, more: JsonObject | None = None) -> None:
        if self.rows or more:
            last = self.rows[-1] if self.rows else {}
            # Values travel as text: Tune flattens nested results, and its loggers take a list for numbers.
            packed = {key: json.dumps(value) for key, value in ({"rows": self.rows} | (more or {})).items()}
            self.report(last | packed)
            self.rows, self.sent = [], time.monotonic()


def _progress_of(leg: Leg) -> JsonObject:
    """Return the progress of the trial as its folder records it; empty if it cannot be read."""
    try:
        state = read_state(trial_folder(leg.storage, leg.sweep, leg.number))
    except (OSError, MarlRayError):
        return {}
    return {"steps": state.steps, "played": state.played, "seconds": state.seconds}
