"""A text arm that was closed refuses the responses that it was still asked for."""

import asyncio

import pytest
from toy_serving.text_gateways import make_text_bundle

from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.serving.arms.protocol import TextRequest
from marl_ray.serving.arms.text.batcher import TextBatcher
from marl_ray.serving.errors import UnavailableError

REQUEST = TextRequest("writer", "hello", 5)


async def test_a_response_that_was_assigned_before_its_arm_was_closed_is_refused_at_once(tmp_path):
    arm = TextBatcher(load_bundle(make_text_bundle(tmp_path, 1, context=64)), 4, 60.0)
    first, late = arm.write(REQUEST), arm.write(REQUEST)
    await first.next()
    first.leave()
    await asyncio.to_thread(arm.close)
    with pytest.raises(UnavailableError, match=r"^this replica is closing the arm$"):
        await asyncio.wait_for(late.next(), 60)
    late.leave()
