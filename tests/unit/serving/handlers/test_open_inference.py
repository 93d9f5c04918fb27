"""The Open Inference Protocol v2, as its specification has it."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from gymnasium import spaces
from toy_serving.gateways import SEES, act, bearer, gateway_config, make_bundle, serving, write_keys
from toy_serving.text_gateways import make_text_bundle, text_config

from marl_ray.serving.handlers.api_description.document import openapi
from marl_ray.serving.handlers.route_table import ROUTES

DOCUMENT = json.loads(openapi(ROUTES, "", True))
INPUTS = [{"name": agent, "shape": [3], "datatype": "INT64", "data": seen} for agent, seen in SEES.items()]
INFER = "/v2/models/exp/infer"


@pytest.fixture
def config(tmp_path):
    bundles = {arm: make_bundle(tmp_path, k) for arm, k in (("one", 1), ("four", 4))}
    return gateway_config(bundles, tmp_path / "x.db")


async def test_server_and_model_tell_of_themselves(config):
    async with serving(config) as (client, _):
        paths = ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/exp", "/v2/models/exp/ready")
        answers = [await client.get(path) for path in paths]
        assert [answer.status_code for answer in answers] == [200] * 5
        missing = [await client.get(f"/v2/models/none{end}") for end in ("", "/ready")]
        assert all(answer.status_code == 404 and answer.json().keys() == {"error"} for answer in missing)
        server, live, ready, model, model_ready = [answer.json() for answer in answers]
    assert (server["name"], server["extensions"], live, ready) == ("marl-ray", [], {"live": True}, {"ready": True})
    assert model_ready == {"name": "exp", "ready": True}
    assert model["inputs"] == [{"name": agent, "datatype": "INT64", "shape": [3]} for agent in SEES]
    assert model["outputs"][:2] == [
        {"name": "agent_0.action", "datatype": "INT64", "shape": [1]},
        {"name": "agent_0.log_prob", "datatype": "FP32", "shape": [1]},
    ]


async def test_the_document_says_where_null_is_as_good_as_nothing(config):
    schema = {"$ref": "#/components/schemas/InferRequest", "components": DOCUMENT["components"]}

    async with serving(config) as (client, _):
        full: dict[str, Any] = {"inputs": INPUTS, "id": None, "outputs": None, "parameters": {}}
        for name in full:
            sent = full | {name: None}
            status = (await client.post(INFER, json=sent, headers={"x-session-id": "s"})).status_code
            assert status == (200 if jsonschema.Draft202012Validator(schema).is_valid(sent) else 400), name


async def test_an_inference_is_an_act(config):
    """The session meets the same arm, by whichever of three names it comes, and its outcome counts."""

    async with serving(config) as (client, _):
        arms = set()
        for k in range(8):
            acted = await act(client, f"s{k}", mode="greedy")
            greedy = {"parameters": {"mode": "greedy"}}
            named = [
                await client.post(INFER, json={"inputs": INPUTS, "id": f"s{k}"} | greedy),
                await client.post(
                    INFER, json={"inputs": INPUTS, "id": "x"} | greedy, headers={"x-session-id": f"s{k}"}
                ),
                await client.post(
                    INFER, json={"inputs": INPUTS, "parameters": {"mode": "greedy", "session_id": f"s{k}", "other": 3}}
                ),
            ]
            for answer, number in zip(named, (f"s{k}", "x", None), strict=True):
                assert answer.status_code == 200, answer.text
                reply = answer.json()
                assert reply.get("id") == number and reply["model_name"] == "exp"
                assert reply["parameters"] == {key: acted[key] for key in ("experiment", "arm", "epoch", "propensity")}
                outputs = {output["name"]: output["data"] for output in reply["outputs"]}
                for agent in SEES:
                    assert outputs[f"{agent}.action"] == [acted["actions"][agent]]
                    assert outputs[f"{agent}.log_prob"] == [acted["log_probs"][agent]]
            arms.add(acted["arm"])
        reported = await client.post("/v1/outcomes", json={"session_id": "s0", "value": 1})
        assert reported.status_code == 200
        unknown = await client.post("/v1/outcomes", json={"session_id": "x", "value": 1})
        assert unknown.status_code == 404
        assert arms == {"one", "four"}


async def test_outputs_may_be_chosen_and_actions_masked(config):
    mask = {"name": "agent_0.action_mask", "shape": [6], "datatype": "BOOL", "data": [False] * 5 + [True]}

    async with serving(config) as (client, _):
        body_sent = {"id": "s", "inputs": [INPUTS[0], mask], "outputs": [{"name": "agent_0.action"}]}
        [output] = (await client.post(INFER, json=body_sent)).json()["outputs"]
    assert output == {"name": "agent_0.action", "datatype": "INT64", "shape": [1], "data": [5]}


async def test_tensors_are_nested_or_flat(tmp_path):
    sees = spaces.Box(-1, 1, (2, 3), np.float32)
    bundle = make_bundle(tmp_path, 0, sees, ("a",), spaces.Box(-1, 1, (2,), np.float32))
    config = gateway_config({"one": bundle, "four": bundle}, tmp_path / "x.db")
    tensor = {"name": "a", "shape": [2, 3], "datatype": "FP32"}
    flat = [0, 0.5, 1, -1, 0.25, 0]

    async with serving(config) as (client, _):
        answers = []
        for data in (flat, [flat[:3], flat[3:]]):
            question = {"id": "s", "inputs": [tensor | {"data": data}], "parameters": {"mode": "greedy"}}
            answers.append((await client.post(INFER, json=question)).json()["outputs"])
        first, second = answers
    assert first == second and first[0]["shape"] == [2] == [len(first[0]["data"])]


def change_input(**change):
    return {"inputs": [INPUTS[0] | change]}


WRONG = [
    ({"inputs": []}, "inputs"),
    (change_input(name="nobody"), "unknown input 'nobody'"),
    (change_input(name=3), "inputs.0"),
    (change_input(datatype="FP32"), "inputs.agent_0.datatype: expected INT64"),
    (change_input(datatype="BYTES"), "inputs.agent_0.datatype"),
    (change_input(shape=[1, 3]), "inputs.agent_0.shape: expected [3]"),
    (change_input(shape=3), "inputs.agent_0.shape"),
    (change_input(data=[0, 1]), "inputs.agent_0.data: expected 3 values of the type INT64"),
    (change_input(data=[0.5, 1, 2]), "inputs.agent_0.data"),
    (change_input(data=[[0], [1], [2]]), "inputs.agent_0.data"),
    (change_input(data=[0, [1], 2]), "inputs.agent_0.data"),
    (change_input(data=[1 << 70, 1, 2]), "inputs.agent_0.data"),
    (change_input(data=[True, 1, 2]), "inputs.agent_0.data"),
    (change_input(data=["x" * 400_000, *[""] * 100_000]), "inputs.agent_0.data"),  # 160 GB as a table of texts
    (change_input(data=[9, 1, 2]), "observations.agent_0"),
    (change_input(parameters={"binary_data_size": 24}), "binary data extension"),
    ({"inputs": [INPUTS[0], INPUTS[0]]}, "there twice"),
    ({"outputs": [{"name": "agent_0"}]}, "unknown output"),
    ({"outputs": [{"name": "agent_0.action", "parameters": {"binary_data": True}}]}, "binary data extension"),
    ({"id": 3}, "id: expected a text"),
    ({"id": ""}, "session_id"),
    ({"parameters": 3}, "parameters"),
    ({"parameters": {"mode": "best"}}, "mode"),
    ({"more": 1}, "more: unknown field"),
]


async def test_wrong_requests_are_refused_in_the_protocols_words(config):
    async with serving(config) as (client, _):
        unexpected = []
        for change, message in WRONG:
            answer = await client.post(INFER, json={"id": "s", "inputs": INPUTS} | change)
            body = answer.json()
            if answer.status_code != 400 or body.keys() != {"error"} or message not in body["error"]:
                unexpected.append((change, answer.text))
        assert unexpected == []
        binary = await client.post(INFER, content=b"{}123", headers={"inference-header-content-length": "2"})
        assert binary.status_code == 400 and "binary data extension" in binary.json()["error"]


async def test_texts_are_for_other_routes_and_keys_are_needed(tmp_path):
    keys = write_keys(tmp_path / "keys.yaml", game=("inference",), ops=("admin",))
    config = text_config({"one": make_text_bundle(tmp_path, 1)}, tmp_path, api_keys=keys)

    statuses = [422, 403, 401, 422, 401]
    async with serving(config) as (client, _):
        question = {"id": "s", "inputs": INPUTS}
        inferences = [await client.post(INFER, json=question, headers=bearer(key)) for key in ("game", "ops", "none")]
        answers = [await client.get("/v2/models/exp", headers=bearer("game")), await client.get("/v2/models/exp")]
        assert [(answer.status_code, list(answer.json())) for answer in (*inferences, *answers)] == [
            (status, ["error"]) for status in statuses
        ]
