"""Text of language models: `/generate`."""

from collections.abc import AsyncIterator

from marl_ray.serving.errors import ServingError
from marl_ray.serving.handlers.texts.arm_request import agent_of, check_writes_text, make_text_request
from marl_ray.serving.handlers.texts.response_writer import TextResponseWriter, respond_with_text
from marl_ray.serving.handlers.texts.written_response import WrittenResponse
from marl_ray.serving.http.fields import attributes_of, boolean_field, cluster_of, session_id
from marl_ray.serving.http.messages import Request, RequestError, Response, Stream, server_sent_event
from marl_ray.serving.http.statuses import as_request_error
from marl_ray.serving.http.text_settings import SETTINGS, settings_of
from marl_ray.serving.service import Service

GENERATE_FIELDS = SETTINGS | {
    "experiment", "session_id", "cluster_id", "attributes", "agent", "prompt", "top_k", "stream",
}  # fmt: skip


async def generate(service: Service, request: Request) -> Response | Stream:
    """Answer `POST /generate`. Raises RequestError naming a wrong field, ServingError if no arm answers."""
    service.admission.admit(request, "inference")
    data = await request.read_object(GENERATE_FIELDS)
    routers = service.endpoints.acting_routers(data.get("experiment"))
    check_writes_text(routers[0].arms)
    session = session_id(data.get("session_id"), request)
    prompt = data.get("prompt")
    streamed = boolean_field(data, "stream")
    if not isinstance(prompt, str):
        raise RequestError(400, "prompt", "expected a text")
    settings = settings_of(data)
    session_arm = await service.assigner.assign(
        routers, session, cluster_of(data), attributes_of(data), service.admission.forced_arm(request)
    )
    check_writes_text(session_arm.arms)
    agent = agent_of(session_arm.arms, data.get("agent"))
    writer = TextResponseWriter(
        service, session_arm, make_text_request(service, agent, prompt, settings, streamed=streamed)
    )
    return await respond_with_text(request, writer, streamed, _format_answer, _stream_events)


def _format_answer(writer: TextResponseWriter, response: WrittenResponse) -> dict[str, object]:
    return writer.head | {
        "text": response.text,
        "tokens": response.ids,
        "log_probs": response.log_probs,
        "finish_reason": response.finish,
    }


async def _stream_events(writer: TextResponseWriter) -> AsyncIterator[bytes]:
    """Yield the parts of the answer; the last one names the arm."""
    try:
        while True:
            chunk = await writer.next()
            part = {"text": chunk.text, "tokens": chunk.ids, "log_probs": chunk.log_probs}
            if chunk.finish is not None:
                yield server_sent_event(writer.head | part | {"finish_reason": chunk.finish})
                return
            yield server_sent_event(part)
    except ServingError as error:  # the status has already been sent
        yield b"data: " + as_request_error(error).body() + b"\n\n"
