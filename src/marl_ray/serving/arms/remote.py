"""Arms of large policies, each in its own Serve application, which requests reach through a handle.

Each bundle has an application, rather than a deployment inside the gateway's application, so that a changed gateway
config restarts no policy, experiments with the same bundle share its replicas, and experiments created over HTTP can
start arms too.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from marl_ray.config import ArmConfig
from marl_ray.config.run.model import DEFAULT_ENGINE
from marl_ray.config.serving.arms import max_replicas
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.ray_seams import listen_on_node_address
from marl_ray.serving.arms.actor_critic import ArmBatcher, PassBatcher
from marl_ray.serving.arms.call_batching import CallBatcher
from marl_ray.serving.arms.errors import ArmError, new_pass_number
from marl_ray.serving.arms.external.model import ExternalModel
from marl_ray.serving.arms.handle_calls import answer_of, cached_handle
from marl_ray.serving.arms.protocol import Answer, AnyBundle, ArraysByAgent, TextArm, is_text
from marl_ray.serving.scaling import ARM_ONGOING, MAX_ONGOING_REQUESTS, TEXT_SHARE, scaling
from marl_ray.stored_files.folder_kinds import DIGEST_DIGITS

START_S = 300.0
"""Seconds that an arm's deployment may take to start: a node may have to come up, and weights be fetched."""
_POLL_S = 0.25
"""Seconds between looks at an arm's deployment that starts."""

ActRequest: TypeAlias = tuple[ArraysByAgent, bool, ArraysByAgent]
"""Observations, whether to take the most likely actions, and masks."""


class ArmHost:
    """One replica of one arm of actor-critics."""

    def __init__(self, reference: str, digest: str, tracking_uri: str | None, max_batch: int, deadline_s: float):
        import torch

        listen_on_node_address()
        torch.set_num_threads(1)
        bundle = load_bundle(reference, tracking_uri, digest)
        assert isinstance(bundle, ActorCriticBundle)
        self._batcher = ArmBatcher(bundle, PassBatcher(max_batch, np.random.default_rng()))

    async def act(self, requests: Sequence[ActRequest]) -> list[Answer | Exception]:
        """Return one answer or one error per request.

        So a failing request does not fail the others of its call.
        """
        answers = await asyncio.gather(*(self._batcher.act(*request) for request in requests), return_exceptions=True)
        # Other exceptions cross as text, because the other process may be unable to unpickle them.
        return [
            ArmError(repr(answer), new_pass_number())
            if isinstance(answer, BaseException) and not isinstance(answer, ArmError)
            else answer
            for answer in answers
        ]


class RemoteArm:
    """An arm behind a handle; requests share its calls."""

    def __init__(self, bundle: ActorCriticBundle, handle: DeploymentHandle[Any], deadline_s: float, replicas: int):
        self.bundle = bundle
        # Calls carry arrays and numbers, which plain pickle packs in a fraction of cloudpickle's time; it works between
        # processes of one application.
        options = cached_handle(
            handle, method_name="act", request_serialization="pickle", response_serialization="pickle"
        )

        async def call(requests: Sequence[ActRequest]) -> list[Answer | Exception]:
            act = options()
            answers: list[Answer | Exception] = await answer_of(lambda: act.remote(requests))
            return answers

        self._requests: CallBatcher[ActRequest, Answer] = CallBatcher(call, replicas, deadline_s)

    async def act(self, observations: ArraysByAgent, greedy: bool, masks: ArraysByAgent | None = None) -> Answer:
        """See `ArmBatcher.act`. Raises LostError if no answer comes back, BusyError if the arm has no time."""
        return await self._requests.ask((observations, greedy, masks or {}))

    def close(self) -> None:
        """Do nothing: this process holds nothing of the arm."""


def start_host(
    bundle: AnyBundle,
    reference: str,
    size: ArmConfig,
    *,
    tracking_uri: str | None,
    max_batch: int,
    deadline_s: float,
) -> RemoteArm | TextArm:
    """Start the arm's application if it does not run yet, wait until it runs, and return the arm.

    `reference` names the bundle; `size` has its replicas and resources. Raises MarlRayError if the application fails to
    deploy, or does not run within START_S seconds.
    """
    engine_suffix = "" if size.engine == DEFAULT_ENGINE else "-" + re.sub(r"\W", "-", size.engine)
    name = f"arm-{bundle.digest[:DIGEST_DIGITS]}{engine_suffix}"
    states = serve.status().applications
    if name not in states or states[name].status in ("DEPLOY_FAILED", "DELETING", "NOT_STARTED"):
        host_class: type = ArmHost
        ongoing = ARM_ONGOING
        if is_text(bundle):
            from marl_ray.serving.arms.text.remote import TextHost  # transformers takes seconds to import

            host_class = TextHost
            ongoing = max(1.0, TEXT_SHARE * max_batch)
        make_deployment: Any = serve.deployment(
            name=host_class.__name__,
            **scaling(size.replicas, ongoing),
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
            ray_actor_options={"num_cpus": size.cpus, "num_gpus": size.gpus},
        )(host_class)
        # Two gateway replicas may start the same application at once; Serve treats both requests as one.
        engine_argument = (size.engine,) if is_text(bundle) else ()
        application = make_deployment.bind(
            reference, bundle.digest, tracking_uri, max_batch, deadline_s, *engine_argument
        )
        serve.run_many([serve.RunTarget(application, name, None)], wait_for_applications_running=False)
    deadline = time.monotonic() + START_S
    while (status := serve.status().applications.get(name)) is None or status.status != "RUNNING":
        state = "not there" if status is None else f"{status.status}: {status.message}"
        if status is not None and status.status == "DEPLOY_FAILED":
            raise MarlRayError(f"bundle {reference!r}: its deployment {name} is {state}")
        if time.monotonic() > deadline:
            raise MarlRayError(
                f"bundle {reference!r}: its deployment {name} does not run within {START_S:g} s, but is {state}"
            )
        time.sleep(_POLL_S)
    try:
        handle = serve.get_app_handle(name)
    except RayServeException as error:
        raise MarlRayError(f"bundle {reference!r}: {error}") from error
    if isinstance(bundle, ActorCriticBundle):
        # The limits of the running application, which another experiment may have started with other settings.
        replica_states = [deployment.replica_states for deployment in status.deployments.values()]
        running = sum(count for by_state in replica_states for state, count in by_state.items() if state == "RUNNING")
        return RemoteArm(bundle, handle, deadline_s, max(1, running, max_replicas(size.replicas)))
    from marl_ray.serving.arms.text.remote import RemoteTextArm

    assert not isinstance(bundle, ExternalModel)  # no deployment of ours computes an external model
    return RemoteTextArm(bundle, handle, deadline_s)
