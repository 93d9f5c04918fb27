"""Recorded stories of KubeRay's operator: every watch event of 25 stories, with its time."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from marl_ray.cluster.kuberay.state.phases import ResourceState
from marl_ray.cluster.kuberay.state.resource import resource_state
from marl_ray.cluster.kuberay.state.view import ResourceKind, seconds_of, view_of

FOLDER = Path(__file__).parents[2] / "fixtures" / "kuberay"
STORIES = sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))
KINDS: dict[str, ResourceKind] = {
    "raycluster": "RayCluster", "raycronjob": "RayCronJob", "rayjob": "RayJob", "rayservice": "RayService",
}  # fmt: skip


class Recorded(NamedTuple):
    """One event of a watch."""

    t: float
    """Seconds since the recording began."""
    type: str
    object: dict[str, Any]


def events(story: str) -> Iterator[Recorded]:
    with gzip.open(FOLDER / f"{story}.jsonl.gz", "rt") as lines:
        for line in lines:
            yield Recorded(**json.loads(line))


def kind_of(story: str) -> ResourceKind:
    return KINDS[story.split("-", maxsplit=1)[0]]


def states(story: str, later_s: float = 0.0) -> list[ResourceState]:
    """States of the story's resource after each event, without repetitions.

    The last one is its state `later_s` after the last event.
    """
    kind, start, now = kind_of(story), 0.0, 0.0
    objects: dict[tuple[str, str], Any] = {}
    reached: list[ResourceState] = []
    for event in events(story):
        metadata = event.object["metadata"]
        key = (event.object["kind"], metadata["name"])
        if not start and key == (kind, story):  # a recording may begin with what another one has left
            start = seconds_of(metadata["creationTimestamp"]) - event.t
        now = start + event.t
        if event.type == "DELETED":
            objects.pop(key, None)
        else:
            objects[key] = event.object
        if start:
            reached.append(resource_state(view_of(kind, story, objects.values()), now))
    reached.append(resource_state(view_of(kind, story, objects.values()), now + later_s))
    return [state for number, state in enumerate(reached) if not number or state != reached[number - 1]]
