"""The table of routes finds the function of a request, and what its path names."""

import pytest

from marl_ray.serving.handlers.route_table import find_route
from marl_ray.serving.http.messages import RequestError


@pytest.mark.parametrize(
    ("method", "path", "template", "params"),
    [
        ("POST", "/v1/act", "/v1/act", {}),
        ("GET", "/v1/experiments/maze", "/v1/experiments/{name}", {"name": "maze"}),
        ("POST", "/v1/experiments/pause/pause", "/v1/experiments/{name}/pause", {"name": "pause"}),
        ("GET", "/v1/models/a/b", "/v1/models/{name}/{agent}", {"name": "a", "agent": "b"}),
        ("POST", "/models/team:3/load", "/models/{version}/load", {"version": "team:3"}),
        ("HEAD", "/health", "/health", {}),
        ("HEAD", "/ui/experiments/maze", "/ui/experiments/{name}", {"name": "maze"}),
        ("GET", "/ui/experiments/{name}/live", "/ui/experiments/{name}/live", {"name": "{name}"}),
    ],
)
def test_a_path_is_found_with_what_it_names(method, path, template, params):
    route, named = find_route(path, method)
    assert (route.template, route.method, named) == (template, method.replace("HEAD", "GET"), params)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/act", 405),
        ("HEAD", "/v1/act", 405),
        ("GET", "/v1/experiments//audit", 404),
        ("GET", "/v1/experiments/maze/audit/more", 404),
        ("POST", "/v1/experiments/maze/explode", 404),
        ("GET", "/v1/experiments/maze/pause", 405),
    ],
)
def test_a_path_or_method_that_is_none_is_refused(method, path, status):
    with pytest.raises(RequestError) as refused:
        find_route(path, method)
    assert refused.value.status == status
