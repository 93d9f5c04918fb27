"""Names that the Ray dashboard shows for what a run starts; without them all runs look alike."""

import secrets
from typing import Any


def metrics_queue(owner: str) -> Any:
    """A queue for rows of metrics, whose actor is named `OWNER metrics`."""
    from ray.util.queue import Queue

    # Ray wants each name once in a namespace, and the queue of a run that has just failed is not gone at once.
    return Queue(
        actor_options={"num_cpus": 0, "name": f"{owner} metrics", "namespace": f"marl-ray-{secrets.token_hex(8)}"}
    )


def named_workers(owner: str) -> Any:
    """A callback of Ray Train after which its worker actors and their tasks are named after their owner."""
    # Ray Train has no option for the name of its workers, but asks a class attribute what they are.
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback

    class NamedWorkers(WorkerGroupCallback):
        def before_worker_group_start(self, worker_group_context: Any) -> None:
            from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
            from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

            name = f"{owner} worker"
            named: Any = type(name, (RayTrainWorker,), {"__repr__": lambda worker: name})
            WorkerGroup._worker_cls = named

    return NamedWorkers()
