"""`marl-ray cluster`: the commands for resources of KubeRay."""

import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from marl_ray.cli.documents.output import Json, only_result, show
from marl_ray.cli.options import Context, Namespace
from marl_ray.cli.serving.gateways import lint
from marl_ray.cluster.listeners import JobListener
from marl_ray.cluster.waits import INTERRUPTED_STATUS
from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonObject

if TYPE_CHECKING:
    from marl_ray.cluster.kuberay.client.connection import Connection
    from marl_ray.cluster.kuberay.state.phases import ResourceState
    from marl_ray.cluster.kuberay.state.view import ResourceKind

cluster_app = typer.Typer(help="KubeRay's clusters, jobs and services on Kubernetes.", no_args_is_help=True)
FAILED_STATUS = 1
"""Exit status where the resource failed or is gone."""
LATE_STATUS = 124
"""Exit status where a deadline passed, as of the command `timeout`."""
cluster_app.command()(lint)
PRINTER = JobListener(
    write_log=lambda text: print(text, end="", flush=True),
    say=lambda line: print(line, file=sys.stderr, flush=True),
)
"""Prints the log of a job that is followed on stdout, and what happens to the job on stderr."""
ResourceName = Annotated[str, typer.Argument(metavar="KIND/NAME", help="Such as rayjob/train-1 or rayservice/gateway.")]


@contextlib.contextmanager
def _report_missed_deadline() -> Iterator[None]:
    """Report a missed deadline in one line, and exit with LATE_STATUS."""
    from marl_ray.cluster.kuberay.client.waiting import WaitTimeoutError

    try:
        yield
    except WaitTimeoutError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(LATE_STATUS) from None


def submit_to_kuberay(
    kind: Literal["train", "sweep"],
    config: Path,
    overrides: Sequence[str],
    cluster: Path,
    name: str | None,
    context: str | None,
    namespace: str | None,
) -> tuple[str, int]:
    """Run a training or a sweep as a RayJob on its own cluster, and print its states and log until it has ended.

    Returns KIND/NAME of the job, and its entrypoint's exit status; Ctrl-C asks whether the job is to end. Exits with
    LATE_STATUS at the deadline.
    """
    from marl_ray.cluster.kuberay.client.connection import connect
    from marl_ray.cluster.kuberay.submission import follow, new_job_name, submit
    from marl_ray.config.cluster import ClusterConfig
    from marl_ray.config.load import load_config

    settings = load_config(ClusterConfig, cluster)
    name = name or new_job_name(settings)
    with _report_missed_deadline():
        connection = connect(context=context, namespace=namespace)
        if not submit(connection, kind, config, overrides, settings, name):
            PRINTER.say(f"rayjob/{name}: it is there already, and runs what it was submitted with")
        try:
            return f"rayjob/{name}", follow(connection, settings, name, PRINTER)
        except KeyboardInterrupt:
            offer_to_end(connection, name)
    return f"rayjob/{name}", INTERRUPTED_STATUS


def offer_to_end(connection: "Connection", name: str) -> None:
    """Ask the person at the terminal whether to end the job, and end it after a yes.

    Ctrl-C, Ctrl-D and a missing terminal mean no.
    """
    from marl_ray.cluster.kuberay.client import resources

    answer = ""
    if sys.stdin.isatty():
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            answer = input(f"\nrayjob/{name}: end the job? [y/N] ").strip().lower()
    if answer in ("y", "yes"):
        resources.delete(connection, "RayJob", name)
        PRINTER.say(
            f"rayjob/{name}: it ends; marl-ray cluster delete rayjob/{name} waits for that and takes the rest away"
        )
    else:
        PRINTER.say(f"rayjob/{name}: it continues; marl-ray cluster logs|wait|delete rayjob/{name}")


