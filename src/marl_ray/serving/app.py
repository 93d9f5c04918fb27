"""The gateway on Ray Serve: all arms in one ingress replica, one hop behind the proxy."""

import asyncio
import gc
from functools import partial

from ray import serve

from marl_ray.config import GatewayConfig, parse_config
from marl_ray.json_types import JsonObject
from marl_ray.ray_seams import listen_on_node_address
from marl_ray.serving.arms.remote import start_host
from marl_ray.serving.asgi import Gateway
from marl_ray.serving.scaling import GATEWAY_ONGOING, MAX_ONGOING_REQUESTS, scaling
from marl_ray.serving.service import check_gateway


class GatewayReplica:
    """One replica of the gateway, as Serve runs it.

    Serve makes it from the config, asks it for the ASGI application, and runs that application's lifespan.
    """

    async def __init__(self, config: JsonObject):  # type: ignore[misc]  # Serve awaits it
        import torch

        from marl_ray.serving.logs.ray_metrics import RayMetrics, replica_name

        listen_on_node_address()
        # Replicas are the unit of parallelism; threads of one small forward pass would only get in each other's way.
        torch.set_num_threads(1)
        gateway_config = parse_config(GatewayConfig, config, source="args")
        # The request's deadline must leave the control time to answer if the arm hangs.
        make_arm = partial(
            start_host,
            tracking_uri=gateway_config.tracking_uri,
            max_batch=gateway_config.max_batch,
            deadline_s=gateway_config.request_timeout_s / 2,
        )
        # In a thread, because bundles may be large and the replica must keep answering Serve's health checks.
        self._gateway = await asyncio.to_thread(Gateway, gateway_config, host=make_arm, replica=replica_name())
        RayMetrics(self._gateway.service.read_metrics).start()
        # Exclude all objects loaded so far from garbage collection: walking through them would delay requests by 0.1 s.
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> Gateway:
        return self._gateway


def build(args: dict[str, object]) -> serve.Application:
    """Return the gateway as an application of Ray Serve; `args` are those of a `GatewayConfig`.

    A Serve config names it by `import_path: marl_ray.serving.app:build`.

    Config, keys, bundles and database are checked here, so that a mistake fails the deployment once, with one line, instead
    of every replica's start. Raises MarlRayError.
    """
    config = parse_config(GatewayConfig, args, source="args")
    check_gateway(config)
    # `ingress` asks the replica for its application, so the gateway is made where it runs and never pickled.
    make_deployment = serve.deployment(
        name="Gateway",
        **scaling(config.replicas, GATEWAY_ONGOING),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": config.cpus_per_replica},
    )
    application: serve.Application = make_deployment(serve.ingress()(GatewayReplica)).bind(
        config.model_dump(mode="json")
    )
    return application
