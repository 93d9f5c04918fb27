"""A client that misspells a name is told the name that it may have meant."""

import pytest
from toy_serving.gateways import SEES, bearer, keyed_config, serving


@pytest.fixture
def gateway(bundles, tmp_path):
    return keyed_config(tmp_path, bundles, endpoint="maze")


async def refusal(client, arm: str | None = None, **more) -> tuple[int, str, str]:
    headers = bearer("ops") | ({} if arm is None else {"x-arm": arm})
    answer = await client.post("/v1/act", json={"session_id": "s", "observations": SEES} | more, headers=headers)
    error = answer.json()["error"]
    return answer.status_code, error["field"], error["message"]


async def test_a_misspelt_endpoint_experiment_or_arm_is_answered_with_a_known_one(gateway):
    async with serving(gateway) as (client, app):
        endpoint = await refusal(client, experiment="mase")
        experiment = await refusal(client, experiment="expp")
        arm = await refusal(client, "fuor")
        other = await refusal(client, "zzz")
        app.service.follower.close()
        app.service.endpoints.drop_arms(app.service.endpoints.routers["exp"], {"four"})
        dropped = await refusal(client, "four")
    assert endpoint == (404, "experiment", "unknown experiment 'mase'; did you mean maze?")
    assert experiment == (404, "experiment", "unknown experiment 'expp'; did you mean exp?")
    assert arm == (400, "x-arm", "'fuor' is unknown; did you mean four?")
    assert other == (400, "x-arm", "'zzz' is unknown; expected one of one, four")
    assert dropped == (400, "x-arm", "'four' is not loaded here; expected one of one")


async def test_a_name_of_any_length_is_compared_and_shown_in_part(gateway):
    async with serving(gateway) as (client, _):
        status, field, message = await refusal(client, experiment="maze" * 100_000)
    assert (status, field) == (404, "experiment") and len(message) < 200
