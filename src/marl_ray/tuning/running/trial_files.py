"""The files of a trial, which the one process that works on it writes, and the leg that it is to run."""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from marl_ray.config.mistakes.wording import first_mistake
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonObject
from marl_ray.tuning.folder import ROWS_FILE, Folder, read_rows

STATE_FILE = "trial.json"
"""File in a trial's folder with its state."""
TAKEOVER_PREFIX = "exploit-"
"""Beginning of the name of a checkpoint that was taken over from another trial."""
ATTEMPT_PREFIX, CHECKPOINT_PREFIX = "attempt-", "checkpoint-"
"""Beginnings of the names of a process's folder, and of the checkpoints in it."""


@dataclass(frozen=True)
class Leg:
    """A part of a trial, from a checkpoint (or the beginning) to the next decision point."""

    sweep: str
    storage: str
    number: int
    leg: int
    """Number of the leg within its trial, from 1."""
    configs: list[JsonObject]
    """The run config of each seed."""
    metrics: list[JsonObject]
    until: int | None
    """Environment steps at which the leg ends; None for the end of training."""
    has_worker_group: bool
    """True if the leg trains on a worker group of its own."""
    use_gpu: bool
    cpus: float
    """CPUs per worker."""
    tracking_uri: str
    """Address of the MLflow server in which bundles are looked up."""
    folder: str = ""
    """Working folder of the sweep's driver; relative paths in the configs count from it."""

    @property
    def name(self) -> str:
        """The name of the leg in Tune: the trial's number, in four digits, and the leg's."""
        return f"{self.number:04d}-{self.leg}"


@dataclass(frozen=True)
class Takeover:
    """A trial takes over the weights of another trial."""

    at: int
    """Decision point: environment steps that every seed has played."""
    donor: int
    """Number of the trial whose weights they are."""
    values: JsonObject
    """The new values of the trial that takes over."""


@with_config(ConfigDict(extra="forbid"))
@dataclass
class TrialState:
    """Progress of a trial, stored as `trial.json`."""

    checkpoints: list[str] = field(default_factory=list)
    """Folders of the checkpoints, the newest last."""
    attempts: int = 0
    """Number of processes that have worked on the trial; each names its folder by it."""
    steps: int = 0
    """Environment steps that every seed had played at the newest checkpoint."""
    played: int = 0
    """Environment steps that this trial has played, all seeds together."""
    seconds: float = 0.0
    """Wall time in seconds."""
    exploits: list[Takeover] = field(default_factory=list)
    """The takeovers of other trials, the newest last."""


_STATE_READER = TypeAdapter(TrialState)
"""Checks the types of a stored state."""


def read_state(folder: Folder) -> TrialState:
    """Return the state of a trial as its folder holds it; a new one where it holds none.

    Raises OSError, and MarlRayError, which names the file, for one of something else.
    """
    try:
        return _STATE_READER.validate_json(folder.read(STATE_FILE), strict=True)
    except FileNotFoundError:
        return TrialState()
    except ValidationError as error:
        raise MarlRayError(f"{folder.uri}/{STATE_FILE} is not the state of a trial: {first_mistake(error)}") from None


def write_state(folder: Folder, state: TrialState) -> None:
    """Replace the state of a trial in its folder."""
    folder.write_json(STATE_FILE, asdict(state))


def is_takeover(name: str) -> bool:
    """Return True if the checkpoint of this name was written with other hyper-parameters, by another trial."""
    return name.startswith(TAKEOVER_PREFIX)


def take_over(folder: Folder, donor: Folder, takeover: Takeover) -> bool:
    """Copy the donor's newest checkpoint and its bundles into a trial's folder.

    Returns False if a driver that was killed has done so before. Raises OSError, and MarlRayError where a folder's state
    is damaged or the donor has no checkpoint.
    """
    state = read_state(folder)
    if any(exploit.at == takeover.at for exploit in state.exploits):
        return False
    checkpoints = read_state(donor).checkpoints
    if not checkpoints:
        raise MarlRayError(f"{donor.uri}/{STATE_FILE} names no checkpoint")
    name = f"{TAKEOVER_PREFIX}{takeover.at}"
    folder.copy_from(donor, checkpoints[-1], name)
    if donor.exists("bundles"):
        folder.copy_from(donor, "bundles", "bundles")
    state.checkpoints.append(name)
    state.exploits.append(takeover)
    write_state(folder, state)
    return True


