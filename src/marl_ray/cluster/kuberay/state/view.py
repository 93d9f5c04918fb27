"""A client's view of one resource of KubeRay, its clusters, their pods and the warnings about it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from marl_ray.json_types import JsonMapping

Object = JsonMapping
"""An object of the Kubernetes API as plain data."""
ResourceKind = Literal["RayJob", "RayCluster", "RayService", "RayCronJob"]
SUBMITTER_CONTAINER = "ray-job-submitter"
"""Name of the container that submits a RayJob's entrypoint, in a pod of its own or, in `SidecarMode`, in the head pod."""


@dataclass(frozen=True)
class View:
    """A resource and what belongs to it, at one moment."""

    kind: ResourceKind
    name: str
    resource: Object | None
    """None once it is gone."""
    clusters: tuple[Object, ...] = ()
    """RayClusters that the resource owns; of a RayCluster itself none."""
    pods: tuple[Object, ...] = field(default=(), repr=False)
    """Pods of these clusters, and of a RayJob its submitter's."""
    warnings: tuple[Object, ...] = field(default=(), repr=False)
    """Events of the type Warning about the resource and its clusters, in the order of time."""

    @property
    def status(self) -> Object:
        """The status of the resource as Kubernetes holds it; empty while there is none."""
        return self.resource.get("status") or {} if self.resource is not None else {}

    @property
    def ray_clusters(self) -> tuple[Object, ...]:
        """The clusters that it owns, or itself."""
        return (self.resource,) if self.kind == "RayCluster" and self.resource is not None else self.clusters

    @property
    def is_outdated(self) -> bool:
        """True if the operator says that it has looked at an older specification than the newest."""
        observed = self.status.get("observedGeneration")
        return self.resource is not None and observed is not None and observed < self.resource["metadata"]["generation"]


def view_of(kind: ResourceKind, name: str, objects: Iterable[Object]) -> View:
    """Choose from a namespace's objects those that belong to the resource."""
    objects = list(objects)
    resources = (item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name)
    clusters = [item for item in objects if item["kind"] == "RayCluster" and is_owned(item, kind, name)]
    names = {item["metadata"]["name"] for item in clusters} | ({name} if kind == "RayCluster" else set())
    pods = [item for item in objects if item["kind"] == "Pod" and is_pod_of(item, kind, name, names)]
    subjects = {(kind, name), *(("RayCluster", cluster_name) for cluster_name in names)}
    events = [item for item in objects if item["kind"] == "Event" and is_warning_about(item, subjects)]
    return View(kind, name, next(resources, None), tuple(clusters), tuple(pods), tuple(sorted(events, key=event_time)))


def owned_by(kind: str, name: str) -> str:
    """Return the selector of the RayClusters that were made for this RayJob or RayService."""
    return f"ray.io/originated-from-crd={kind},ray.io/originated-from-cr-name={name}"


def is_owned(cluster: Object, kind: str, name: str) -> bool:
    """Return True where a RayCluster was made for this RayJob or RayService."""
    labels = cluster["metadata"].get("labels") or {}
    made_for = labels.get("ray.io/originated-from-crd"), labels.get("ray.io/originated-from-cr-name")
    return made_for == (kind, name)


def is_pod_of(pod: Object, kind: str, name: str, clusters: set[str]) -> bool:
    """Return True where a pod belongs to one of these clusters, or submits this RayJob."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get("ray.io/cluster") in clusters or (kind == "RayJob" and labels.get("job-name") == name)


def is_warning_about(event: Object, resources: Collection[tuple[str, str]]) -> bool:
    """Return True where an event warns of one of these resources, given by kind and name."""
    return event.get("type") == "Warning" and subject(event) in resources


def subject(event: Object) -> tuple[str, str]:
    """Return the kind and name of what an event, of `v1` or `events.k8s.io/v1`, is about."""
    involved = event.get("regarding") or event.get("involvedObject") or {}
    return str(involved.get("kind")), str(involved.get("name"))


def event_time(event: Object) -> str:
    """Return the moment at which an event happened last, as text that sorts."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((moment for moment in times if moment), event["metadata"].get("creationTimestamp") or "")


def event_text(event: Object) -> str:
    """Return the note of an event without the name of the resource, which the operator puts into it."""
    involved = event.get("regarding") or event.get("involvedObject") or {}
    text = " ".join(str(event.get("note") or event.get("message") or "").split())
    full_name = f"{involved.get('namespace')}/{involved.get('name')}"
    return text.removeprefix(f"{full_name}: ").replace(f" {full_name}: ", ": ")


def seconds_of(time: str) -> float:
    """Return the seconds since 1970 of a time as Kubernetes writes it."""
    return datetime.fromisoformat(time).timestamp()
