"""The private parts of Ray that the product uses, each with its reason. All were checked with Ray 2.60.

`pyproject.toml` holds Ray to that minor release; whoever raises it reads this file and runs the integration tests.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from marl_ray.errors import MarlRayError, one_line

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

JOB_FOLDER = "working_dir_files"
"""Name of the folder under which Ray unpacks a job's working directory, and which it deletes with the job."""
ABORT_S = 5.0
"""Seconds that controllers of Ray Train may take to end their workers."""

DashboardClient = TypeVar("DashboardClient")


def autoscaled_resources() -> dict[str, float]:
    """Return the most of each resource that an autoscaler could bring the cluster to; empty without an autoscaler.

    Ray's public API reports only what is there now, and a cluster that scales from zero must not refuse a run.
    """
    from ray._private.state import state

    return dict(state.get_max_resources_from_cluster_config() or {})


def autoscaled_nodes() -> list[dict[str, float]]:
    """Return the resources of one node of each group that an autoscaler could add; none without an autoscaler.

    Ray's public API does not report the groups.
    """
    from ray._private.state import state

    scaled = state.get_cluster_config()
    if scaled is None:
        return []
    return [dict(group.resources) for group in scaled.node_group_configs if group.max_count != 0]


def count_local_cpus() -> float:
    """Return the logical CPUs that a Ray of this machine has if it is started without a number of them.

    Ray has no public call for it, and heeds a container's limit in a way of its own.
    """
    from ray._private.utils import get_num_cpus

    return float(get_num_cpus(override_docker_cpu_warning=True))


def is_cluster_answering(address: str, seconds: float) -> bool:
    """Return True once a Ray cluster takes connections at `address` (HOST:PORT), False if none does for `seconds`.

    `ray.init` takes no deadline, and tries for minutes without a word.
    """
    import grpc
    from ray._private.gcs_utils import create_gcs_channel

    channel = create_gcs_channel(address)
    try:
        grpc.channel_ready_future(channel).result(timeout=seconds)
    except grpc.FutureTimeoutError:
        return False
    finally:
        channel.close()
    return True


