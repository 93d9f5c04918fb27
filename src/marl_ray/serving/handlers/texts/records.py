"""The records of a written response: a line of the act log, and copies of its request for the shadows."""

import time
from collections.abc import Mapping

from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.serving.arms.protocol import ResponseStart, TextRequest, is_text
from marl_ray.serving.handlers.texts.written_response import WrittenResponse
from marl_ray.serving.logs.acts import LoggedText
from marl_ray.serving.routing.assignment import SessionArm
from marl_ray.serving.routing.experiment.router import Router
from marl_ray.serving.service import Service


def log_text(
    service: Service,
    session_arm: SessionArm,
    assignment: Assignment,
    arm: str,
    digest: str,
    request: TextRequest,
    response: WrittenResponse,
) -> None:
    """Add a response to the act log, which must be configured.

    `digest` is that of the bundle that wrote it.
    """
    assert service.acts is not None
    start = response.start or ResponseStart([], {})
    prompt = request.prompt if isinstance(request.prompt, str) else None
    messages = [] if prompt is not None else [part for part in request.prompt if isinstance(part, Mapping)]
    guided = ["guide"] if request.is_json_object or request.must_call else []
    biased = ["bias"] if request.bias is not None else []
    service.acts.put(
        LoggedText(
            experiment=session_arm.router.config.name,
            unit=session_arm.session,
            arm=arm,
            digest=digest,
            epoch=assignment.epoch,
            propensity=assignment.propensity,
            at=time.time(),
            greedy=request.greedy,
            agent=request.agent,
            prompt=prompt,
            messages=messages,
            tools=request.tools,
            prompt_ids=start.prompt_ids,
            text=response.text,
            ids=response.ids,
            log_probs=response.log_probs,
            finish=response.finish,
            seed=request.seed,
            settings=start.settings,
            asked=[*sorted(request.changes), *guided, *biased],
        )
    )


def shadow_text(router: Router, request: TextRequest, response: WrittenResponse) -> None:
    """Send copies of the request to the shadows that are loaded now, after the answer."""
    arms = router.arms  # read once: a thread may drop a shadow, which must not fail the client's request
    for shadow in arms.state.shadows:
        text_arm = arms.get(shadow)
        if text_arm is not None and is_text(text_arm.bundle):
            router.shadows.send_text(shadow, text_arm, request, response.ids, response.log_probs, response.text)
