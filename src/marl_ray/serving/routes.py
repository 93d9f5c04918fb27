"""Which function answers which request. The OpenAPI document is made of the same table."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from marl_ray.experiments.states import Action
from marl_ray.serving import acting, administration, chat, generating, handing, outcomes, site
from marl_ray.serving.http import Request, RequestError, Response, Stream

if TYPE_CHECKING:
    from marl_ray.serving.gateway import Gateway

Handler = Callable[["Gateway", Request], Awaitable[Response | Stream]]


class Route(NamedTuple):
    """One operation: `{name}` in the template stands for one part of a path."""

    method: str
    template: str
    handler: Handler
    loads: bool = False
    """Fetches bundles, which may take longer than requests may."""
    problem: Callable[[RequestError], bytes] = RequestError.body
    """How an error is written."""


_EXPERIMENT = "/v1/experiments/{name}"
ROUTES = (
    Route("POST", "/v1/act", acting.act),
    Route("POST", "/batch", acting.batch),
    Route("POST", "/v1/assign", handing.assign),
    Route("POST", "/generate", generating.generate),
    Route("POST", "/v1/chat/completions", chat.completions, problem=chat.problem),
    Route("POST", "/v1/outcomes", outcomes.outcome),
    Route("POST", "/v1/outcomes/batch", outcomes.outcomes),
    Route("GET", "/v1/endpoints", administration.endpoints),
    Route("GET", "/v1/experiments", administration.experiments),
    Route("POST", "/v1/experiments", administration.create, loads=True),
    Route("GET", _EXPERIMENT, administration.experiment),
    Route("GET", f"{_EXPERIMENT}/audit", administration.audit),
    Route("GET", f"{_EXPERIMENT}/curves", administration.series),
    *(Route("POST", f"{_EXPERIMENT}/{action.value}", administration.change) for action in Action),
    Route("GET", "/v1/models", administration.models),
    Route("POST", "/models/{version}/load", administration.load, loads=True),
    Route("GET", "/health", administration.health),
    Route("GET", "/ready", administration.ready),
    Route("GET", "/metrics", administration.metrics),
    Route("GET", "/openapi.json", site.document),
    Route("GET", "/docs", site.docs),
    Route("GET", "/ui", site.index),
    Route("GET", "/ui/style.css", site.stylesheet),
    Route("GET", "/ui/experiments/{name}", site.experiment),
    Route("GET", "/ui/experiments/{name}/live", site.experiment),
    *(Route("POST", f"/ui/experiments/{{name}}/{action.value}", site.change) for action in Action),
)
_FIXED: dict[str, dict[str, Route]] = {}
_SHAPES: dict[int, list[tuple[list[str], Route]]] = {}
for _route in ROUTES:
    if "{" in _route.template:
        _parts = _route.template.split("/")
        _SHAPES.setdefault(len(_parts), []).append((_parts, _route))
    else:
        _FIXED.setdefault(_route.template, {})[_route.method] = _route


def find(path: str, method: str) -> Route:
    """The route of a request, or RequestError 404 or 405."""
    found = _FIXED.get(path)
    if found is None:
        parts = path.split("/")
        found = {
            route.method: route
            for shape, route in _SHAPES.get(len(parts), ())
            if all(part == given or (part[:1] == "{" and given) for part, given in zip(shape, parts, strict=True))
        }
    if not found:
        raise RequestError(404, None, f"no such path {path!r}, expected one of those in /openapi.json")
    if method not in found:
        allowed = ", ".join(found)
        error = RequestError(405, None, f"method {method} is not allowed on {path}, expected {allowed}")
        error.headers = ((b"allow", allowed.encode()),)
        raise error
    return found[method]
