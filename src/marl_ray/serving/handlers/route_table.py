"""The table of routes, which says which function answers which request.

The OpenAPI document is made of the same table.
"""

from collections.abc import Mapping
from functools import partial

from marl_ray.experiments.lifecycle import Action
from marl_ray.serving.handlers import catalogue, experiments, health, outcomes, ui
from marl_ray.serving.handlers.actions import act, assign
from marl_ray.serving.handlers.api_description.document import openapi
from marl_ray.serving.handlers.open_inference import infer
from marl_ray.serving.handlers.open_inference import models as open_inference_models
from marl_ray.serving.handlers.openai import chat
from marl_ray.serving.handlers.openai import completions as openai_completions
from marl_ray.serving.handlers.openai import models as openai_models
from marl_ray.serving.handlers.openai.fields import error_body
from marl_ray.serving.handlers.route import Route
from marl_ray.serving.handlers.texts import generate
from marl_ray.serving.http.messages import Request, RequestError, Response
from marl_ray.serving.service import Service


async def document(service: Service, request: Request) -> Response:
    """Answer `GET /openapi.json`."""
    # In a thread, because making the document takes 0.2 s; it is made once.
    has_keys = bool(service.admission.keys.keys)
    return Response(await service.in_thread(openapi, ROUTES, request.root_path, has_keys))


async def docs(service: Service, request: Request) -> Response:
    """Answer `GET /docs`: the OpenAPI document as a page."""
    description = await document(service, request)
    return await ui.docs(service, request, description.body)


_EXPERIMENT = "/v1/experiments/{name}"
ROUTES = (
    Route("POST", "/v1/act", act.act, "act"),
    Route("POST", "/batch", act.batch, "batch"),
    Route("POST", "/v1/assign", assign.assign, "assign"),
    Route("POST", "/generate", generate.generate, "generate"),
    Route("POST", "/v1/chat/completions", chat.chat_completions, "completions", error_body=chat.chat_error_body),
    Route("POST", "/v1/completions", openai_completions.text_completions, "text_completions", error_body=error_body),
    Route("POST", "/v1/outcomes", outcomes.outcome, "outcome"),
    Route("POST", "/v1/outcomes/batch", outcomes.outcomes, "outcomes"),
    Route("GET", "/v1/endpoints", catalogue.endpoints, "endpoints"),
    Route("GET", "/v1/experiments", experiments.experiments, "experiments"),
    Route("POST", "/v1/experiments", experiments.create, "create", is_slow=True),
    Route("GET", _EXPERIMENT, experiments.experiment, "experiment"),
    Route("GET", f"{_EXPERIMENT}/audit", experiments.audit, "audit"),
    Route("GET", f"{_EXPERIMENT}/curves", experiments.curves, "curves"),
    *(
        Route("POST", f"{_EXPERIMENT}/{action.value}", partial(experiments.change, action), action.value)
        for action in Action
    ),
    Route("GET", "/v1/models", catalogue.models, "models"),
    Route("GET", "/v1/models/{name}", openai_models.model, "model", error_body=error_body),
    Route("GET", "/v1/models/{name}/{agent}", openai_models.model, "agent_model", error_body=error_body),
    Route("POST", "/models/{version}/load", catalogue.load, "load", is_slow=True),
    Route("GET", "/v2", open_inference_models.server, "server", error_body=open_inference_models.error_body),
    Route(
        "GET",
        "/v2/health/live",
        open_inference_models.server_live,
        "server_live",
        error_body=open_inference_models.error_body,
    ),
    Route(
        "GET",
        "/v2/health/ready",
        open_inference_models.server_ready,
        "server_ready",
        error_body=open_inference_models.error_body,
    ),
    Route(
        "GET",
        "/v2/models/{name}",
        open_inference_models.model_metadata,
        "model_metadata",
        error_body=open_inference_models.error_body,
    ),
    Route(
        "GET",
        "/v2/models/{name}/ready",
        open_inference_models.model_ready,
        "model_ready",
        error_body=open_inference_models.error_body,
    ),
    Route("POST", "/v2/models/{name}/infer", infer.infer, "infer", error_body=open_inference_models.error_body),
    Route("GET", "/health", health.health, "health"),
    Route("GET", "/ready", health.readiness, "ready"),
    Route("GET", "/metrics", health.metrics, "metrics"),
    Route("GET", "/openapi.json", document, "document"),
    Route("GET", "/docs", docs),
    Route("GET", "/ui", ui.index),
    Route("GET", "/ui/style.css", ui.stylesheet),
    Route("GET", "/ui/experiments/{name}", ui.experiment),
    Route("GET", "/ui/experiments/{name}/live", partial(ui.experiment, live=True)),
    *(Route("POST", f"/ui/experiments/{{name}}/{action.value}", partial(ui.change, action)) for action in Action),
)
_NO_PARAMS: Mapping[str, str] = {}
_FIXED_PATHS: dict[str, dict[str, Route]] = {}
_TEMPLATES_BY_LENGTH: dict[int, list[tuple[list[str], Route]]] = {}
for _route in ROUTES:
    if "{" in _route.template:
        _parts = _route.template.split("/")
        _TEMPLATES_BY_LENGTH.setdefault(len(_parts), []).append((_parts, _route))
    else:
        _FIXED_PATHS.setdefault(_route.template, {})[_route.method] = _route


def find_route(path: str, method: str) -> tuple[Route, Mapping[str, str]]:
    """Return the route of a request, and name in the route's template -> part of the path.

    HEAD is answered as GET, whose body the HTTP server leaves out. Raises RequestError 404 or 405 if there is none.
    """
    routes = _FIXED_PATHS.get(path)
    params = _NO_PARAMS
    if routes is None:
        parts = path.split("/")
        routes = {
            route.method: route
            for shape, route in _TEMPLATES_BY_LENGTH.get(len(parts), ())
            if all(part == segment or (part[:1] == "{" and segment) for part, segment in zip(shape, parts, strict=True))
        }
    if not routes:
        raise RequestError(404, None, f"no such path {path!r}, expected one of those in /openapi.json")
    if method == "HEAD" and "GET" in routes:
        method = "GET"
    if method not in routes:
        allowed = ", ".join((*routes, "HEAD") if "GET" in routes else routes)
        error = RequestError(405, None, f"method {method} is not allowed on {path}, expected {allowed}")
        error.headers = ((b"allow", allowed.encode()),)
        raise error
    route = routes[method]
    if "{" in route.template:
        named = zip(route.template.split("/"), path.split("/"), strict=True)
        params = {part.strip("{}"): segment for part, segment in named if part[:1] == "{"}
    return route, params
