"""Large language models: each arm in its own Serve application, which streams through a handle."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from marl_ray.deadlines.shared_timer import Deadlines
from marl_ray.policies.bundles.language import TokenBundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.serving.arms.errors import ArmError, LostError, busy_error, new_pass_number
from marl_ray.serving.arms.handle_calls import answer_of, cached_handle
from marl_ray.serving.arms.protocol import ResponseChunk, TextRequest
from marl_ray.serving.arms.text.batcher import TextBatcher
from marl_ray.serving.errors import ServingError


class TextHost:
    """One replica of one arm. It computes with as many threads as Ray gives it CPUs."""

    def __init__(
        self,
        reference: str,
        digest: str,
        tracking_uri: str | None,
        max_batch: int,
        deadline_s: float,
        engine: str,
    ):
        bundle = load_bundle(reference, tracking_uri, digest)
        assert isinstance(bundle, TokenBundle)
        self._batcher = TextBatcher(bundle, max_batch, deadline_s, engine)

    async def write(self, request: TextRequest) -> AsyncIterator[ResponseChunk | ServingError | ArmError]:
        """Yield all chunks, or as the last item the arm's refusal or failure.

        Cancelling the call gives the response up.
        """
        reply = self._batcher.write(request)
        try:
            while True:
                chunk = await reply.next()
                yield chunk
                if chunk.finish is not None:
                    return
        except (ArmError, ServingError) as error:  # raised, it would come out as one of Ray's
            yield error
        finally:
            reply.leave()

    async def score(self, agent: str, prompt_ids: list[int], ids: list[int], text: str) -> tuple[int, float]:
        """See `ScoringArm.score`."""
        return await self._batcher.score(agent, prompt_ids, ids, text)


class RemoteTextArm:
    """An arm behind a handle."""

    def __init__(self, bundle: TokenBundle, handle: DeploymentHandle[Any], deadline_s: float):
        """`deadline_s` limits a token in the host; a host that says nothing gets half of it more."""
        self.bundle = bundle
        self._writing = cached_handle(
            handle, method_name="write", stream=True, request_serialization="pickle", response_serialization="pickle"
        )
        self._scoring = cached_handle(handle, method_name="score")
        self._deadlines = Deadlines()
        self._deadline_s = 1.5 * deadline_s

    async def score(self, agent: str, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> tuple[int, float]:
        """See `ScoringArm.score`; its caller has a deadline. Raises BusyError if the queue of the host is full."""
        scoring = self._scoring()
        tokens, log_prob = await answer_of(lambda: scoring.remote(agent, list(prompt_ids), list(ids), text))
        return int(tokens), float(log_prob)

    def write(self, request: TextRequest) -> "_RemoteReply":
        """Begin a response, and return it at once. What goes wrong comes with its first chunk."""
        return _RemoteReply(lambda: self._writing().remote(request), self._deadlines, self._deadline_s)

    def close(self) -> None:
        """Do nothing: this process holds nothing of the arm."""


class _RemoteReply:
    """A response that another process writes, a `Reply`.

    A call that is lost before its first chunk is sent once more.
    """

    def __init__(self, send: Callable[[], DeploymentResponseGenerator[Any]], deadlines: Deadlines, deadline_s: float):
        self._send = send
        self._deadlines = deadlines
        self._deadline_s = deadline_s
        self._chunks = send()
        self._may_repeat = True

    async def next(self) -> ResponseChunk:
        """See `Reply.next`; LostError after the deadline."""
        try:
            chunk: ResponseChunk | ServingError | ArmError = await self._deadlines.run(
                anext(self._chunks), self._deadline_s
            )
        except TimeoutError:
            raise LostError(f"no token within {self._deadline_s:g} s", new_pass_number()) from None
        except BackPressureError as error:
            raise busy_error(str(error)) from None
        except RayTaskError as error:
            raise ArmError(repr(error), new_pass_number()) from None
        # An actor that died, a connection and Serve raise errors of many kinds, and each means that the call is lost.
        except Exception as error:
            if not self._may_repeat:
                raise LostError(f"the call was lost: {error!r}", new_pass_number()) from None
            self._may_repeat = False
            self._chunks = self._send()
            return await self.next()
        self._may_repeat = False
        if isinstance(chunk, ArmError | ServingError):
            raise chunk
        return chunk

    def leave(self) -> None:
        self._chunks.cancel()
