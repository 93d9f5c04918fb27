"""The whole HTTP API against its OpenAPI document: generated requests over real HTTP, none of which may be a defect."""

import copy
import json
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from toy_serving.gateways import AGENTS
from toy_serving.sites import KEYS, SESSIONS, TEXTS, site, text_site

from marl_ray.serving.handlers.api_description.document import openapi
from marl_ray.serving.handlers.route_table import ROUTES

__all__ = ["site", "text_site"]
pytestmark = pytest.mark.long
THOROUGH = "THOROUGH" in os.environ
load_all_checks()
FRAMING = ("content-length", "transfer-encoding")
"""Headers that say where a request ends: the HTTP server reads them, and refuses or awaits a request before the gateway
sees it."""
LOADING_S = 120.0
"""The first question to a model registry makes its database."""


@schemathesis.hook
def before_call(context, case, kwargs):
    """Requests are made of names in the source too, and the source names headers. The client alone writes these."""
    for name in [name for name in case.headers or {} if name.lower() in FRAMING]:
        del case.headers[name]


def document() -> dict[str, Any]:
    """The gateway's own, with values that exist there, so that requests come through."""
    schema = json.loads(openapi(ROUTES, "", True))
    parts = schema["components"]
    name = parts["parameters"]["name"]
    name["schema"] = {"anyOf": [{"enum": ["exp", "other", "new", "none"]}, name["schema"]]}
    # Any deadline may be missed, and then the answer is a 504.
    timeout = {"$ref": "#/components/parameters/x-request-timeout-seconds"}
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["parameters"].remove(timeout)
    schemas = parts["schemas"]
    new = schemas["ExperimentRequest"] = copy.deepcopy(schemas["ExperimentRequest"])
    new["properties"]["name"] = {"anyOf": [{"enum": ["exp", "new", "newer"]}, new["properties"]["name"]]}
    arm = new["properties"]["arms"]["additionalProperties"] = copy.deepcopy(schemas["ArmConfig"])
    arm["properties"]["bundle"] = {"enum": ["one", "four", "/no/such/bundle"]}
    for name in ("url", "model", "api_key_env", "deadline_s", "price"):  # nobody but this machine is to be asked
        del arm["properties"][name]
    for config in (new, schemas["ExperimentConfig"]):  # schemathesis makes an invalid schema of prefixItems in answers
        share = config["properties"]["layer_share"]
        share["items"] = share.pop("prefixItems")[0]
    seen = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2}, "minItems": 3, "maxItems": 3}
    for request in (schemas["ActRequest"], schemas["OutcomeRequest"]):
        request["properties"]["experiment"] = {"enum": ["exp", "other"]}
        request["properties"]["session_id"] = {"anyOf": [{"enum": SESSIONS}, request["properties"]["session_id"]]}
        request["required"] += ["experiment", "session_id"]
    schemas["ActRequest"]["properties"]["observations"] |= {
        "properties": dict.fromkeys(AGENTS, seen),
        "additionalProperties": False,
    }
    return schema


whole_schema = schemathesis.openapi.from_dict(document())
# A gateway of language models answers the paths of TEXTS; this one refuses most of what they are asked.
schema = whole_schema if THOROUGH else whole_schema.exclude(path=list(TEXTS))


def text_document() -> dict[str, Any]:
    """Likewise for the routes of language models; texts are short, to take little time."""
    schema = document()
    schema["paths"] = {path: schema["paths"][path] for path in TEXTS}
    schemas = schema["components"]["schemas"]
    for name, field in (("GenerateRequest", "experiment"), ("ChatRequest", "model"), ("CompletionRequest", "model")):
        properties = schemas[name]["properties"] = copy.deepcopy(schemas[name]["properties"])
        properties[field] = {"enum": ["exp"]}
        properties["max_tokens"]["maximum"] = 20
    schemas["GenerateRequest"]["properties"]["agent"] = {"enum": ["writer", None]}
    return schema


text_schema = schemathesis.openapi.from_dict(text_document())
RANDOM = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
"""Random requests alone. Without a key nothing of a request is read, so each of its boundaries is met with a key."""
keyless_schema = schemathesis.openapi.from_dict(document(), config=RANDOM)
MORE = 8 if THOROUGH else 1
"""`make test-all` makes so many times as many requests."""
HELD = ("ops", "game") if THOROUGH else ("ops",)
"""A player's key opens fewer paths (test_api_keys.py), and those alike."""


@pytest.mark.parametrize("key", HELD)
@schema.parametrize()
@settings(max_examples=10 * MORE, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_a_defect_and_answers_are_as_described(case, key, site):
    excluded = [positive_data_acceptance]  # most requests that are well-formed ask for what does not exist
    if case.operation.path in ("/batch", "/v1/outcomes/batch"):
        excluded.append(negative_data_rejection)  # parts have statuses of their own
    case.call_and_validate(base_url=site.url, headers=KEYS[key], excluded_checks=excluded, timeout=LOADING_S)


@pytest.mark.parametrize("key", HELD)
@text_schema.parametrize()
@settings(max_examples=15 * MORE, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_for_a_text_is_a_defect(case, key, text_site):
    case.call_and_validate(
        base_url=text_site.url, headers=KEYS[key], excluded_checks=[positive_data_acceptance], timeout=LOADING_S
    )


@keyless_schema.parametrize()
@settings(max_examples=3 * MORE, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_without_a_key_is_a_defect(case, site):
    case.call_and_validate(base_url=site.url, excluded_checks=[positive_data_acceptance], timeout=LOADING_S)