class TrialWriter:
    """Writes the rows, checkpoints, bundles and times of a trial's process to the trial's folder."""

    def __init__(
        self,
        folder: Folder,
        keep: int,
        seeds: list[int],
        emit: Callable[[dict[str, float]], None],
        say: Callable[[str], None],
    ):
        """`emit` gets each row, and `say` lines for the user, both on the thread that calls the writer."""
        self.folder = folder
        self.keep = keep
        self.seeds = seeds
        self.emit, self.say = emit, say
        self.state = read_state(folder)
        self.state.attempts += 1
        write_state(folder, self.state)
        self.place = f"{ATTEMPT_PREFIX}{self.state.attempts}"
        """Folder that this process alone writes to: a predecessor may still be writing to its own."""
        self._remove_unnamed()
        self.rows = read_rows(folder)
        self.file, self.written = folder.open_lines(ROWS_FILE), len(self.rows)
        self.played_before: int | None = None
        """Environment steps of the checkpoint that this trial has not played itself: they are a donor's."""
        self._seconds_before, self._began_at = self.state.seconds, time.monotonic()

    def _remove_unnamed(self) -> None:
        """Remove the checkpoints that earlier processes were writing or removing when they died."""
        for place in [name for name in self.folder.folders() if name.startswith(ATTEMPT_PREFIX)]:
            for name in self.folder.folders(place):
                if name.startswith(CHECKPOINT_PREFIX) and f"{place}/{name}" not in self.state.checkpoints:
                    with contextlib.suppress(OSError):  # a predecessor still writes it; or the next process removes it
                        self.folder.remove(f"{place}/{name}")

    @property
    def starts(self) -> list[str]:
        """Checkpoints from which the trial may continue, the newest first.

        Those before a takeover are left out, because they are of other weights.
        """
        names = self.state.checkpoints
        taken = [place for place, name in enumerate(names) if is_takeover(name)]
        return names[taken[-1] if taken else 0 :][::-1]

    def return_to(self, name: str, iteration: int, steps: int, damages: Sequence[str]) -> None:
        """Continue from checkpoint `name` of this iteration and so many steps.

        Those after it are damaged, as the lines of `damages` say, and are removed.
        """
        for damage in damages:
            self.say(f"{damage}; the trial continues from {self.folder.uri}/{name}")
        names, exploits = self.state.checkpoints, len(self.state.exploits)
        last = names.index(name) + 1
        remaining = [row for row in self.rows if row["exploits"] < exploits or row["iteration"] <= iteration]
        self.state.checkpoints, self.state.steps = names[:last], steps
        self.state.played = int(remaining[-1]["played"]) if remaining else 0
        write_state(self.folder, self.state)
        for damaged in names[last:]:
            self.folder.remove(damaged)

    def note_begin(self, played: int) -> None:
        """Note the environment steps that all seeds had played when this process began.

        Only the first call counts.
        """
        if self.played_before is None:
            self.played_before = played - self.state.played

    def add_row(self, row: dict[str, float]) -> None:
        """Add a row; it replaces rows from its iteration on, which a restart has played again."""
        exploits = len(self.state.exploits)
        row = row | {"played": row["played"] - (self.played_before or 0), "exploits": exploits}
        while self.rows and self.rows[-1]["iteration"] >= row["iteration"] and self.rows[-1]["exploits"] == exploits:
            self.rows.pop()
        if len(self.rows) < self.written:
            self.file.keep(len(self.rows))
            self.written = len(self.rows)
        self.rows.append(row)
        self.emit(row)

    def note_checkpoint(self, name: str, steps: int, played: int) -> None:
        """Record a checkpoint that lies in the folder under `name`, after the rows up to it.

        Raises MarlRayError if another process has taken the trial over.
        """
        if read_state(self.folder).attempts != self.state.attempts:
            raise MarlRayError(f"{self.folder.uri}: another process has taken this trial over")
        # The newest bundle of a seed is its best, and is kept beyond its checkpoint.
        for seed in self.seeds:
            if self.folder.exists(f"{name}/seed-{seed}/bundle"):
                self.folder.copy_from(self.folder, f"{name}/seed-{seed}/bundle", f"bundles/seed-{seed}")
        checkpoints = [*self.state.checkpoints, name]
        self.state.checkpoints = checkpoints[-self.keep :]
        self.state.steps, self.state.played = steps, played - (self.played_before or 0)
        self.state.seconds = self._seconds_before + time.monotonic() - self._began_at
        self.file.append((json.dumps(row) for row in self.rows[self.written :]), durable=True)
        self.written = len(self.rows)
        write_state(self.folder, self.state)
        for old in checkpoints[: -self.keep]:
            self.folder.remove(old)