@cluster_app.command()
def render(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The short config of a cluster.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, such as name=lab.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the manifests of a cluster.

    Those of the job or service that its config names are among them.
    """
    from marl_ray.cluster.kuberay.manifests.rendering import render, to_yaml
    from marl_ray.config.cluster import ClusterConfig
    from marl_ray.config.load import load_config

    manifests = render(load_config(ClusterConfig, config, overrides or ()))
    show(as_json, manifests, [to_yaml(manifests).rstrip()])


@cluster_app.command()
def local(
    nodes: Annotated[int, typer.Option(min=1, help="Number of Ray nodes, including the head.")] = 3,
    cpus: Annotated[int, typer.Option(min=1, help="Logical CPUs of each node.")] = 2,
) -> None:
    """Start several Ray nodes on this machine, until Ctrl-C.

    It is for trying out what happens between nodes.
    """
    from marl_ray.cluster.local_nodes import local_cluster

    with local_cluster(nodes, cpus) as cluster:
        head = cluster.head
        print(f"{nodes} nodes of {cpus} CPUs, the dashboard at {head.dashboard_url}")
        addresses = f"RAY_ADDRESS={head.address} RAY_API_SERVER_ADDRESS={head.dashboard_url}"
        print(f"export {addresses} RAY_AUTH_MODE=token RAY_AUTH_TOKEN={head.token}")
        for number, process in enumerate(cluster.nodes, 1):
            print(f"node {number}: process {process.pid}")
        print("running until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


@cluster_app.command()
def apply(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Manifests, of one or several documents.")],
    force: Annotated[bool, typer.Option("--force", help="Take over fields that others have set.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the server check everything and change nothing.")
    ] = False,
    context: Context = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Apply manifests with strict validation by the server.

    Nothing is applied before all have passed it.
    """
    from marl_ray.cluster.kuberay.client import resources
    from marl_ray.cluster.kuberay.client.connection import connect

    connection = connect(context=context, namespace=namespace)
    manifests = [manifest for file in files for manifest in _read_manifests(file)]
    for manifest in manifests:
        resources.apply(connection, manifest, force, dry_run=True)
    applied = []
    for manifest in manifests:
        if not dry_run:
            resources.apply(connection, manifest, force)
        applied.append(f"{manifest['kind'].lower()}/{manifest['metadata']['name']}")
        with only_result(as_json):
            print(f"{applied[-1]} {'would be applied' if dry_run else 'applied'}", flush=True)
    show(as_json, {"dry_run": dry_run, "applied": applied}, ())


@cluster_app.command()
def status(resource: ResourceName, context: Context = None, namespace: Namespace = None, as_json: Json = False) -> None:
    """Show the state of a resource.

    The exit status is 1 if it has failed or is not there. A RayJob whose program has failed gives the program's own.
    """
    from marl_ray.cluster.kuberay.client.watching import view_now
    from marl_ray.cluster.kuberay.state.resource import resource_state

    connection, kind, name = _connect_to(resource, context, namespace)
    state = resource_state(view_now(connection, kind, name), time.time())
    show(as_json, {"resource": resource, **state._asdict()}, [f"{resource}: {state}"])
    raise typer.Exit(_exit_status(state))


@cluster_app.command()
def wait(
    resource: ResourceName,
    until: Annotated[
        str, typer.Option("--for", metavar="PHASE", help="ready, running, succeeded, suspended or gone.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(help="Maximum seconds to wait.")] = 600.0,
    context: Context = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Wait until a resource is ready.

    A RayJob is ready when it has succeeded. The exit status is 1 if it fails, or its program's own if that has
    failed, and 124 at the deadline.
    """
    from marl_ray.cluster.kuberay.client.waiting import DEFAULT_GOALS
    from marl_ray.cluster.kuberay.client.waiting import wait as wait_for
    from marl_ray.cluster.kuberay.state.phases import Phase

    connection, kind, name = _connect_to(resource, context, namespace)
    _check_seconds(timeout_s)
    if until and until not in list(Phase):
        raise MarlRayError(f"--for {until}: expected one of {', '.join(Phase)}")
    goals = (Phase(until),) if until else DEFAULT_GOALS[kind]
    with _report_missed_deadline(), only_result(as_json):
        state = wait_for(connection, kind, name, goals, timeout_s, lambda state: _print_state(resource, state))
    show(as_json, {"resource": resource, **state._asdict()}, ())
    raise typer.Exit(0 if state.phase in goals else _exit_status(state) or FAILED_STATUS)


@cluster_app.command()
def logs(
    resource: ResourceName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the job has ended.")] = False,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Print the log of a RayJob's entrypoint."""
    from marl_ray.cluster.kuberay.client.logs import log_lines, submitter_of

    connection, kind, name = _connect_to(resource, context, namespace)
    if kind != "RayJob":
        raise MarlRayError(f"logs {resource}: expected a rayjob; the dashboard has the logs of clusters and services")
    pod = submitter_of(connection, name)
    if pod is None:
        raise MarlRayError(
            f"logs {resource}: it has no pod that submits it (yet); in HTTPMode the dashboard has its log"
        )
    for line in log_lines(connection, *pod, follow):
        print(line, flush=True)


@cluster_app.command()
def delete(
    resource: ResourceName,
    timeout_s: Annotated[float, typer.Option(help="Maximum seconds to wait for its end; 0 does not wait.")] = 300.0,
    context: Context = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Delete a resource and what it owns.

    It waits until all is gone, and deletes the policies that were rendered beside it.
    """
    from marl_ray.cluster.kuberay.deletion import delete_all

    connection, kind, name = _connect_to(resource, context, namespace)
    _check_seconds(timeout_s)
    with _report_missed_deadline(), only_result(as_json):
        if not delete_all(connection, kind, name, timeout_s, lambda state: _print_state(resource, state)):
            raise MarlRayError(f"delete {resource}: there is none in {connection.namespace}")
    show(as_json, {"resource": resource, "gone": timeout_s > 0}, ())


def _connect_to(resource: str, context: str | None, namespace: str | None) -> tuple["Connection", "ResourceKind", str]:
    from marl_ray.cluster.kuberay.client.connection import connect
    from marl_ray.cluster.kuberay.state.view import ResourceKind

    kind, _, name = resource.partition("/")
    kinds = {kind_name.lower(): kind_name for kind_name in get_args(ResourceKind)}
    if kind.lower() not in kinds or not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", name):
        raise MarlRayError(f"{resource}: expected KIND/NAME, KIND one of {', '.join(kinds)}, NAME of a-z, 0-9 and -")
    return connect(context=context, namespace=namespace), kinds[kind.lower()], name


def _check_seconds(timeout_s: float) -> None:
    if not timeout_s >= 0:  # so written, it also refuses NaN, which a time never reaches
        raise MarlRayError(f"--timeout-s {timeout_s:g}: expected 0 or more")


def _print_state(resource: str, state: "ResourceState") -> None:
    print(f"{resource}: {state}", flush=True)


def _exit_status(state: "ResourceState") -> int:
    """Return 0, or for what has failed or is gone the entrypoint's own status where it has one, else FAILED_STATUS."""
    from marl_ray.cluster.kuberay.state.phases import Phase

    return (state.status or FAILED_STATUS) if state.phase in (Phase.FAILED, Phase.GONE) else 0


def _read_manifests(file: Path) -> list[JsonObject]:
    from marl_ray.cluster.lint.documents import is_manifest, read_documents

    documents = read_documents(file)
    if not documents:
        raise MarlRayError(f"{file}: expected manifests, got nothing")
    for document in documents:
        if not is_manifest(document):
            raise MarlRayError(f"{file}: expected manifests with apiVersion, kind and metadata.name")
    return documents