def dashboard_client(
    client_class: type[DashboardClient], url: str, timeout: float | tuple[float, float], argument: str = ""
) -> DashboardClient:
    """Return a client of Ray's dashboard at `url`, whose requests have deadlines.

    `timeout` is in seconds, of a request or of its connection and its answer. Raises MarlRayError, which begins with
    `argument` and `url`, if the URL is none, nothing answers there, or the cluster wants another token than that of
    RAY_AUTH_TOKEN.
    """
    if not url.startswith(("http://", "https://")):
        raise MarlRayError(f"{argument}{url!r}: expected the dashboard's URL, such as http://127.0.0.1:8265")
    import requests
    from ray.exceptions import AuthenticationError

    # Ray's clients attach a token only where RAY_AUTH_MODE=token is set too.
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else None
    # Ray's client of jobs would let these two override an explicit address.
    hidden_variables = {name: os.environ.pop(name, None) for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")}
    client_with_deadline: Any = with_deadline(client_class, timeout)
    try:
        client: DashboardClient = client_with_deadline(url, headers=headers)
        return client
    except AuthenticationError as error:
        if "Authentication required" in str(error):
            raise MarlRayError(f"{argument}{url}: the cluster asks for a token; set RAY_AUTH_TOKEN") from error
        raise MarlRayError(f"{argument}{url}: the cluster refuses the token in RAY_AUTH_TOKEN") from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # requests' errors are OSErrors
        answer_s = timeout[1] if isinstance(timeout, tuple) else timeout
        is_late = isinstance(error, requests.exceptions.Timeout)
        reason = f"no answer within {answer_s:g} s" if is_late else one_line(error)
        raise MarlRayError(f"{argument}{url}: no Ray dashboard answers: {reason}") from error
    finally:
        os.environ.update({name: value for name, value in hidden_variables.items() if value is not None})


def with_deadline(client_class: type[DashboardClient], timeout: float | tuple[float, float]) -> type[DashboardClient]:
    """Return the class whose requests to the dashboard take `timeout` seconds at most.

    Ray's clients set no deadline on a request, have no argument for one, and send each by this method.
    """
    base: Any = client_class

    class ClientWithDeadline(base):  # type: ignore[misc]
        def _do_request(self, *args: Any, **kwargs: Any) -> Any:
            return super()._do_request(*args, **{"timeout": timeout} | kwargs)

    return ClientWithDeadline


def placement_group_states(job: str) -> list[str]:
    """Return the states of the placement groups that a job has asked for.

    Ray has no call for the groups of one job, but their ids end with the job's.
    """
    from ray.util import placement_group_table

    return [group["state"] for id_, group in placement_group_table().items() if id_.endswith(job)]


class WorkerObserver(Protocol):
    """The events of a worker group, which Ray Train's controller reports in its process."""

    def on_start_requested(self, workers: int, each: Mapping[str, float]) -> None:
        """Note that workers are about to be started, with these resources each; an error ends the run."""

    def on_started(self, nodes: Mapping[int, str]) -> None:
        """Note that the workers run, on the nodes of these addresses by rank."""

    def on_silence(self, seconds: Mapping[int, float]) -> None:
        """Note since how many seconds workers have not answered, by rank."""

    def on_failure(self, errors: Mapping[int, BaseException]) -> None:
        """Note the errors with which workers have ended, by rank."""

    def on_start_failed(self, error: BaseException) -> None:
        """Note why workers could not be started."""


def observing_callback(observer: WorkerObserver) -> Any:
    """Return a callback of Ray Train that tells `observer` of its workers.

    The public callback is called for reports and errors alone, not while workers are waited for or do not answer.
    """
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

    class WatchedWorkers(WorkerGroupCallback, ControllerCallback):
        group: Any = None

        def before_worker_group_start(self, worker_group_context: Any) -> None:
            observer.on_start_requested(worker_group_context.num_workers, worker_group_context.resources_per_worker)

        def after_worker_group_start(self, worker_group: Any) -> None:
            self.group = worker_group
            workers = worker_group.get_workers()
            observer.on_started({w.distributed_context.world_rank: w.metadata.node_ip for w in workers})

        def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
            if worker_group_status.errors:
                observer.on_failure(unwrap_failures(worker_group_status.errors))
            polls, now = self.group._world_rank_to_ongoing_poll, time.monotonic()
            observer.on_silence({rank: now - poll.start_time for rank, poll in polls.items()})

        def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
            error = getattr(getattr(current_state, "training_failed_error", None), "controller_failure", None)
            if isinstance(error, WorkerGroupStartupFailedError):
                observer.on_start_failed(error.__cause__ or error)

    return WatchedWorkers()


def skip_dataset_processes(trainer: Any) -> None:
    """Keep Ray Train from starting a process for each worker group's shards of Ray datasets, as there are none.

    No argument of Ray Train turns it off.
    """
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback

    create_default_callbacks = trainer._create_default_callbacks
    trainer._create_default_callbacks = lambda: [
        callback for callback in create_default_callbacks() if not isinstance(callback, DatasetsCallback)
    ]


def skip_cleanup_processes(trainer: Any) -> None:
    """Keep Ray Train from starting two processes that a run does not need on a Ray that ends with it.

    One frees the workers' resources after a controller that has died, the other asks an autoscaler for them. Ray Train
    starts both for every run, and their imports take three seconds of CPU time.
    """
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    class WithoutAutoscaler(FixedScalingPolicy):
        def _send_resource_request(self) -> None:
            pass

        _maybe_send_resource_request = _cancel_resource_request = _send_resource_request

    run_controller = trainer._initialize_and_run_controller

    def run_without_processes(**options: Any) -> Any:
        callbacks = [each for each in options["callbacks"] if not isinstance(each, PlacementGroupCleanerCallback)]
        return run_controller(
            **options | {"callbacks": callbacks, "scaling_policy": WithoutAutoscaler(trainer.scaling_config)}
        )

    trainer._initialize_and_run_controller = run_without_processes


def replace_interrupt_handler(trainer: Any, started: "Callable[[ActorHandle[object]], object]") -> None:
    """Keep Ray Train from installing its handler of Ctrl-C, and hand its controller actor to `started` instead.

    Ray Train's own handler waits for its workers, exits with status 0, and does not say what is kept.
    """
    trainer._register_sigint_handler = started


def end_controllers(controllers: "Sequence[ActorHandle[object]]") -> None:
    """End controller actors of Ray Train with their workers, and free what these have reserved.

    A controller that is killed leaves that to a process which asks Ray's API for the state of actors, and which gives up
    where several Rays run on one machine: the CPUs would stay reserved until this process ends. So each is asked to abort
    its run, and killed where that takes longer than ABORT_S.
    """
    import ray

    aborted: list[ObjectRef[object]] = []
    for controller in controllers:
        with suppress(Exception):  # Ray itself may be ending
            aborted.append(controller.abort.remote())
    with suppress(Exception):
        ray.wait(aborted, num_returns=len(aborted), timeout=ABORT_S)
    for controller in controllers:
        with suppress(Exception):
            ray.kill(controller)


def worker_failures(error: BaseException) -> Mapping[int, BaseException]:
    """Return rank -> the error that a worker of Ray Train has raised, without Ray's wrapper.

    The mapping is empty for other errors. Errors with a line for users come first. The message of the public
    TrainingFailedError is a traceback of wrappers.
    """
    return unwrap_failures(getattr(error, "worker_failures", None) or {})


def unwrap_failures(failures: Mapping[int, BaseException]) -> Mapping[int, BaseException]:
    """Return the result of `worker_failures`, made from the errors by rank that Ray Train hands to a callback."""
    unwrapped = {
        rank: getattr(failure, "_base_exc", getattr(failure, "health_check_failure", failure))
        for rank, failure in failures.items()
    }
    # Workers that lose another one fail too, in whatever they were doing together.
    return dict(sorted(unwrapped.items(), key=lambda failed: not isinstance(failed[1], MarlRayError)))


def naming_callback(owner: str) -> Any:
    """Return a callback of Ray Train that names its worker actors and their tasks `OWNER worker` in the dashboard.

    Ray Train has no option for the name of its workers, but asks a class attribute what they are.
    """
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback

    class NamedWorkers(WorkerGroupCallback):
        def before_worker_group_start(self, worker_group_context: Any) -> None:
            from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
            from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

            name = f"{owner} worker"
            worker_class: Any = type(name, (RayTrainWorker,), {"__repr__": lambda worker: name})
            WorkerGroup._worker_cls = worker_class

    return NamedWorkers()


def reload_ray_settings() -> None:
    """Make Ray read its environment variables again, which it reads once, when it is imported."""
    from ray import _raylet  # compiled, so without types

    raylet: Any = _raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def init_on_loopback(temp_dir: Path, log_monitor: bool, **options: object) -> Any:
    """Start a Ray that listens on 127.0.0.1 alone and keeps its files in `temp_dir`; return the context of `ray.init`.

    `options` are those of `ray.init`, which has no public one for its node's address or its folder. The driver of a job
    asks the file `ray_current_cluster` for its cluster; without it, Ray takes any other that runs on the machine.
    """
    from ray import init

    with loopback_only(log_monitor):
        context: Any = init(
            address="local",  # never join a cluster that happens to run here
            dashboard_host="127.0.0.1",
            dashboard_port=0,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(temp_dir),
            **options,  # type: ignore[arg-type]
        )
    (temp_dir / "ray_current_cluster").write_text(context.address_info["address"])
    return context


@contextmanager
def loopback_only(log_monitor: bool) -> Iterator[None]:
    """Let `ray.init` start a Ray, within the block, that listens on 127.0.0.1 alone.

    Ray then leaves the agent's usual port free. `ray.init` has arguments for neither, nor for a Ray without its log
    monitor. Without ENABLE_RAY_CLUSTER=False it replaces 127.0.0.1 by the host's outward address and listens on all
    interfaces. Without listen port 0 the node's agent takes port 52365, and in a second Ray on the same machine no
    job can be submitted.
    """
    from ray._private import parameter, ray_constants

    options: dict[str, Any] = {"dashboard_agent_listen_port": 0, "include_log_monitor": log_monitor}
    parameters = partial(parameter.RayParams, **options)
    with (
        _replace_attribute(ray_constants, "ENABLE_RAY_CLUSTER", False),
        _replace_attribute(parameter, "RayParams", parameters),
    ):
        yield


@contextmanager
def _replace_attribute(module: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute of a module another value within the block."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def listen_on_node_address() -> None:
    """Make the Serve replica that this process is listen on its node's address alone. Call it in the constructor.

    After the constructor, Serve opens a server in each replica that unpickles what it receives and asks for no token. The
    server listens on all interfaces, though Serve's own processes use the node's address, and no option changes that.
    """
    import ray
    from ray.serve._private import replica as serve_replica

    module: Any = serve_replica
    add_port = module.add_port_to_grpc_server
    node = ray.util.get_node_ip_address()
    host = f"[{node}]" if ":" in node else node
    module.add_port_to_grpc_server = lambda server, _: add_port(server, f"{host}:0")


def join_loopback() -> None:
    """Run `ray start` with this process's arguments, on a machine whose head is bound to loopback.

    Ray's command refuses to join such a head, and replaces 127.0.0.1 by the host's outward address, where nothing listens.
    """
    from ray._private import ray_constants, services

    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda host: host
    from ray.scripts.scripts import main

    main()
