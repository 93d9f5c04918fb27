"""The OpenAPI document: valid, whole, and true to the table of routes."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis
from toy_serving.gateways import serving

from marl_ray.config import ExperimentConfig
from marl_ray.serving.handlers.api_description.document import openapi
from marl_ray.serving.handlers.api_description.operations import OPERATIONS as DESCRIBED
from marl_ray.serving.handlers.route import Route
from marl_ray.serving.handlers.route_table import ROUTES

DOCUMENT = json.loads(openapi(ROUTES, "", True))
OPERATIONS = [
    pytest.param(operation, id=f"{method} {path}")
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]

PAGES = ("/ui", "/docs")
"""Prefixes of the pages for people."""
OPEN_INFERENCE = {"server", "server_live", "server_ready", "model_metadata", "model_ready", "infer"}
NOT_READY = {"ready": "Ready", "server_ready": "ServerReady", "model_ready": "ModelReady"}


def resolve(part: Any) -> Any:
    """The part of the document that a reference stands for."""
    while "$ref" in part:
        *path, last = part["$ref"].removeprefix("#/").split("/")
        part = DOCUMENT
        for key in (*path, last):
            part = part[key]
    return part


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from references(inner)


def test_it_is_valid_openapi_3_1():
    assert DOCUMENT["openapi"].startswith("3.1.")
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    with pytest.raises(Exception, match="Failed validating"):  # the validator is awake
        schemathesis.openapi.from_dict(DOCUMENT | {"paths": {"/x": {"get": {"responses": 7}}}}).validate()
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_reference_leads_somewhere():
    for reference in set(references(DOCUMENT)):
        assert resolve({"$ref": reference})


def test_it_has_every_route_but_those_of_pages():
    expected = {(route.template, route.method.lower()) for route in ROUTES if not route.template.startswith(PAGES)}
    assert {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods} == expected


def test_every_description_is_of_one_route():
    ids = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert sorted(ids) == sorted(DESCRIBED)


def test_a_description_is_found_by_the_route_and_not_by_its_functions_name():
    async def ready(service, request):
        raise NotImplementedError

    paths = json.loads(openapi((Route("GET", "/numbers", ready, "metrics"),), "", False))["paths"]
    operation = paths["/numbers"]["get"]
    assert operation["operationId"] == "metrics"
    assert operation["responses"].keys() == {"200", "400", "504"}
    assert operation["responses"]["200"]["content"].keys() == {"text/plain"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_described_whole(operation):
    assert operation["summary"]
    assert {"400", "504"} <= operation["responses"].keys()
    if "requestBody" in operation:
        assert {"401", "403", "413", "429"} <= operation["responses"].keys()
        assert operation["requestBody"]["content"]["application/json"]["schema"]
    for status, response in operation["responses"].items():
        response = resolve(response)
        assert response["description"] and "x-request-id" in response["headers"]
        content = next(iter(response["content"].values()))
        if int(status) >= 400:
            name = operation["operationId"]
            schema = "InferError" if name in OPEN_INFERENCE else "Error"
            schema = NOT_READY[name] if status == "503" and name in NOT_READY else schema
            assert content["schema"] == {"$ref": f"#/components/schemas/{schema}"}
        elif operation["operationId"] not in ("document", "metrics"):
            assert resolve(content["schema"])["required"]


@pytest.mark.parametrize("keyed", [True, False])
def test_who_needs_a_key_is_told(keyed):
    paths = json.loads(openapi(ROUTES, "", keyed))["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            client = path in (
                "/v1/act",
                "/v1/assign",
                "/batch",
                "/generate",
                "/v1/chat/completions",
                "/v1/completions",
                "/v2/models/{name}/infer",
                "/v1/outcomes",
                "/v1/outcomes/batch",
            )
            reads = method == "get" and path.startswith(("/v1/", "/v2/models/"))
            expected = keyed if client or reads else method == "post"
            assert ("security" in operation) is expected, (method, path)


def test_a_request_to_create_is_a_config_with_a_reason():
    schemas = DOCUMENT["components"]["schemas"]
    request, config = schemas["ExperimentRequest"], schemas["ExperimentConfig"]
    of_config = request["properties"].keys() - {"reason", "succeeds"}
    assert of_config == config["properties"].keys() == set(ExperimentConfig.model_fields)
    assert set(request["required"]) == {"name", "arms", "reason"}


async def test_the_examples_work_and_answers_are_as_described(config):
    async with serving(config) as (client, _):
        served = (await client.get("/openapi.json")).json()
        answers = []
        for path in ("/v1/act", "/v1/outcomes"):
            operation = served["paths"][path]["post"]
            request = resolve(operation["requestBody"]["content"]["application/json"]["schema"])
            answer = await client.post(path, json=request["examples"][0])
            answers.append((answer, operation))
    assert served == json.loads(openapi(ROUTES, "", False))
    for answer, operation in answers:
        assert answer.status_code == 200, answer.text
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {"components": DOCUMENT["components"], **schema})
