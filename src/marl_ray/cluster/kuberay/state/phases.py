"""The phases of a resource of KubeRay, and its state: a phase, a reason and a message."""

from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """A resource's phase for whoever waits for it."""

    WAITING = "waiting"
    """On its way, or held up by what may still pass."""
    RUNNING = "running"
    """A RayJob's entrypoint runs."""
    READY = "ready"
    """A RayCluster or a RayService does what it is for; a RayCronJob is scheduled."""
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """It stays so as long as nobody changes the resource."""
    GONE = "gone"


class ResourceState(NamedTuple):
    """The state of a resource."""

    phase: Phase
    reason: str
    """One word in the operator's spelling, where it has one."""
    message: str
    """One line."""
    status: int | None = None
    """Exit status of a RayJob's entrypoint, where it has ended by itself."""

    def __str__(self) -> str:
        return f"{self.phase} ({self.reason}): {self.message}" if self.message else f"{self.phase} ({self.reason})"
