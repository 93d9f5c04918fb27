"""A request is answered by the arms that it has found, whatever a poll changes while an arm computes."""

from typing import Any

import httpx
import pytest
from toy_serving.external_servers import KEY, PRICE, Replies, chunk, external
from toy_serving.gateways import SEES, serving
from toy_serving.text_gateways import post, text_config

from marl_ray.serving.arms.actor_critic import ArmBatcher
from marl_ray.serving.arms.external.arm import ExternalArm
from marl_ray.serving.logs.act_reader import read_logged
from marl_ray.serving.logs.acts import LoggedText
from marl_ray.stored_files.folder_kinds import DIGEST_DIGITS

USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
COST_USD = (10 * PRICE["prompt"] + 3 * PRICE["completion"]) / 1e6
INPUTS = [{"name": agent, "shape": [3], "datatype": "INT64", "data": seen} for agent, seen in SEES.items()]


class DropsArms(Replies):
    """A server of texts that drops every arm of an experiment's router while it answers."""

    def __init__(self, router: Any):
        super().__init__(200, chunk(delta={"content": "a b"}) + chunk(finish_reason="stop") + USAGE)
        self.router = router

    async def __call__(self, *call: Any) -> None:
        self.router.replace_arms({})
        await super().__call__(*call)


async def test_an_act_by_text_whose_arms_are_dropped_meanwhile_costs_and_is_logged_as_a_text(tmp_path, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", KEY)
    arms = {arm: external("http://theirs/v1", price=PRICE) for arm in ("one", "four")}
    rails = [{"name": "cost_usd", "margin": 0.01}]
    experiment = {"name": "exp", "arms": arms, "min_outcomes": 5, "guardrails": rails}
    config = text_config({}, tmp_path, experiments=[experiment], decision_log=f"{tmp_path}/acts")
    async with serving(config) as (client, app):
        app.service.follower.close()
        router = app.service.endpoints.routers["exp"]
        loaded_arms = [arm for arm in router.arms.values() if isinstance(arm, ExternalArm)]
        for arm in loaded_arms:
            arm.transport = httpx.ASGITransport(DropsArms(router))
        answer = await post(client, "/v1/act", {"session_id": "s", "observations": {"assistant": "hello"}})
        assert answer["actions"] == {"assistant": "a b"} and len(loaded_arms) == 2 and not router.arms
        router.replace_arms({answer["arm"]: loaded_arms[0]})
        await post(client, "/v1/outcomes", {"session_id": "s", "value": 1})
        cost = dict(app.service.stores.units.metric_values("exp", "cost_usd"))
    [logged] = read_logged(f"{tmp_path}/acts", "exp")
    assert isinstance(logged, LoggedText) and (logged.text, logged.arm) == ("a b", answer["arm"])
    assert cost == {"s": pytest.approx(COST_USD)}


async def test_an_inference_whose_arms_are_dropped_meanwhile_names_its_bundle(config, monkeypatch):
    act = ArmBatcher.act
    async with serving(config) as (client, app):
        app.service.follower.close()
        router = app.service.endpoints.routers["exp"]
        digests = {name: arm.bundle.digest for name, arm in router.arms.items()}

        def act_and_drop(arm, *request):
            router.replace_arms({})
            return act(arm, *request)

        monkeypatch.setattr(ArmBatcher, "act", act_and_drop)
        answer = await client.post("/v2/models/exp/infer", json={"id": "s", "inputs": INPUTS})
        assert answer.status_code == 200 and not router.arms
    body = answer.json()
    assert body["model_version"] == digests[body["parameters"]["arm"]][:DIGEST_DIGITS]
