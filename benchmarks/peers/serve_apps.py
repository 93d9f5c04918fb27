"""Serve applications that answer as the gateway does, without experiments: no assignment, no log of exposures.

`benchmarks/serving/gateway.py` measures what the gateway costs beside them. Serve configs name `serve_apps:one_hop`,
`serve_apps:two_hops` and `serve_apps:default`; `args` are `{bundles, batched}`. Several bundles take turns.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
import orjson
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.policies.bundles.loading import load_bundle

Answer = dict[str, dict[str, Any]]
MAX_ONGOING_REQUESTS = 2_000
"""The gateway's own setting."""
CPUS = 0.25
"""CPUs that a replica books in Ray's accounts: several applications stand beside each other, one at a time has traffic."""


class Team:
    """A bundle that acts. `batched`: requests that are there at the same moment share one pass, as in the gateway."""

    def __init__(self, bundle: str, batched: bool):
        import torch

        torch.set_num_threads(1)
        loaded = load_bundle(bundle)
        assert isinstance(loaded, ActorCriticBundle)
        self._bundle = loaded
        self._noise = np.random.default_rng()
        self._waiting: list[tuple[dict[str, np.ndarray], asyncio.Future[Answer]]] = []
        self.act: Callable[[dict[str, Any]], Awaitable[Answer]] = self._together if batched else self._alone

    async def _alone(self, observations: dict[str, Any]) -> Answer:
        return self._answers([self._check(observations)])[0]

    async def _together(self, request: dict[str, Any]) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        observations = self._check(request)
        if not self._waiting:
            loop.call_soon(self._run)
        self._waiting.append((observations, future))
        return await future

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        answers = self._answers([observations for observations, _ in waiting])
        for (_, future), answer in zip(waiting, answers, strict=True):
            if not future.done():  # cancelled: the client has gone
                future.set_result(answer)

    def _check(self, observations: dict[str, Any]) -> dict[str, np.ndarray]:
        return {
            agent: self._bundle.parse_observation(agent, observation) for agent, observation in observations.items()
        }

    def _answers(self, requests: list[dict[str, np.ndarray]]) -> list[Answer]:
        return [
            {
                "actions": {agent: action.tolist() for agent, (action, _) in answer.items()},
                "log_probs": {agent: log_prob for agent, (_, log_prob) in answer.items()},
            }
            for answer in self._bundle.act(requests, self._noise)
        ]


class Bare:
    """The least that an ASGI application can do with a request: read, parse, act, answer."""

    def __init__(self, acts: Iterable[Callable[[dict[str, Any]], Awaitable[Answer]]]):
        self._turns = itertools.cycle(acts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        answer = orjson.dumps(await next(self._turns)(orjson.loads(body)["observations"]))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


class OneHop:
    """The teams in the ingress replica itself."""

    def __init__(self, bundles: list[str], batched: bool):
        self._app = Bare([Team(bundle, batched).act for bundle in bundles])

    def __serve_build_asgi_app__(self) -> Bare:
        return self._app


class TwoHops:
    """Each team in its own deployment, behind a raw ASGI ingress."""

    def __init__(self, *models: Any):
        self._app = Bare([model.act.remote for model in models])

    def __serve_build_asgi_app__(self) -> Bare:
        return self._app


class Plain:
    """The ingress that Serve's documentation shows."""

    def __init__(self, model: Any):
        self._model = model

    async def __call__(self, request: Request) -> Response:
        answer = await self._model.act.remote(orjson.loads(await request.body())["observations"])
        return Response(orjson.dumps(answer), media_type="application/json")


class Model:
    """The team as a deployment's class: Serve calls methods of a class, no attributes."""

    def __init__(self, bundle: str, batched: bool):
        self._team = Team(bundle, batched)

    async def act(self, observations: dict[str, Any]) -> Answer:
        """Answer one request."""
        return await self._team.act(observations)


def _make_deployment(kind: type, **options: Any) -> serve.Deployment:
    return serve.deployment(ray_actor_options={"num_cpus": CPUS}, **options)(kind)


def one_hop(args: dict[str, Any]) -> serve.Application:
    """Build an application of one hop: HTTP -> replica with the teams."""
    return _make_deployment(serve.ingress()(OneHop), name="OneHop", max_ongoing_requests=MAX_ONGOING_REQUESTS).bind(
        **args
    )


def two_hops(args: dict[str, Any]) -> serve.Application:
    """Build an application of two hops: HTTP -> ingress replica -> replica with one of the teams."""
    models = [
        _make_deployment(Model, name=f"Model{k}", max_ongoing_requests=MAX_ONGOING_REQUESTS).bind(
            bundle, args["batched"]
        )
        for k, bundle in enumerate(args["bundles"])
    ]
    ingress = _make_deployment(serve.ingress()(TwoHops), name="TwoHops", max_ongoing_requests=MAX_ONGOING_REQUESTS)
    return ingress.bind(*models)


def default(args: dict[str, Any]) -> serve.Application:
    """Build an application of two hops with Serve's defaults, for the first team alone.

    Requests are Starlette's, five at a time per replica.
    """
    return _make_deployment(Plain).bind(_make_deployment(Model).bind(args["bundles"][0], args["batched"]))
