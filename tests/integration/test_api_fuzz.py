"""The whole HTTP API against its OpenAPI document: generated requests over real HTTP, none of which may be a defect."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import schemathesis
import torch
import uvicorn
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from schemathesis.openapi.checks import AcceptedNegativeData  # noqa: F401
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from toy_gateways import AGENTS, SEES, bearer, gateway_config, make_bundle, write_keys

from marl_ray.serving.gateway import Gateway
from marl_ray.serving.routes import ROUTES, Route

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
torch.set_num_threads(1)
load_all_checks()
SESSIONS = [f"known-{k}" for k in range(4)]
WAIT_S = 10.0
KEYS = {"ops": bearer("ops"), "game": bearer("game"), "none": {}}
CLIENTS = ("/v1/act", "/batch", "/generate", "/v1/outcomes")
"""What players' keys open; every other POST is for admins."""


class Site(NamedTuple):
    url: str
    bundles: dict[str, str]
    port: int


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway with keys and two experiments, on a port of its own."""
    folder = tmp_path_factory.mktemp("fuzz")
    bundles = {"one": make_bundle(folder, 1), "four": make_bundle(folder, 4)}
    keys = write_keys(folder / "keys.yaml", ops=("admin", "inference", "outcomes"), game=("inference", "outcomes"))
    more = {"api_keys": keys, "tracking_uri": f"sqlite:///{folder}/mlflow.db", "decision_log": str(folder / "log")}
    config = gateway_config(bundles, folder / "x.db", names=("exp", "other"), cache={"url": "memory:"}, **more)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(Gateway(config, seed=0), log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield Site(f"http://127.0.0.1:{port}", bundles, port)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listening.close()
    assert not thread.is_alive()


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=site.url, timeout=WAIT_S, headers=KEYS["ops"]) as made:
        yield made


def act(client: httpx.Client, session: str, **more: Any) -> dict[str, Any]:
    sent = {"experiment": "exp", "session_id": session, "observations": SEES} | more
    answer = client.post("/v1/act", json=sent)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def api(site: Site) -> Any:
    """The document that the gateway serves, with values that exist there, so that requests come through."""
    with httpx.Client(base_url=site.url, timeout=WAIT_S, headers=KEYS["ops"]) as client:
        document = client.get("/openapi.json").json()
        for session in SESSIONS:
            act(client, session)
    parts = document["components"]
    parts["parameters"]["name"]["schema"] = {"enum": ["exp", "other", "new", "none"]}
    # Any deadline may be missed, and then the answer is a 504.
    timeout = {"$ref": "#/components/parameters/x-request-timeout-seconds"}
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["parameters"].remove(timeout)
    schemas = parts["schemas"]
    schemas["ArmConfig"]["properties"]["bundle"] = {"enum": [*site.bundles.values(), "/no/such/bundle"]}
    schemas["ExperimentRequest"]["properties"]["name"] = {"enum": ["exp", "new", "newer", "newest"]}
    seen = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2}, "minItems": 3, "maxItems": 3}
    for request in (schemas["ActRequest"], schemas["OutcomeRequest"]):
        request["properties"]["experiment"] = {"enum": ["exp", "other"]}
        request["properties"]["session_id"] = {"anyOf": [{"enum": SESSIONS}, request["properties"]["session_id"]]}
        request["required"] += ["experiment", "session_id"]
    schemas["ActRequest"]["properties"]["observations"] |= {
        "properties": dict.fromkeys(AGENTS, seen),
        "additionalProperties": False,
    }
    return schemathesis.openapi.from_dict(document)


schema = schemathesis.pytest.from_fixture("api")


@pytest.mark.parametrize("key", KEYS)
@schema.parametrize()
@settings(max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_a_defect_and_answers_are_as_described(case, key, site):
    excluded = [positive_data_acceptance]  # most requests that are well-formed ask for what does not exist
    if case.operation.path == "/batch":
        excluded.append(negative_data_rejection)  # parts have statuses of their own
    case.call_and_validate(base_url=site.url, headers=KEYS[key], excluded_checks=excluded, timeout=WAIT_S)
